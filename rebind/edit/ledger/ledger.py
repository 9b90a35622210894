"""The ledger: every edit of one model, stored so that any of them can be undone.

A ledger is a folder:

    ledger.json               header: format, fingerprint and name of the model, dtype, time of creation
    log.jsonl                 the events, one per line, append-only
    edits/e0001.safetensors   keys, values, gains and targets of one edit
    work/                     results of unfinished runs
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

from safetensors.torch import save
from torch import Tensor

from rebind.edit.ledger.edit import JSON, Edit
from rebind.edit.ledger.log import (
    EDITS,
    FORMAT,
    HEADER,
    LOG,
    LedgerState,
    chain_lines,
    damaged,
    new_header,
    read_header,
    utc_now,
    verify_folder,
)
from rebind.errors import InputError, RebindError, UnknownNameError
from rebind.storage import append_at, lock, make_folders, path_inside, write_file, write_json

LOCK, WORK = "lock", "work"
TIMEOUT = 60.0


@dataclass(frozen=True)
class Diff:
    """The active edits of two ledgers, compared by facts, method and settings."""

    only_here: tuple[Edit, ...]
    only_there: tuple[Edit, ...]
    both: tuple[Edit, ...]


class Ledger:
    """The edits of one model, in order. Open one with `Ledger.open` or `Ledger.in_memory`."""

    def __init__(self, header: Mapping[str, str], path: Path | None) -> None:
        self.path = path
        self.model = header["model"]  # fingerprint of the base model
        self.model_name, self.dtype = header["model_name"], header["dtype"]
        self.timeout = TIMEOUT  # seconds to wait for another writer
        self._state = LedgerState(header["digest"], path)
        self._mutex = threading.RLock()  # between threads that read and write this object's state

    @classmethod
    def open(cls, path: str | Path, model: str | None = None, *, model_name: str = "", dtype: str = "") -> Ledger:
        """Open the ledger in a folder, or create one there for the model with this fingerprint.

        Without a model only an existing ledger is opened, whatever model it belongs to. A new ledger records the
        model's name and its dtype, such as "bfloat16", because a model has another fingerprint in another dtype.
        """
        path = Path(path).expanduser()
        if model is not None and not (path / HEADER).exists():
            _create(path, new_header(model, model_name, dtype))
        header = read_header(path)
        ledger = cls(header, path)
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
    def edits(self) -> tuple[Edit, ...]:
        """All edits in the order in which they were made, including undone ones."""
        with self._mutex:
            self._refresh()
            return tuple(self._state.edits.values())

    @property
    def active(self) -> tuple[Edit, ...]:
        """The edits that are in the weights. An edit that was undone and redone is back at its old position."""
        with self._mutex:
            self._refresh()
            return tuple(edit for id, edit in self._state.edits.items() if id not in self._state.undone)

    def get(self, id: str) -> Edit:
        """Return the edit with this id, or with the only id that starts with it."""
        edits = {edit.id: edit for edit in self.edits}
        matches = [id] if id in edits else [name for name in edits if id and name.startswith(id)]
        if len(matches) == 1:
            return edits[matches[0]]
        candidates = matches or get_close_matches(id, edits, n=3) or list(edits)[-3:]
        raise UnknownNameError(
            f"{len(matches) or 'No'} edits have an id that starts with {id!r}",
            expected=f"one id, such as {', '.join(candidates[:3])}" if candidates else "",
            code="ambiguous_edit" if matches else "unknown_edit",
        )

    def is_active(self, id: str) -> bool:
        """Return whether an edit is in the weights."""
        return self.get(id).id not in self._state.undone

    def append(self, edit: Edit) -> Edit:
        """Record an edit and return it with its id: on disk when this returns, or not recorded at all."""
        edit.require_complete()  # an edit that could not be applied later is refused now
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sorted(edit.tensors.items())
        }
        data = b"" if self.path is None else save(tensors, metadata={"format": FORMAT})
        with self.locked():
            id, now = self._state.next_id, utc_now()
            stored = replace(edit, created=edit.created or now).to_json()
            event = {"event": "edit", "id": id, "time": now, **stored, "sha256": hashlib.sha256(data).hexdigest()}
            lines = chain_lines([event], self._state.digest)  # before any file is written: it may refuse the edit
            file = None if self.path is None else path_inside(self.path, f"{EDITS}/{id}.safetensors")
            try:
                if file is not None:
                    write_file(file, data)
                self._commit(lines, tensors)
            except BaseException:
                if file is not None and all(edit.id != id for edit in self.edits):  # no line refers to the file
                    file.unlink(missing_ok=True)
                raise
            return self._state.edits[id]

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
            edits = {edit.id: edit for edit in map(self.get, ids)}
            for id in edits:
                if on is not (id in self._state.undone):
                    state = "active" if on else "undone"
                    raise InputError(f"Edit {id} is already {state}", code=f"already_{state}")
            self._require_consolidated_together(set(edits), on=on)
            event: dict[str, JSON] = {"event": "redo" if on else "undo", "time": utc_now()}
            events = [{**event, "id": id, **({"forced": True} if id in forced else {})} for id in edits]
            if events:
                self._commit(chain_lines(events, self._state.digest))
            return tuple(self._state.edits[id] for id in edits)

    def _require_consolidated_together(self, ids: set[str], *, on: bool) -> None:
        """Raise if facts would be in the weights although the edit that they come from is not active."""
        undone = self._state.undone - ids if on else self._state.undone | ids
        for edit in self._state.edits.values():
            sources = [id for id in edit.consolidates if id in undone]
            if edit.id not in undone and sources:
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
        here, there = self.active, other.active
        only_here, only_there = _surplus(here, there), _surplus(there, here)
        return Diff(only_here, only_there, tuple(edit for edit in here if edit not in only_here))

    def verify(self) -> list[str]:
        """Return what is wrong with the ledger, read again from disk; an empty list if it is intact."""
        return [] if self.path is None else verify_folder(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers out; everything they wrote before is visible inside. May be nested."""
        if self.path is None:
            with self._mutex:
                yield
            return
        with lock(self.path / LOCK, self.timeout):
            self._refresh()
            yield

    def _commit(self, lines: Sequence[bytes], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Add lines to the log in one write, and their events to the state."""
        with self._mutex:  # a reader between the two steps would apply the events itself
            if self.path is not None:
                append_at(self.path / LOG, self._state.offset, b"".join(lines))
            for line in lines:
                self._state.read_line(line, tensors)

    def _refresh(self) -> None:
        """Apply what was appended since the last look, except a line that is not finished."""
        if self.path is None:
            return
        with self._mutex:
            log, state = self.path / LOG, self._state
            try:
                with log.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    file.seek(state.offset)
                    *lines, _unfinished = file.read(max(0, size - state.offset)).split(b"\n")
            except OSError as problem:
                raise damaged(f"{log} cannot be read ({problem})") from None
            if size < state.offset:
                raise damaged(f"{log} has become shorter since it was last read")
            for line in lines:
                try:
                    state.read_line(line + b"\n")
                except (ValueError, RebindError) as problem:
                    raise damaged(
                        f"Line {state.lines + 1} of {log} was altered or damaged ({problem})",
                        "Restore the folder from a copy, or delete this line and all that follow: earlier edits remain",
                    ) from None


def _create(path: Path, header: Mapping[str, str]) -> None:
    """Create a ledger. The header is written last: where it exists, the ledger is complete."""
    make_folders(path)
    own_names = (HEADER, LOG, LOCK, EDITS, WORK)
    strangers = sorted(file.name for file in path.iterdir() if file.name not in own_names and file.name[0] != ".")
    if strangers:
        raise InputError(
            f"{path} holds {', '.join(strangers[:3])} and no ledger",
            expected="a ledger or an empty folder",
            advice="Choose another folder",
            code="not_a_ledger_folder",
        )
    with lock(path / LOCK, TIMEOUT):
        if (path / HEADER).exists():  # another process was faster
            return
        if (path / LOG).exists() and (path / LOG).stat().st_size:
            raise damaged(f"{path} has a log but no {HEADER}")
        write_file(path / LOG, b"")
        write_json(path / HEADER, header)


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
