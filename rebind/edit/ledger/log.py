"""The chained log of a ledger: an append-only file of events in which no line can be altered unnoticed.

Each line carries a digest of its own event and of the line before it. The chain starts with the digest of the
header, which is a file of its own. An event exists once its line is complete: readers ignore an unfinished line that
a crash left behind, and the next append drops it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from rebind.errors import InputError, LedgerError

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"

FORMAT = "rebind-ledger-1"
HEADER, LOG = "ledger.json", "log.jsonl"


def digest_of(value: JSON, previous: str = "") -> str:
    """Return the SHA-256 of a value, chained to the digest of the line before it."""
    return hashlib.sha256(previous.encode() + _canonical(value)).hexdigest()


def chain_lines(events: Iterable[Mapping[str, JSON]], previous: str) -> list[bytes]:
    """Return events as lines, the first one chained to the line with digest `previous`."""
    lines = []
    for event in events:
        previous = digest_of(event, previous)
        lines.append(_canonical({**event, "line": previous}) + b"\n")
    return lines


def parse_line(line: bytes) -> tuple[dict[str, Any], str]:
    """Return the event of a line and the digest that it states; raise ValueError if there are none."""
    event = json.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("line"), str):
        raise ValueError("no event with a digest")
    return event, event.pop("line")


def new_header(model: str, model_name: str, dtype: str = "") -> dict[str, str]:
    """Return the header of a new ledger for the model with this fingerprint."""
    header = {"format": FORMAT, "model": model, "model_name": model_name, "dtype": dtype, "created": utc_now()}
    return {**header, "digest": digest_of(header)}


def read_header(folder: Path) -> dict[str, str]:
    """Return the header of the ledger in a folder; raise LedgerError if there is no ledger, or a damaged one."""
    path = folder / HEADER
    try:
        header = json.loads(path.read_bytes())
        stated_digest, stated_format = header.pop("digest"), header["format"]
    except (FileNotFoundError, NotADirectoryError):
        raise LedgerError(
            f"There is no ledger in {folder}", expected=f"a folder that holds {HEADER}", code="no_ledger"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise damaged(f"{path} cannot be read ({problem!r})") from None
    if stated_format != FORMAT:
        raise damaged(f"{path} has the format {stated_format!r}, not {FORMAT!r}", "Use the rebind that wrote it")
    if digest_of(header) != stated_digest:
        raise damaged(f"{path} was altered: its digest does not match")
    return {**header, "digest": stated_digest}


def damaged(problem: str, advice: str = "Restore the folder from a copy") -> LedgerError:
    """Return the error for a file of a ledger that is missing or was altered."""
    return LedgerError(problem, advice=advice, code="ledger_damaged")


def utc_now() -> str:
    """Return the time, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _canonical(value: JSON) -> bytes:
    """Return the one JSON text of a value, so that equal values have equal digests."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as problem:
        raise InputError(
            f"The edit cannot be stored as JSON ({problem})",
            expected="settings, scores and versions of finite numbers, texts, lists and dictionaries",
            code="not_json",
        ) from None
