"""A log that is only ever appended to, one event a line, in which nothing can be altered unnoticed.

A line carries the digest of its event and of the line before; the first line's chain begins with the
digest of the header, a file of its own. An event exists once its line is whole: a line that a crash cut
short is ignored, then dropped by the next append.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from rebind.errors import InputError, LedgerError, StorageError

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"

FORMAT = "rebind-ledger-1"
HEADER, LOG = "ledger.json", "log.jsonl"
RESTORE = "restore the folder from a copy"


def canonical(value: JSON) -> bytes:
    """One way to write a value, so that equal values have equal digests."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as problem:
        raise InputError(
            f"the edit cannot be written down as JSON ({problem}), expected settings, scores and versions of plain "
            f"finite numbers, texts, lists and dicts with text keys: convert them first"
        ) from None


def digest_of(value: JSON, previous: str = "") -> str:
    return hashlib.sha256(previous.encode() + canonical(value)).hexdigest()


def parse_line(raw: bytes) -> tuple[dict[str, Any], str]:
    """A line's event and the digest it states; ValueError where there are none."""
    event = json.loads(raw)
    if not isinstance(event, dict) or not isinstance(event.get("line"), str):
        raise ValueError("no event with a digest")
    return event, event.pop("line")


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines, and what a crash left of the next one."""
    *lines, torn = data.split(b"\n")
    return lines, torn


def append_lines(log: Path, offset: int, lines: bytes) -> None:
    """Write lines behind the last whole one, over what a crash may have left there; all of them or none."""
    try:
        with log.open("r+b", buffering=0) as file:
            try:
                file.truncate(offset)
                file.seek(offset)
                rest = memoryview(lines)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):  # if this fails too, an unfinished line is ignored
                    file.truncate(offset)
                raise
    except OSError as problem:
        raise storage_error(log, problem) from problem


def new_header(model: str, model_name: str, *, place: str = "", dtype: str = "", stamp: str = "") -> dict[str, Any]:
    """Whose edits these are; `place` (where the model lay), `dtype` and `stamp` only where they are known.

    The stamp tells other weights in that place without reading them whole. Ledgers of earlier versions have none of
    the three, and those versions read a header that has them.
    """
    known = {name: value for name, value in (("place", place), ("dtype", dtype), ("stamp", stamp)) if value}
    header = {"format": FORMAT, "model": model, "model_name": model_name, "created": utc_now(), **known}
    return {**header, "digest": digest_of(header)}


def read_header(folder: Path) -> dict[str, Any]:
    path = folder / HEADER
    try:
        header = json.loads(path.read_bytes())
        stated = header.pop("digest")
        name = header["format"], header["model"], header["model_name"], header["created"]
    except FileNotFoundError:
        raise LedgerError(f"no ledger in {folder} ({HEADER} is missing): name a folder that holds one") from None
    except NotADirectoryError:
        raise LedgerError(f"{folder} is a file, expected a ledger's folder: name a folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise LedgerError(f"{path} cannot be read ({problem!r}): {RESTORE}") from None
    if name[0] != FORMAT:
        raise LedgerError(f"{path} has format {name[0]!r}, expected {FORMAT!r}: use the rebind that wrote it")
    if digest_of(header) != stated:
        raise LedgerError(f"{path} was altered (its digest does not fit): {RESTORE}")
    return {**header, "digest": stated}


def storage_error(path: Path, problem: OSError) -> StorageError:
    error = StorageError(
        f"cannot write {path} ({problem.strerror or problem}), the ledger is as it was: free some space, or get "
        f"write access to the folder"
    )
    error.errno = problem.errno
    return error


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def short(digest: str) -> str:
    return f"{digest[:12]}…" if len(digest) > 12 else digest
