"""The log of a ledger: chained lines of events, and the state that they add up to.

Each line carries a digest of its own event and of the line before it. The chain starts with the digest of the
header, which is a file of its own. An event exists once its line is complete: readers ignore an unfinished line that
a crash left behind, and the next append drops it. The events are

    begin      the first line of every new log, so that an empty log is a damaged one
    edit       an edit, with the digest of its tensors
    undo, redo some edits, by their ids: all of them in one line, so that no crash can leave a part
    compact    the first line of a compacted log; sealed edits follow it
    sealed     an edit that can no longer be undone by itself (`rebind.edit.ledger.compact`)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from rebind.edit.ledger.edit import JSON, Edit, canonical_json, digest_of
from rebind.edit.ledger.edits import EditSequence, edit_id
from rebind.edit.ledger.table import FORCED, SEALED, UNDONE, EditTable, short_digest
from rebind.edit.ledger.tensors import StoredTensors, damaged
from rebind.errors import LedgerError
from rebind.storage import open_to_read, read_file

FORMAT = "rebind-ledger-1"
HEADER, LOG = "ledger.json", "log.jsonl"
EDITS = "edits"  # the folder of the tensors, one file per edit
SEALED_FOLDER = "sealed"  # the folder of the tensors of sealed edits, in one file
SEALED_NAME = re.compile(r"[0-9a-f]{16}\.pack")
CACHED_EDITS = 4096  # that were read last; their tensors are not kept


def chain_lines(events: Iterable[Mapping[str, JSON]], previous: str) -> Iterator[bytes]:
    """Yield events as lines, the first one chained to the line with digest `previous`."""
    for event in events:
        previous = digest_of(event, previous)
        yield canonical_json({**event, "line": previous}) + b"\n"


def new_header(model: str, model_name: str, dtype: str = "") -> dict[str, str]:
    """Return the header of a new ledger for the model with this fingerprint."""
    header = {"format": FORMAT, "model": model, "model_name": model_name, "dtype": dtype, "created": utc_now()}
    return {**header, "digest": digest_of(header)}


def read_header(folder: Path) -> dict[str, str]:
    """Return the header of the ledger in a folder; raise LedgerError if there is no ledger, or a damaged one."""
    path = folder / HEADER
    try:
        header = json.loads(read_file(path))
        stated_digest, stated_format = header.pop("digest"), header["format"]
    except (FileNotFoundError, NotADirectoryError):
        raise LedgerError(
            f"There is no ledger in {folder}", expected=f"a folder that holds {HEADER}", code="no_ledger"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise damaged(f"{path} cannot be read ({problem!r})") from None
    if stated_format != FORMAT:
        raise damaged(f"{path} has the format {stated_format!r}, not {FORMAT!r}", "Use the rebind that wrote it")
    if digest_of(header) != stated_digest:
        raise damaged(f"{path} was altered: its digest does not match")
    return {**header, "digest": stated_digest}


def utc_now() -> str:
    """Return the time, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class LedgerState:
    """The edits after the lines so far, and where the next line goes."""

    digest: str  # of the last line, or of the header if there is none
    folder: Path | None = None  # the ledger's; None if it is in memory
    offset: int = 0  # bytes of the log that were read
    lines: int = 0
    table: EditTable = field(default_factory=EditTable)
    last_number: int = 0  # of the last edit, which a compaction may have dropped
    last_line: tuple[int, int] = (0, 0)  # where it begins, and its digest
    sealed_file: str = ""  # with the tensors of sealed edits
    compacted_until: int = 0  # number of the last edit that was sealed or dropped
    _edits: dict[int, Edit] = field(default_factory=dict)  # by row: all edits in memory, those read last on disk

    @property
    def next_id(self) -> str:
        return edit_id(self.last_number + 1)

    @property
    def edits(self) -> EditSequence:
        """All edits, including undone ones."""
        return EditSequence(self, self.table.with_flag(0, on=False))

    @property
    def active(self) -> EditSequence:
        """The edits that are in the model."""
        return EditSequence(self, self.table.with_flag(UNDONE, on=False))

    def row(self, id: object) -> int | None:
        """Return the row of the edit with this id; None if there is none."""
        if not isinstance(id, str) or id[:1] != "e" or not id[1:].isdecimal() or len(id) > 10:
            return None
        number = int(id[1:])
        return self.table.row_of(number) if edit_id(number) == id else None

    def is_undone(self, row: int) -> bool:
        return self.table.has_flag(row, UNDONE)

    # Reading edits again

    def read(self, rows: Iterable[int]) -> list[Edit]:
        """Return the edits in some rows, from the log; raise LedgerError if their lines were altered."""
        rows = list(rows)
        if self.folder is not None and any(row not in self._edits for row in rows):
            path = self.folder / LOG
            try:
                with open_to_read(path) as file:
                    read = {row: self._edits.get(row) or self._read_edit(file, row) for row in rows}
            except OSError as problem:
                raise damaged(f"{path} cannot be read ({problem})") from None
            self._cache(read)
            return [read[row] for row in rows]
        return [self._edits[row] for row in rows]

    def _cache(self, edits: Mapping[int, Edit]) -> None:
        """Keep edits; those of a ledger on disk only until enough others were read."""
        self._edits |= edits
        while self.folder is not None and len(self._edits) > CACHED_EDITS:
            self._edits.pop(next(iter(self._edits)))

    def _read_edit(self, file: Any, row: int) -> Edit:
        stored = self.table.rows[row]
        file.seek(int(stored["start"]))
        line = file.read(int(stored["length"]))
        if short_digest(line) != int(stored["check"]):
            id = edit_id(int(stored["number"]))
            raise damaged(
                f"The line of edit {id} in {self.folder} was altered, or the log was replaced",
                "Open the ledger again; if that fails, restore the folder from a copy",
            )
        event, _ = parse_line(line)
        edit = self._edit(event, stored["token"].tobytes())
        return self._forced(edit) if stored["flags"] & FORCED else edit

    def _edit(self, event: Mapping[str, Any], token: bytes) -> Edit:
        """Return the edit of an event; its tensors stay on disk. Raise ValueError if the event is incomplete."""
        id = str(event["id"])
        tensors: Mapping[str, Tensor] = {}
        try:
            sha256 = str(event["sha256"])
            if event["event"] == "sealed":
                event = {**event, "scores": {}, "versions": {}}
                tensors = self._sealed_tensors(sha256, int(event["start"]), int(event["length"]))
            elif self.folder is not None:
                tensors = StoredTensors(self.folder / EDITS / f"{id}.safetensors", sha256)
            return Edit.from_json(id, event, tensors).with_token(token)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as problem:
            raise ValueError(f"an incomplete edit ({problem!r})") from None

    def _sealed_tensors(self, sha256: str, start: int, length: int) -> StoredTensors:
        if self.folder is None or not 0 <= start <= start + length < 2**63:
            raise ValueError("no place of the tensors")
        return StoredTensors(self.folder / SEALED_FOLDER / self.sealed_file, sha256, start, length)

    def _forced(self, edit: Edit) -> Edit:
        return replace(edit, forced=True).with_token(edit.token)

    # Events

    def read_line(self, line: bytes, edit: Edit | None = None) -> None:
        """Apply the event of a line, which ends in a newline; raise ValueError if it does not continue the chain.

        An edit of a ledger in memory is passed with its tensors.
        """
        event, stated = parse_line(line)
        content = canonical_json(event)
        if hashlib.sha256(self.digest.encode() + content).hexdigest() != stated:
            raise ValueError("its digest does not match")
        self.apply(event, line, content, edit)
        self.digest = stated

    def apply(self, event: Mapping[str, Any], line: bytes, content: bytes, edit: Edit | None = None) -> None:
        """Apply the event of a line, or raise ValueError and change nothing."""
        kind, id = event.get("event"), event.get("id")
        if kind in ("undo", "redo"):
            self._switch(kind == "redo", event)
        elif kind == "edit" and id == self.next_id:
            token = hashlib.sha256(content).digest()[:16] if edit is None else edit.token
            self._add(self._edit(event, token) if edit is None else edit, line, 0)
        elif kind == "sealed" and self.sealed_file and _number(id) > self._last_row_number:
            self._add(self._edit(event, _token(event)), line, SEALED)
        elif kind == "compact" and self.lines == 0:
            self._begin_compacted(event)
        elif not (kind == "begin" and self.lines == 0):
            raise ValueError(f"the event {kind!r} of {id!r} cannot follow the events before it")
        self.last_line = (self.offset, short_digest(line))
        self.offset += len(line)
        self.lines += 1

    def _begin_compacted(self, event: Mapping[str, Any]) -> None:
        file = event.get("file")
        if not isinstance(file, str) or not SEALED_NAME.fullmatch(file):
            raise ValueError("an incomplete compaction")
        self.last_number = self.compacted_until = _number(event.get("last"))
        self.sealed_file = file

    @property
    def _last_row_number(self) -> int:
        return int(self.table.rows["number"][-1]) if len(self.table) else 0

    def _add(self, edit: Edit, line: bytes, flags: int) -> None:
        number = _number(edit.id)
        if flags & SEALED and number > self.compacted_until:
            raise ValueError(f"{edit.id} lies behind the compacted edits")
        self.table.append(number, edit, edit.token, flags, self.offset, line)
        self.last_number = max(self.last_number, number)
        self._cache({len(self.table) - 1: edit})

    def _switch(self, on: bool, event: Mapping[str, Any]) -> None:
        ids, forced = event.get("ids"), event.get("forced", [])
        if not isinstance(ids, list) or not ids or not isinstance(forced, list):
            raise ValueError("no ids")
        rows = [self.row(id) for id in ids]
        if len(set(rows)) != len(rows):
            raise ValueError("an id twice")
        for id, row in zip(ids, rows, strict=True):
            if row is None or self.is_undone(row) is not on or self.table.has_flag(row, SEALED):
                raise ValueError(f"the event {event['event']!r} of {id!r} cannot follow the events before it")
        for id, row in zip(ids, rows, strict=True):
            assert row is not None
            self.table.set_flag(row, UNDONE, not on)
            if on and id in forced:
                self.table.set_flag(row, FORCED, True)
                if row in self._edits:
                    self._edits[row] = self._forced(self._edits[row])


def parse_line(line: bytes) -> tuple[dict[str, Any], str]:
    """Return the event of a line and the digest that it states; raise ValueError if there are none."""
    try:
        event = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(event, dict) or not isinstance(event.get("line"), str):
        raise ValueError("no event with a digest")
    return event, event.pop("line")


def _token(event: Mapping[str, Any]) -> bytes:
    token = bytes.fromhex(str(event.get("token")))
    if len(token) != 16:
        raise ValueError("no token")
    return token


def _number(id: object) -> int:
    if not isinstance(id, str) or id[:1] != "e" or not id[1:].isdecimal() or len(id) > 10:
        raise ValueError(f"{id!r} is no id of an edit")
    return int(id[1:])


def require_not_empty(path: Path, state: LedgerState) -> None:
    """Raise if a log has no complete line: a log begins with one when it is created."""
    if not state.lines:
        raise damaged(f"{path} is empty, and no ledger has an empty log")
