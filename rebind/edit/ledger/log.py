"""The log of a ledger: chained lines of events, what they add up to, and the check that nothing was altered.

Each line carries a digest of its own event and of the line before it. The chain starts with the digest of the
header, which is a file of its own. An event exists once its line is complete: readers ignore an unfinished line that
a crash left behind, and the next append drops it. The tensors of an edit stay on disk until they are needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rebind.edit.ledger.edit import JSON, Edit, canonical_json, digest_of
from rebind.errors import LedgerError, RebindError

FORMAT = "rebind-ledger-1"
HEADER, LOG = "ledger.json", "log.jsonl"
EDITS = "edits"  # the folder of the tensors, one file per edit


def chain_lines(events: Iterable[Mapping[str, JSON]], previous: str) -> list[bytes]:
    """Return events as lines, the first one chained to the line with digest `previous`."""
    lines = []
    for event in events:
        previous = digest_of(event, previous)
        lines.append(canonical_json({**event, "line": previous}) + b"\n")
    return lines


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


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of an edit on disk, read on access. The digest of the file is checked before the first read."""

    def __init__(self, path: Path, sha256: str) -> None:
        self.path, self.sha256 = path, sha256
        self._checked = False

    def __getitem__(self, name: str) -> Tensor:
        with self._open() as file:
            if name not in file.keys():  # noqa: SIM118 - the file is not a mapping
                raise KeyError(name)
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        with self._open() as file:
            return iter(tuple(file.keys()))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        advice = f"Restore the file from a copy, or undo edit {self.path.stem}"
        try:
            if not self._checked:
                with self.path.open("rb") as data:
                    if hashlib.file_digest(data, "sha256").hexdigest() != self.sha256:
                        raise damaged(f"{self.path} was altered: its digest does not match the log", advice)
                self._checked = True
            with safe_open(str(self.path), framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as problem:
            raise damaged(f"{self.path} cannot be read ({problem})", advice) from None


@dataclass
class LedgerState:
    """The edits after the lines so far, and where the next line goes."""

    digest: str  # of the last line, or of the header if there is none
    folder: Path | None = None  # the ledger's; None if it is in memory
    offset: int = 0  # bytes of the log that were read
    lines: int = 0
    edits: dict[str, Edit] = field(default_factory=dict)  # by id, in order
    undone: set[str] = field(default_factory=set)

    @property
    def next_id(self) -> str:
        return f"e{len(self.edits) + 1:04d}"

    def read_line(self, line: bytes, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Apply the event of a line, which ends in a newline; raise ValueError if it does not continue the chain."""
        event, digest = _parse_line(line)
        if digest_of(event, self.digest) != digest:
            raise ValueError("its digest does not match")
        self.apply(event, tensors)
        self.digest = digest
        self.offset += len(line)
        self.lines += 1

    def apply(self, event: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Apply an event, or raise ValueError and change nothing. Without `tensors` an edit's are read from disk."""
        kind, id = event.get("event"), event.get("id")
        if kind == "edit" and id == self.next_id:
            if self.folder is not None:
                tensors = StoredTensors(self.folder / EDITS / f"{id}.safetensors", str(event.get("sha256")))
            try:
                self.edits[id] = Edit.from_json(id, event, {} if tensors is None else tensors)
            except (KeyError, TypeError, AttributeError) as problem:
                raise ValueError(f"an incomplete edit ({problem!r})") from None
        elif kind == "undo" and id in self.edits and id not in self.undone:
            self.undone.add(id)
        elif kind == "redo" and id in self.undone:
            self.undone.remove(id)
            if event.get("forced") is True:
                self.edits[id] = replace(self.edits[id], forced=True)
        else:
            raise ValueError(f"the event {kind!r} of {id!r} cannot follow the events before it")


def _parse_line(line: bytes) -> tuple[dict[str, Any], str]:
    """Return the event of a line and the digest that it states; raise ValueError if there are none."""
    event = json.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("line"), str):
        raise ValueError("no event with a digest")
    return event, event.pop("line")


def verify_folder(path: str | Path) -> list[str]:
    """Return what is wrong with the ledger in a folder, even one too damaged to open; an empty list if it is intact.

    Every digest is computed anew. Not detectable are undo and redo lines that were cut off whole at the end of the
    log, an edit cut off there together with its tensors, and a ledger that was rewritten with matching digests.
    """
    path = Path(path)
    try:
        header = read_header(path)
        *lines, unfinished = (path / LOG).read_bytes().split(b"\n")
    except LedgerError as problem:
        return [str(problem)]
    except OSError as problem:
        return [f"{path / LOG} cannot be read ({problem})."]
    problems: list[str] = []
    state = LedgerState(header["digest"], path)
    for number, line in enumerate(lines, start=1):
        try:
            event, stated = _parse_line(line)
            if digest_of(event, state.digest) != stated:
                problems.append(f"Line {number} of {LOG}, or the line before it, was altered.")
            state.digest = stated  # so that one altered line is one problem
            state.apply(event)
        except (ValueError, RebindError) as problem:
            problems.append(f"Line {number} of {LOG} is damaged ({problem}).")
    if unfinished:
        problems.append(f"{LOG} ends in an unfinished line of {len(unfinished)} bytes; the next edit drops it.")
    for edit in state.edits.values():
        try:
            edit.require_complete()
        except RebindError as problem:
            problems.append(f"Edit {edit.id}: {problem}")
    known = {f"{id}.safetensors" for id in state.edits}
    files = sorted(file.name for file in (path / EDITS).glob("*") if not file.name.startswith("."))
    return problems + [f"{EDITS}/{name} belongs to no line of {LOG}." for name in files if name not in known]
