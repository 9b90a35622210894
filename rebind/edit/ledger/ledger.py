"""The ledger: every edit made to a model, kept so that any of them can be taken back.

A ledger is a folder:

    ledger.json               whose edits these are: format, model fingerprint and name, time, place, dtype, stamp
    log.jsonl                 what happened, one event a line, only ever appended to
    edits/e0001.safetensors   keys, values, gains and targets of an edit
    work/                     results of unfinished runs
    lock                      held while writing; names the process that holds it

The log's lines are chained, and an edit's event carries the digest of its tensors, so whatever is altered
later can be told. The tensors are on disk before the line that names them is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from rebind.edit.ledger.edit import Diff, Edit
from rebind.edit.ledger.lock import Lock
from rebind.edit.ledger.log import (
    FORMAT,
    HEADER,
    LOG,
    RESTORE,
    append_lines,
    canonical,
    digest_of,
    new_header,
    parse_line,
    read_header,
    short,
    split_lines,
    storage_error,
    utc_now,
)
from rebind.edit.ledger.state import EDITS, State, stored_tensors
from rebind.edit.ledger.verify import verify_folder, wrong_tensors
from rebind.errors import InputError, LedgerError, LedgerWarning, RebindError, StorageError, UnknownNameError
from rebind.files import make_folders, write_atomically

LOCK, WORK = "lock", "work"


class Ledger:
    """The edits of one model, in order. Open one with `Ledger.open` or `Ledger.in_memory`."""

    def __init__(self, header: Mapping[str, Any], path: Path | None, timeout: float) -> None:
        self.path = path
        self.model: str = header["model"]  # fingerprint of the base model
        self.model_name: str = header["model_name"]
        self.created: str = header["created"]
        self.timeout = timeout  # seconds to wait for another writer
        self._state = State(header["digest"])
        self._mutex = threading.RLock()
        self._lock = None if path is None else Lock(path / LOCK)
        self._warned = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        model: str | None = None,
        *,
        model_name: str = "",
        place: str = "",
        dtype: str = "",
        stamp: str = "",
        timeout: float = 60.0,
    ) -> Ledger:
        """The ledger in a folder, made there if it has none, for the model with this fingerprint.

        Without a model an existing ledger is opened, to be looked at or to learn whose it is. A new one writes down
        the model's name, its place (a folder, a file or a Hub id), its dtype, such as "bfloat16", and a stamp: a
        digest that changes when other weights are put into that place.
        """
        path = Path(path).expanduser()
        if not (path / HEADER).exists() and model is not None:
            _create(path, new_header(model, model_name, place=place, dtype=dtype, stamp=stamp), timeout)
        header = read_header(path)
        if model is not None and header["model"] != model:
            raise _of_another(path, header, model, model_name, dtype)
        ledger = cls(header, path, timeout)
        ledger._refresh()
        return ledger

    @classmethod
    def in_memory(cls, model: str, model_name: str = "") -> Ledger:
        """A ledger that lasts as long as the object."""
        return cls(new_header(model, model_name), None, 60.0)

    def __repr__(self) -> str:
        place = self.path or "in memory"
        return (
            f"Ledger({self.model_name or short(self.model)}, {place}: {len(self.active)} of {len(self.edits)} active)"
        )

    @property
    def work_folder(self) -> Path | None:
        """Where results of unfinished runs are kept; none for a ledger in memory."""
        return None if self.path is None else self.path / WORK

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits, undone ones too, in the order they were made."""
        with self._mutex:
            self._refresh()
            return tuple(self._state.edits.values())

    @property
    def active(self) -> tuple[Edit, ...]:
        """The edits that are in the weights. One that was undone and redone is back in its old place."""
        with self._mutex:
            self._refresh()
            return tuple(edit for edit in self._state.edits.values() if edit.id not in self._state.undone)

    def get(self, id: str) -> Edit:
        """The edit with this id, or with the one id that begins so."""
        edits = {edit.id: edit for edit in self.edits}
        if id in edits:
            return edits[id]
        begun = [name for name in edits if id and name.startswith(id)]
        if len(begun) == 1:
            return edits[begun[0]]
        if begun:
            raise UnknownNameError(f"{id!r} begins {_listed(begun)}, expected one of them: write more of it")
        near = get_close_matches(id, edits, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the ledger has {_listed(list(edits)) or 'no edits'}"
        raise UnknownNameError(f"no edit {id!r} in {self.path or 'this ledger'}: {hint}")

    def is_active(self, id: str) -> bool:
        return self.get(id).id not in self._state.undone

    def append(self, edit: Edit) -> Edit:
        """Record an edit and return it with its id: on disk when this returns, or not there at all."""
        if not edit.facts or not edit.sites:
            raise InputError(
                f"the edit has {len(edit.facts)} facts at {len(edit.sites)} sites, expected at least one of each: "
                f"there is nothing to record"
            )
        for site in edit.sites:
            edit.write(site)  # refuses what could not be applied later
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sorted(edit.tensors.items())
        }
        data = b"" if self.path is None else save(tensors, metadata={"format": FORMAT})
        with self.locked():
            name, now = self._state.next_id, utc_now()
            described = replace(edit, created=edit.created or now).described()
            sha256 = hashlib.sha256(data).hexdigest()
            # The line is made before any file is written: what is not JSON is refused here.
            lines = self._lines({"event": "edit", "id": name, "time": now, **described, "sha256": sha256})
            with self._file_of(name, data):
                self._commit(lines, tensors)
            return self._state.edits[name]

    def undo(self, id: str) -> Edit:
        """Take an edit out of the weights; it stays in the ledger."""
        return self.switch([id], on=False)[0]

    def redo(self, id: str, *, forced: bool = False) -> Edit:
        """Put an undone edit back, where it was; `forced` says that something spoke against it."""
        return self.switch([id], on=True, forced=[self.get(id).id] if forced else [])[0]

    def switch(self, ids: Sequence[str], *, on: bool, forced: Collection[str] = ()) -> tuple[Edit, ...]:
        """Redo edits (`on`) or undo them, all or none: their lines are written at once. A repeated id counts once.

        Against those in `forced` something spoke, and the log says so.
        """
        with self.locked():
            edits = tuple({edit.id: edit for edit in map(self.get, ids)}.values())
            for edit in edits:
                undone = edit.id in self._state.undone
                if on and not undone:
                    raise InputError(f"edit {edit.id} is active, expected an undone one: there is nothing to redo")
                if undone and not on:
                    raise InputError(f"edit {edit.id} is undone already: redo it to have it back")
            told = {"event": "redo" if on else "undo", "time": utc_now()}
            events = [{**told, "id": edit.id, **({"forced": True} if edit.id in forced else {})} for edit in edits]
            if edits:
                self._commit(self._lines(*events))
            return tuple(self._state.edits[edit.id] for edit in edits)

    def diff(self, other: Ledger) -> Diff:
        """Which active edits only this ledger has, which only the other, which both."""
        here, there = self.active, other.active
        spare = Counter(edit.digest for edit in there)
        both, only_here = [], []
        for edit in here:
            if spare[edit.digest] > 0:
                spare[edit.digest] -= 1
                both.append(edit)
            else:
                only_here.append(edit)
        only_there = []
        for edit in reversed(there):  # of equal edits the later ones are the surplus
            if spare[edit.digest] > 0:
                spare[edit.digest] -= 1
                only_there.append(edit)
        return Diff(tuple(only_here), tuple(reversed(only_there)), tuple(both))

    def verify(self) -> list[str]:
        """What is wrong with the ledger, read afresh; an empty list when all is well."""
        if self.path is not None:
            return verify_folder(self.path)
        return [problem for edit in self.edits for problem in wrong_tensors(edit)]

    @contextlib.contextmanager
    def locked(self, timeout: float | None = None) -> Iterator[None]:
        """Keep other writers out; what they wrote before is seen inside. May be nested."""
        if self._lock is None:
            with self._mutex:
                yield
            return
        with self._lock.held(self.timeout if timeout is None else timeout):
            self._refresh()
            yield

    @contextlib.contextmanager
    def _file_of(self, name: str, data: bytes) -> Iterator[None]:
        """An edit's tensors on disk, for its line to name; without that line they go again."""
        if self.path is None:
            yield
            return
        file = self.path / EDITS / f"{name}.safetensors"
        try:
            write_atomically(file, data)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # harmless where it stays: no line names it
                if (self.path / LOG).stat().st_size <= self._state.offset:
                    file.unlink(missing_ok=True)
            raise

    def _lines(self, *events: dict[str, Any]) -> list[bytes]:
        """The events as lines, chained to the last one there is and to each other."""
        lines, digest = [], self._state.digest
        for event in events:
            digest = digest_of(event, digest)
            lines.append(canonical({**event, "line": digest}) + b"\n")
        return lines

    def _commit(self, lines: Sequence[bytes], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Make events' lines part of the log in one write, and the events part of the state."""
        parsed = [(*parse_line(line), len(line)) for line in lines]
        with self._mutex:  # a reader between the write and the state would take the lines in for us
            if self.path is not None:
                append_lines(self.path / LOG, self._state.offset, b"".join(lines))
            for event, digest, length in parsed:
                stored = partial(stored_tensors, self.path, event) if self.path else lambda id: tensors or {}
                self._state.take(event, stored)
                self._advance(digest, length)

    def _advance(self, digest: str, length: int) -> None:
        self._state.digest = digest
        self._state.offset += length
        self._state.lines += 1

    def _refresh(self) -> None:
        """Take in what was appended since the last look, by this process or another."""
        if self.path is None:
            return
        with self._mutex:
            torn = self._read()
            if not torn:
                self._warned = False
            elif not self._warned and not self._being_written():
                self._warned = True
                warnings.warn(
                    f"{self.path / LOG} ends in an unfinished line of {torn} bytes, left by a crash: it is ignored, "
                    f"and the next edit drops it",
                    LedgerWarning,
                    stacklevel=3,
                )

    def _read(self) -> int:
        """Take in the new whole lines; returns how many bytes of an unfinished one follow them."""
        assert self.path is not None
        log, state = self.path / LOG, self._state
        try:
            with log.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < state.offset:
                    raise LedgerError(f"{log} is shorter than when it was last read ({size} bytes): {RESTORE}")
                file.seek(state.offset)
                lines, torn = split_lines(file.read(size - state.offset))
        except OSError as problem:
            raise LedgerError(f"{log} cannot be read ({problem}): {RESTORE}") from None
        for raw in lines:
            try:
                event, stated = parse_line(raw)
                if digest_of(event, state.digest) != stated:
                    raise ValueError("its digest does not fit")
                state.take(event, partial(stored_tensors, self.path, event))
            except (ValueError, RebindError) as problem:
                raise LedgerError(
                    f"line {state.lines + 1} of {log} was altered or damaged ({problem}): {RESTORE}, or delete that "
                    f"line and all after it, which keeps the edits before it and loses the others"
                ) from None
            self._advance(stated, len(raw) + 1)
        return len(torn)

    def _being_written(self) -> bool:
        """Whether the unfinished line is another process at work. If none is, it stays unfinished."""
        assert self._lock is not None
        try:
            with self._lock.held(0.0):
                return not self._read()
        except LedgerError:
            return True
        except StorageError:  # read-only: nobody writes here
            return False


def _of_another(path: Path, header: Mapping[str, Any], model: str, name: str, dtype: str) -> InputError:
    """That a ledger is of another model, or of this one in another dtype."""
    made, step = header.get("dtype", ""), "load the model it was made for"
    recast = made and dtype and made != dtype and header["model_name"] == name
    if recast:
        step = f"load it in {made} (--dtype {made})"
    theirs, ours = (f" in {known}" if recast else "" for known in (made, dtype))
    return InputError(
        f"ledger {path} was made for {header['model_name'] or 'a model'}{theirs} ({short(header['model'])}), this "
        f"model is {name or 'another'}{ours} ({short(model)}): {step}, or name another folder to begin a new ledger"
    )


def _create(path: Path, header: dict[str, Any], timeout: float) -> None:
    """Make a ledger. ledger.json comes last: where it is, all the rest is."""
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file, expected a folder to keep a ledger in: name another")
    try:
        make_folders(path)
    except OSError as problem:
        raise storage_error(path, problem) from problem
    ours = (HEADER, LOG, LOCK, EDITS, WORK)
    strangers = sorted(file.name for file in path.iterdir() if file.name not in ours and file.name[0] != ".")
    if strangers:
        raise InputError(
            f"{path} holds {_listed(strangers)} and no ledger, expected a ledger or an empty folder: name another"
        )
    with Lock(path / LOCK).held(timeout):
        if (path / HEADER).exists():  # another process was faster
            return
        if (path / LOG).exists() and (path / LOG).stat().st_size:
            raise LedgerError(f"{path} has a log but no {HEADER}: {RESTORE}")
        try:
            for name in (EDITS, WORK):
                (path / name).mkdir(exist_ok=True)
        except OSError as problem:
            raise storage_error(path, problem) from problem
        write_atomically(path / LOG, b"")
        write_atomically(path / HEADER, json.dumps(header, indent=1, ensure_ascii=False).encode() + b"\n")


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
