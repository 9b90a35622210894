"""The ledger: every edit of one model, stored so that any of them can be undone.

A ledger is a folder:

    ledger.json               header: format, fingerprint and name of the model, dtype, time of creation
    log.jsonl                 the events, one per line, append-only
    edits/e0001.safetensors   keys, values, gains and targets of one edit
    sealed/                   the tensors of edits that were compacted
    work/                     results of unfinished runs
    snapshots/                what can be computed again, to open the ledger faster
    lock                      held while writing

The lines of the log are chained, and the event of an edit carries the digest of its tensors, so any later change is
detected. The tensors are on disk before the line that refers to them. Readers take no lock. A ledger may come from
somebody else, so nothing in it is written through a symbolic link.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from safetensors.torch import save

from rebind.edit.ledger.compact import Compaction, compact, ledger_bytes, remove_leftovers
from rebind.edit.ledger.creation import LOCK, TIMEOUT, WORK, create
from rebind.edit.ledger.edit import JSON, Edit
from rebind.edit.ledger.edits import EditSequence, edit_id
from rebind.edit.ledger.log import (
    EDITS,
    FORMAT,
    HEADER,
    LOG,
    LedgerState,
    chain_lines,
    new_header,
    read_header,
    require_not_empty,
    utc_now,
)
from rebind.edit.ledger.snapshots import Snapshots
from rebind.edit.ledger.state_file import belongs_to, store_state, stored_state
from rebind.edit.ledger.table import SEALED
from rebind.edit.ledger.tensors import damaged
from rebind.edit.ledger.verify import verify_folder
from rebind.errors import InputError, RebindError, UnknownNameError
from rebind.storage import append_at, lock, open_to_read, path_inside, remove_temporaries, write_file


@dataclass(frozen=True)
class Diff:
    """The active edits of two ledgers, compared by facts, method and settings."""

    only_here: tuple[Edit, ...]
    only_there: tuple[Edit, ...]
    both: tuple[Edit, ...]


class Ledger:
    """The edits of one model, in order. Open one with `Ledger.open` or `Ledger.in_memory`."""

    def __init__(self, header: Mapping[str, str], path: Path | None, *, snapshots: bool = True) -> None:
        self.path = path
        self.model = header["model"]  # fingerprint of the base model
        self.model_name, self.dtype = header["model_name"], header["dtype"]
        self.timeout = TIMEOUT  # seconds to wait for another writer
        self.snapshots = None if path is None else Snapshots(path, enabled=snapshots)
        self._header_digest = header["digest"]
        self._state = LedgerState(header["digest"], path)
        self._log_inode = 0  # of the log that the state was read from; a compaction puts another one in its place
        self._stored_bytes = 0  # of the log, up to the state that is stored as a snapshot
        self._tidy = False  # whether this process has removed what killed writers left
        self._mutex = threading.RLock()  # between threads that read and write this object's state

    @classmethod
    def open(
        cls,
        path: str | Path,
        model: str | None = None,
        *,
        model_name: str = "",
        dtype: str = "",
        snapshots: bool = True,
    ) -> Ledger:
        """Open the ledger in a folder, or create one there for the model with this fingerprint.

        Without a model only an existing ledger is opened, whatever model it belongs to. A new ledger records the
        model's name and its dtype, such as "bfloat16", because a model has another fingerprint in another dtype.
        Without `snapshots` everything is read and computed anew, and nothing is stored to save time.
        """
        path = Path(path).expanduser()
        if model is not None and not (path / HEADER).exists():
            create(path, new_header(model, model_name, dtype))
        header = read_header(path)
        ledger = cls(header, path, snapshots=snapshots)
        if model is not None:
            ledger.require_model(model, model_name, dtype)
        ledger._refresh()
        return ledger

    @classmethod
    def in_memory(cls, model: str, model_name: str = "") -> Ledger:
        """Return a ledger that lives as long as the object."""
        return cls(new_header(model, model_name), None)

    def __repr__(self) -> str:
        name, place = self.model_name or self.model[:12], self.path or "in memory"
        return f"Ledger({name}, {place}: {len(self.active)} of {len(self.edits)} active)"

    @property
    def work_folder(self) -> Path | None:
        """Where unfinished runs store their results; None for a ledger in memory."""
        return None if self.path is None else path_inside(self.path, f"{WORK}/results").parent

    @property
    def edits(self) -> EditSequence:
        """All edits in the order in which they were made, including undone ones; each is read when it is needed."""
        with self._mutex:
            self._refresh()
            return self._state.edits

    @property
    def active(self) -> EditSequence:
        """The edits that are in the weights. An edit that was undone and redone is back at its old position."""
        with self._mutex:
            self._refresh()
            return self._state.active

    def get(self, id: str) -> Edit:
        """Return the edit with this id, or with the only id that starts with it."""
        with self._mutex:
            self._refresh()
            return self._state.read([self._row(id)])[0]

    def _row(self, id: str) -> int:
        row = self._state.row(id)
        if row is not None:
            return row
        ids = self._state.edits.ids
        matches = [name for name in ids if id and name.startswith(id)]
        if len(matches) == 1:
            return ids.index(matches[0])
        candidates = matches or get_close_matches(id, ids, n=3) or ids[-3:]
        raise UnknownNameError(
            f"{len(matches) or 'No'} edits have an id that starts with {id!r}",
            expected=f"one id, such as {', '.join(candidates[:3])}" if candidates else "",
            code="ambiguous_edit" if matches else "unknown_edit",
        )

    def is_active(self, id: str) -> bool:
        """Return whether an edit is in the weights."""
        with self._mutex:
            self._refresh()
            return not self._state.is_undone(self._row(id))

    @property
    def sealed(self) -> EditSequence:
        """The edits that were compacted: they are active, and cannot be undone any more."""
        with self._mutex:
            self._refresh()
            return EditSequence(self._state, self._state.table.with_flag(SEALED, on=True))

    def append(self, edit: Edit) -> Edit:
        """Record an edit and return it with its id: on disk when this returns, or not recorded at all."""
        edit = edit.loaded()
        edit.require_complete()  # an edit that could not be applied later is refused now
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sorted(edit.tensors.items())
        }
        data = b"" if self.path is None else save(tensors, metadata={"format": FORMAT})
        with self.locked():
            id, now = self._state.next_id, utc_now()
            edit = replace(edit, id=id, created=edit.created or now, tensors=tensors)
            sha256 = hashlib.sha256(data).hexdigest()
            event = {"event": "edit", "id": id, "time": now, **edit.to_json(), "sha256": sha256}
            lines = list(chain_lines([event], self._state.digest))  # before any file is written: it may refuse the edit
            file = None if self.path is None else self._free_file(id)
            try:
                if file is not None:
                    write_file(file, data, staging=self.path)
                self._commit(lines, edit if file is None else None)
            except BaseException:
                with self._mutex:
                    self._refresh()
                    if file is not None and self._state.row(id) is None:  # no line refers to the file
                        file.unlink(missing_ok=True)
                raise
            row = self._state.row(id)
            assert row is not None
            return self._state.read([row])[0]

    def _free_file(self, id: str) -> Path:
        """Return where the tensors of a new edit go. A writer that was killed may have left one file, not more."""
        assert self.path is not None
        file = path_inside(self.path, f"{EDITS}/{id}.safetensors")
        following = file.with_name(f"{edit_id(int(id[1:]) + 1)}.safetensors")
        if file.exists() and following.exists():
            raise damaged(
                f"{self.path / LOG} has no line for {file.name} and {following.name}: it has lost lines",
                "Restore the log from a copy, or move these files and all later ones elsewhere",
            )
        return file

    def compact(self, *, before: str | None = None, keep_last: int | None = None, dry_run: bool = False) -> Compaction:
        """Squash the edits before an edit, or all but the `keep_last` last ones.

        They can no longer be undone one by one. The active ones are stored together, without what only `show` needs;
        the undone ones are dropped. The model stays as it is, byte for byte. With `dry_run` nothing is changed.
        """
        if self.path is None:
            raise InputError("A ledger in memory has nothing to compact", code="ledger_in_memory")
        with self.locked():
            number = None if before is None else int(self._state.table.rows["number"][self._row(before)])
            result = compact(self.path, self._state, self._header_digest, number, keep_last, dry_run=dry_run)
            if not dry_run:
                self._refresh()
                remove_leftovers(self.path, self._state)
                result = replace(result, bytes_after=ledger_bytes(self.path))
            return result

    def undo(self, id: str) -> Edit:
        """Take an edit out of the weights; it stays in the ledger."""
        return self.switch([id], on=False)[0]

    def redo(self, id: str, *, forced: bool = False) -> Edit:
        """Put an undone edit back at its old position; `forced` records that it failed a check."""
        return self.switch([id], on=True, forced=[self.get(id).id] if forced else [])[0]

    def switch(self, ids: Sequence[str], *, on: bool, forced: Collection[str] = ()) -> tuple[Edit, ...]:
        """Redo (`on`) or undo several edits, all or none. A repeated id counts once.

        `forced` holds the ids of those that failed a check, which the log records.
        """
        with self.locked():
            rows = {edit_id(int(self._state.table.rows["number"][row])): row for row in map(self._row, ids)}
            for id, row in rows.items():
                if self._state.table.has_flag(row, SEALED):
                    raise InputError(
                        f"Edit {id} was compacted, so it can no longer be undone or redone by itself",
                        advice="Write the old fact again, or go back to a copy of the ledger",
                        code="sealed_edit",
                    )
                if on is not self._state.is_undone(row):
                    state = "active" if on else "undone"
                    raise InputError(f"Edit {id} is already {state}", code=f"already_{state}")
            self._require_consolidated_together(set(rows), on=on)
            event: dict[str, JSON] = {"event": "redo" if on else "undo", "time": utc_now(), "ids": list(rows)}
            if marked := [id for id in rows if id in forced]:
                event["forced"] = marked
            if rows:
                self._commit(list(chain_lines([event], self._state.digest)))
            return tuple(self._state.read(rows.values()))

    def _require_consolidated_together(self, ids: set[str], *, on: bool) -> None:
        """Raise if facts would be in the weights although the edit that they come from is not active."""
        consolidations = self._state.edits.where(lambda kind: kind.consolidates)
        if not len(consolidations):
            return
        active = set(self._state.active.ids)
        active = active | ids if on else active - ids
        known = set(self._state.edits.ids)  # a compaction drops undone edits
        for edit in consolidations:
            sources = [id for id in edit.consolidates if id in known and id not in active]
            if edit.id in active and sources:
                first, second = (sources[0], "Redo") if on else (edit.id, "Undo")
                raise InputError(
                    f"Edit {edit.id} moved facts of edit {sources[0]} into the weights",
                    expected="both of them active, or the first one undone",
                    advice=f"{second} edit {first} first",
                    code="consolidated_edit",
                )

    def require_model(self, model: str, name: str = "", dtype: str = "") -> None:
        """Raise unless the ledger belongs to the model with this fingerprint, which another dtype changes."""
        if self.model == model:
            return
        theirs, ours = (
            f"{name or 'a model'}{f' in {dtype}' if dtype else ''} ({fingerprint[:12]}…)"
            for name, dtype, fingerprint in ((self.model_name, self.dtype, self.model), (name, dtype, model))
        )
        raise InputError(
            f"The ledger {self.path or 'in memory'} belongs to {theirs}, not to {ours}",
            advice=f"Load that model{' with {dtype}' if self.dtype else ''}, or choose another folder for the ledger",
            settings={"dtype": self.dtype},
            code="ledger_of_other_model",
        )

    def diff(self, other: Ledger) -> Diff:
        """Compare the active edits of two ledgers."""
        here, there = tuple(self.active), tuple(other.active)
        only_here, only_there = _surplus(here, there), _surplus(there, here)
        surplus = {id(edit) for edit in only_here}
        return Diff(only_here, only_there, tuple(edit for edit in here if id(edit) not in surplus))

    def verify(self, *, full: bool = False) -> list[str]:
        """Return what is wrong with the ledger, read again from disk; an empty list if it is intact.

        What was verified before and did not change since is not read again, unless `full` asks for it.
        """
        return [] if self.path is None else verify_folder(self.path, full=full)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers out; everything they wrote before is visible inside. May be nested."""
        if self.path is None:
            with self._mutex:
                yield
            return
        with lock(self.path / LOCK, self.timeout):
            self._refresh()
            if not self._tidy:
                remove_temporaries(self.path)  # of writers that were killed: no other one is at work
                remove_leftovers(self.path, self._state)
                self._tidy = True
            yield

    def _commit(self, lines: Sequence[bytes], edit: Edit | None = None) -> None:
        """Add lines to the log in one write, and their events to the state."""
        with self._mutex:  # a reader between the two steps would apply the events itself
            if self.path is not None:
                append_at(self.path / LOG, self._state.offset, b"".join(lines))
            for line in lines:
                self._state.read_line(line, edit)
            self._store_state()

    def _refresh(self) -> None:
        """Apply what was appended since the last look, except a line that is not finished."""
        if self.path is None:
            return
        with self._mutex:
            log = self.path / LOG
            try:
                with open_to_read(log) as file:
                    status = os.fstat(file.fileno())
                    if status.st_ino != self._log_inode and (not self._log_inode or not belongs_to(self._state, file)):
                        self._begin()
                    self._log_inode = status.st_ino
                    if status.st_size < self._state.offset:
                        raise damaged(f"{log} has become shorter since it was last read")
                    self._read_lines(file)
            except OSError as problem:
                raise damaged(f"{log} cannot be read ({problem})") from None
            require_not_empty(log, self._state)
            self._store_state()

    def _begin(self) -> None:
        """Read the log from its beginning, or from where a snapshot ends."""
        assert self.path is not None
        assert self.snapshots is not None
        fresh = LedgerState(self._header_digest, self.path)
        self._state = stored_state(self.snapshots, self.path, self._header_digest) or fresh
        self._stored_bytes = self._state.offset

    def _read_lines(self, file: BinaryIO) -> None:
        state = self._state
        file.seek(state.offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                state.read_line(line)
            except (ValueError, RebindError) as problem:
                raise damaged(
                    f"Line {state.lines + 1} of {LOG} in {self.path} was altered or damaged ({problem})",
                    "Restore the folder from a copy. Or delete this line and all that follow, and the files of their "
                    f"edits in {EDITS}: earlier edits remain",
                ) from None

    def _store_state(self) -> None:
        if self.snapshots is not None:
            self._stored_bytes = store_state(self.snapshots, self._state, self._header_digest, self._stored_bytes)


def _surplus(edits: Sequence[Edit], others: Sequence[Edit]) -> tuple[Edit, ...]:
    """Return the edits that `others` do not hold; of equal edits the later ones."""
    unmatched = Counter(edit.digest for edit in others)
    surplus = []
    for edit in edits:
        if unmatched[edit.digest]:
            unmatched[edit.digest] -= 1
        else:
            surplus.append(edit)
    return tuple(surplus)
