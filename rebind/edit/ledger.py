"""The ledger: every edit made to a model, kept so that any of them can be taken back.

An edit is, at each site it touches, one `Write` computed against the base model. The edited weights are
never kept: they are the fold of the active edits' writes over the base weights, in ledger order. Undoing
an edit is folding again without it, so the result equals, bit for bit, that of a run that never had it.

A ledger is a folder:

    ledger.json               whose edits these are: format, model fingerprint and name, time
    log.jsonl                 what happened, one event a line, only ever appended to
    edits/e0001.safetensors   keys, values, gains and targets of an edit
    work/                     results of unfinished runs
    lock                      held while writing; names the process that holds it

A line of the log carries the digest of its event and of the line before; the first line's chain begins
with the digest of ledger.json; an edit's event carries the digest of its tensors. So whatever is altered
later can be told. An event exists once its line is whole: the tensors are on disk before it is written,
and a line that a crash cut short is ignored, then dropped by the next append.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rebind.edit.facts import Fact
from rebind.errors import InputError, NumericalError, RebindError, StorageError, UnknownNameError
from rebind.files import write_atomically
from rebind.memory.checks import unknown_name
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"

FORMAT = "rebind-ledger-1"
HEADER, LOG, LOCK, EDITS, WORK = "ledger.json", "log.jsonl", "lock", "edits", "work"
RESTORE = "restore the folder from a copy, or make a new ledger and replay the edits that are sound"


class LedgerError(RebindError):
    """A ledger that cannot be trusted or cannot be had now; nothing was changed."""


class LedgerWarning(UserWarning):
    """A ledger was read, but not all that its files hold."""


# Edits


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit:
    """Facts written into a model together, with all that is needed to write them again."""

    id: str = ""  # given by the ledger
    facts: tuple[Fact, ...]
    method: str
    settings: Mapping[str, JSON]
    sites: tuple[str, ...]
    tensors: Mapping[str, Tensor]  # "{site}/keys", "{site}/values", "{site}/gain" for each site; "targets"
    scores: Mapping[str, JSON] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""  # UTC, ISO 8601; the time of the append unless given
    forced: bool = False  # written although a check spoke against it

    def write(self, site: str) -> Write:
        """The edit's write at one of its sites."""
        if site not in self.sites:
            raise unknown_name(f"site of edit {self.id or '(new)'}", site, self.sites)
        parts = {part: f"{site}/{part}" for part in ("keys", "values", "gain")}
        for name in parts.values():
            if name not in self.tensors:
                raise InputError(
                    f"edit {self.id or '(new)'} has no tensor {name!r}: each site needs {', '.join(parts)}"
                )
        return Write(**{part: self.tensors[name] for part, name in parts.items()})

    @property
    def digest(self) -> str:
        """Which edit this is, whatever ledger or model it is in: facts, method and settings."""
        facts = [fact.to_json() for fact in self.facts]
        return _digest({"facts": facts, "method": self.method, "settings": self.settings})

    def described(self) -> dict[str, JSON]:
        """Everything but the tensors, as the log keeps it."""
        return {
            "facts": [fact.to_json() for fact in self.facts],
            "method": self.method,
            "settings": self.settings,
            "sites": list(self.sites),
            "scores": self.scores,
            "versions": self.versions,
            "created": self.created,
            "forced": self.forced,
        }


@dataclass(frozen=True)
class Diff:
    """The active edits of two ledgers, told apart by facts, method and settings."""

    only_here: tuple[Edit, ...]
    only_there: tuple[Edit, ...]
    both: tuple[Edit, ...]


def fold(
    base: Tensor,
    site: str,
    edits: Sequence[Edit],
    gain: Callable[[Edit, Sequence[Edit]], Tensor] | None = None,
) -> Tensor:
    """The weights [d_v, d_k] of a site after `edits`, from those of the base model.

    The sum is kept in float64 and cast once, at the end: casting after each edit would make the result depend
    on how edits were grouped, and in bf16 small edits would be rounded away one by one. Methods whose gain
    depends on what was written before give it as `gain(edit, earlier edits at this site)`.
    """
    weights = base.detach().to(solving_dtype(base))
    earlier: list[Edit] = []
    for edit in edits:
        if site not in edit.sites:
            continue
        write = edit.write(site)
        if gain is not None:
            write = replace(write, gain=gain(edit, tuple(earlier)))
        keys, values, gains = (tensor.to(weights) for tensor in write.tensors())
        weights = Write(keys, values, gains).apply(weights)
        earlier.append(edit)
    folded = weights.to(base.dtype, copy=True)
    if not torch.isfinite(folded).all():
        raise NumericalError(
            f"{len(earlier)} edits make {site} infinite in {base.dtype}, expected finite weights: undo the last "
            f"of them, or load the model in a wider dtype"
        )
    return folded


class _Stored(Mapping[str, Tensor]):
    """The tensors of an edit on disk: read when asked for, after the file's digest was checked once."""

    def __init__(self, path: Path, sha256: str) -> None:
        self.path, self.sha256 = path, sha256
        self._names: tuple[str, ...] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._checked():
            raise KeyError(name)
        with self._named(), safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checked())

    def __len__(self) -> int:
        return len(self._checked())

    def _checked(self) -> tuple[str, ...]:
        if self._names is None:
            with self._named():
                with self.path.open("rb") as data:
                    found = hashlib.file_digest(data, "sha256").hexdigest()
                if found != self.sha256:
                    raise LedgerError(
                        f"{self.path} was altered (sha256 {_short(found)}, the log says {_short(self.sha256)}): "
                        f"restore the file from a copy, or undo edit {self.path.stem}"
                    )
                with safe_open(str(self.path), framework="pt") as file:
                    self._names = tuple(file.keys())
        return self._names

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as problem:
            raise LedgerError(
                f"{self.path} cannot be read ({problem}): restore the file from a copy, or undo edit {self.path.stem}"
            ) from None


def _stored(folder: Path, event: Mapping[str, Any], id: str) -> _Stored:
    return _Stored(folder / EDITS / f"{id}.safetensors", str(event.get("sha256")))


# Events and their chain


@dataclass
class _State:
    """What the events so far amount to."""

    digest: str  # of the last line, or of the header
    offset: int = 0  # where the next line begins
    lines: int = 0
    edits: dict[str, Edit] = field(default_factory=dict)  # in order
    undone: set[str] = field(default_factory=set)

    @property
    def next_id(self) -> str:
        return f"e{len(self.edits) + 1:04d}"

    def take(self, event: Mapping[str, Any], tensors: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Let an event happen, or raise ValueError and stay as it was."""
        kind, name = event.get("event"), event.get("id")
        if kind == "edit":
            if name != self.next_id:
                raise ValueError(f"edit {name!r} where {self.next_id} comes next")
            self.edits[self.next_id] = _edit(event, tensors(self.next_id))
        elif kind == "undo" and name in self.edits and name not in self.undone:
            self.undone.add(name)
        elif kind == "redo" and name in self.undone:
            self.undone.remove(name)
        else:
            raise ValueError(f"{kind!r} of {name!r}, which cannot follow what came before")


def _edit(event: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Edit:
    try:
        return Edit(
            id=event["id"],
            facts=tuple(Fact.from_json(record) for record in event["facts"]),
            method=event["method"],
            settings=event["settings"],
            sites=tuple(event["sites"]),
            tensors=tensors,
            scores=event["scores"],
            versions=event["versions"],
            created=event["created"],
            forced=event["forced"],
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"an edit without its parts ({problem!r})") from None


def _canonical(value: JSON) -> bytes:
    """One way to write a value, so that equal values have equal digests."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as problem:
        raise InputError(
            f"the edit cannot be written down as JSON ({problem}), expected settings, scores and versions of plain "
            f"finite numbers, texts, lists and dicts with text keys: convert them first"
        ) from None


def _digest(value: JSON, previous: str = "") -> str:
    return hashlib.sha256(previous.encode() + _canonical(value)).hexdigest()


def _parse(raw: bytes) -> tuple[dict[str, Any], str]:
    """A line's event and the digest it states; ValueError where there are none."""
    event = json.loads(raw)
    if not isinstance(event, dict) or not isinstance(event.get("line"), str):
        raise ValueError("no event with a digest")
    return event, event.pop("line")


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines, and what a crash left of the next one."""
    *lines, torn = data.split(b"\n")
    return lines, torn


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / HEADER
    try:
        header = json.loads(path.read_bytes())
        stated = header.pop("digest")
        name = header["format"], header["model"], header["model_name"], header["created"]
    except FileNotFoundError:
        raise LedgerError(f"no ledger in {folder} ({HEADER} is missing): name a folder that holds one") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise LedgerError(f"{path} cannot be read ({problem!r}): {RESTORE}") from None
    if name[0] != FORMAT:
        raise LedgerError(f"{path} has format {name[0]!r}, expected {FORMAT!r}: use the rebind that wrote it")
    if _digest(header) != stated:
        raise LedgerError(f"{path} was altered (its digest does not fit): {RESTORE}")
    return {**header, "digest": stated}


def _storage_error(path: Path, problem: OSError) -> StorageError:
    error = StorageError(
        f"cannot write {path} ({problem.strerror or problem}), the ledger is as it was: free some space, or get "
        f"write access to the folder"
    )
    error.errno = problem.errno
    return error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _short(digest: str) -> str:
    return f"{digest[:12]}…" if len(digest) > 12 else digest


# One writer at a time


class _Lock:
    """An exclusive lock on a file, between processes and between threads; taking it twice is harmless.

    The system drops it when its holder dies, however it dies, so there is no stale lock to clear away.
    """

    PLACE = 1 << 30  # the byte that Windows locks: far from the pid, which others must be able to read

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = threading.RLock()
        self._depth = 0
        self._handle = -1

    @contextlib.contextmanager
    def held(self, timeout: float) -> Iterator[None]:
        deadline = time.monotonic() + timeout
        if not self._thread.acquire(timeout=max(timeout, 0)):
            raise self._busy("another thread", timeout)
        try:
            if self._depth == 0:
                self._open(deadline, timeout)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._close()
        finally:
            self._thread.release()

    def _open(self, deadline: float, timeout: float) -> None:
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as problem:
            raise _storage_error(self.path, problem) from problem
        try:
            while not self._try(handle):
                if time.monotonic() >= deadline:
                    raise self._busy(self._holder(), timeout)
                time.sleep(0.02)
            self._sign(handle, f"{os.getpid()}\n")
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle

    def _close(self) -> None:
        self._sign(self._handle, "")
        if sys.platform == "win32":
            os.lseek(self._handle, self.PLACE, os.SEEK_SET)
            msvcrt.locking(self._handle, msvcrt.LK_UNLCK, 1)
        os.close(self._handle)  # and with it goes the lock

    def _try(self, handle: int) -> bool:
        try:
            if sys.platform == "win32":
                os.lseek(handle, self.PLACE, os.SEEK_SET)
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as problem:
            raise _storage_error(self.path, problem) from problem
        return True

    def _sign(self, handle: int, text: str) -> None:
        """Say who holds the lock. A courtesy: the lock holds without it."""
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, text.encode())

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            if pid := self.path.read_text().strip():
                return f"process {pid}"
        return "another process"

    def _busy(self, holder: str, timeout: float) -> LedgerError:
        return LedgerError(
            f"{self.path.parent} is held by {holder}, waited {timeout:g} s: let it finish, or stop it, and try again"
        )


# The ledger


class Ledger:
    """The edits of one model, in order. Open one with `Ledger.open` or `Ledger.in_memory`."""

    def __init__(self, header: Mapping[str, Any], path: Path | None, timeout: float) -> None:
        self.path = path
        self.model: str = header["model"]  # fingerprint of the base model
        self.model_name: str = header["model_name"]
        self.created: str = header["created"]
        self.timeout = timeout  # seconds to wait for another writer
        self._state = _State(header["digest"])
        self._mutex = threading.RLock()
        self._lock = None if path is None else _Lock(path / LOCK)
        self._warned = False

    @classmethod
    def open(cls, path: str | Path, model: str | None = None, *, model_name: str = "", timeout: float = 60.0) -> Ledger:
        """The ledger in a folder, made there if it has none, for the model with this fingerprint.

        Without a model an existing ledger is opened, to be looked at or to learn whose it is.
        """
        path = Path(path).expanduser()
        if not (path / HEADER).exists() and model is not None:
            _create(path, _header(model, model_name), timeout)
        header = _read_header(path)
        if model is not None and header["model"] != model:
            raise InputError(
                f"ledger {path} was made for {header['model_name'] or 'a model'} ({_short(header['model'])}), this "
                f"model is {model_name or 'another'} ({_short(model)}): load the model it was made for, or name "
                f"another folder to begin a new ledger"
            )
        ledger = cls(header, path, timeout)
        ledger._refresh()
        return ledger

    @classmethod
    def in_memory(cls, model: str, model_name: str = "") -> Ledger:
        """A ledger that lasts as long as the object."""
        return cls(_header(model, model_name), None, 60.0)

    def __repr__(self) -> str:
        place = self.path or "in memory"
        return (
            f"Ledger({self.model_name or _short(self.model)}, {place}: {len(self.active)} of {len(self.edits)} active)"
        )

    @property
    def work_folder(self) -> Path | None:
        """Where results of unfinished runs are kept; none for a ledger in memory."""
        return None if self.path is None else self.path / WORK

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits, undone ones too, in the order they were made."""
        self._refresh()
        return tuple(self._state.edits.values())

    @property
    def active(self) -> tuple[Edit, ...]:
        """The edits that are in the weights. One that was undone and redone is back in its old place."""
        self._refresh()
        return tuple(edit for edit in self._state.edits.values() if edit.id not in self._state.undone)

    def get(self, id: str) -> Edit:
        """The edit with this id, or with the one id that begins so."""
        self._refresh()
        edits = self._state.edits
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
            name, now = self._state.next_id, _now()
            described = replace(edit, created=edit.created or now).described()
            sha256 = hashlib.sha256(data).hexdigest()
            # The line is made before any file is written: what is not JSON is refused here.
            line = self._line({"event": "edit", "id": name, "time": now, **described, "sha256": sha256})
            with self._file_of(name, data):
                self._commit(line, tensors)
            return self._state.edits[name]

    def undo(self, id: str) -> Edit:
        """Take an edit out of the weights; it stays in the ledger."""
        with self.locked():
            edit = self.get(id)
            if edit.id in self._state.undone:
                raise InputError(f"edit {edit.id} is undone already: redo it to have it back")
            self._commit(self._line({"event": "undo", "id": edit.id, "time": _now()}))
            return edit

    def redo(self, id: str) -> Edit:
        """Put an undone edit back, where it was."""
        with self.locked():
            edit = self.get(id)
            if edit.id not in self._state.undone:
                raise InputError(f"edit {edit.id} is active, expected an undone one: there is nothing to redo")
            self._commit(self._line({"event": "redo", "id": edit.id, "time": _now()}))
            return edit

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
        return [problem for edit in self.edits for problem in _wrong_tensors(edit)]

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

    def _line(self, event: dict[str, Any]) -> bytes:
        return _canonical({**event, "line": _digest(event, self._state.digest)}) + b"\n"

    def _commit(self, line: bytes, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Make an event's line part of the log, and the event part of the state."""
        event, digest = _parse(line)
        if self.path is not None:
            _append(self.path / LOG, self._state.offset, line)
        with self._mutex:
            self._state.take(event, lambda id: _stored(self.path, event, id) if self.path else tensors or {})
            self._advance(digest, len(line))

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
                lines, torn = _split(file.read(size - state.offset))
        except OSError as problem:
            raise LedgerError(f"{log} cannot be read ({problem}): {RESTORE}") from None
        for raw in lines:
            try:
                event, stated = _parse(raw)
                if _digest(event, state.digest) != stated:
                    raise ValueError("its digest does not fit")
                state.take(event, partial(_stored, self.path, event))
            except (ValueError, RebindError) as problem:
                raise LedgerError(
                    f"line {state.lines + 1} of {log} was altered or damaged ({problem}): {RESTORE}"
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


def _header(model: str, model_name: str) -> dict[str, Any]:
    header = {"format": FORMAT, "model": model, "model_name": model_name, "created": _now()}
    return {**header, "digest": _digest(header)}


def _create(path: Path, header: dict[str, Any], timeout: float) -> None:
    """Make a ledger. ledger.json comes last: where it is, all the rest is."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _storage_error(path, problem) from problem
    ours = (HEADER, LOG, LOCK, EDITS, WORK)
    strangers = sorted(file.name for file in path.iterdir() if file.name not in ours and file.name[0] != ".")
    if strangers:
        raise InputError(
            f"{path} holds {_listed(strangers)} and no ledger, expected a ledger or an empty folder: name another"
        )
    with _Lock(path / LOCK).held(timeout):
        if (path / HEADER).exists():  # another process was faster
            return
        if (path / LOG).exists() and (path / LOG).stat().st_size:
            raise LedgerError(f"{path} has a log but no {HEADER}: {RESTORE}")
        try:
            for name in (EDITS, WORK):
                (path / name).mkdir(exist_ok=True)
        except OSError as problem:
            raise _storage_error(path, problem) from problem
        write_atomically(path / LOG, b"")
        write_atomically(path / HEADER, json.dumps(header, indent=1, ensure_ascii=False).encode() + b"\n")


def _append(log: Path, offset: int, line: bytes) -> None:
    """Write a line behind the last whole one, over what a crash may have left there; whole or not at all."""
    try:
        with log.open("r+b", buffering=0) as file:
            try:
                file.truncate(offset)
                file.seek(offset)
                rest = memoryview(line)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):  # if this fails too, an unfinished line is ignored
                    file.truncate(offset)
                raise
    except OSError as problem:
        raise _storage_error(log, problem) from problem


def verify_folder(path: str | Path) -> list[str]:
    """What is wrong with the ledger in a folder, even one too damaged to open."""
    path = Path(path)
    try:
        header = _read_header(path)
        data = (path / LOG).read_bytes()
    except LedgerError as problem:
        return [str(problem)]
    except OSError as problem:
        return [f"{path / LOG} cannot be read ({problem}): {RESTORE}"]
    problems: list[str] = []
    state = _State(header["digest"])
    lines, torn = _split(data)
    for number, raw in enumerate(lines, start=1):
        try:
            event, stated = _parse(raw)
            if _digest(event, state.digest) != stated:
                problems.append(f"line {number} of {LOG} was altered, or the line before it was")
            state.digest = stated  # so that one altered line is one problem
            state.take(event, partial(_stored, path, event))
        except (ValueError, RebindError) as problem:
            problems.append(f"line {number} of {LOG} is damaged ({problem})")
    if torn:
        problems.append(f"{LOG} ends in an unfinished line of {len(torn)} bytes: the next edit drops it")
    for edit in state.edits.values():
        problems += _wrong_tensors(edit)
    known = {f"{name}.safetensors" for name in state.edits}
    found = sorted(file.name for file in (path / EDITS).glob("*") if not file.name.startswith("."))
    problems += [f"{EDITS}/{name} is in no line of {LOG}" for name in found if name not in known]
    return problems


def _wrong_tensors(edit: Edit) -> list[str]:
    try:
        for site in edit.sites:
            edit.write(site)
    except RebindError as problem:
        return [f"edit {edit.id}: {problem}"]
    return []


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
