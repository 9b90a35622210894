"""The check that nothing in a ledger was altered, damaged or lost.

A check remembers what it has read: the digest of the log up to its end, and size, times and inode of every file of
tensors. The next check reads the log's old part only to compare its digest, and the tensors of new and changed files.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rebind.edit.ledger.compact import is_leftover
from rebind.edit.ledger.creation import LOCK
from rebind.edit.ledger.edit import canonical_json, digest_of
from rebind.edit.ledger.edits import EditSequence, edit_id
from rebind.edit.ledger.log import EDITS, LOG, SEALED_FOLDER, LedgerState, parse_line, read_header
from rebind.edit.ledger.snapshots import PIECE, Snapshots
from rebind.edit.ledger.state_file import dump_state, load_state
from rebind.edit.ledger.table import SEALED, short_digest
from rebind.errors import LedgerError, RebindError, StorageError
from rebind.storage import lock, open_to_read

KIND = "verified"
WAIT_SECONDS = 60.0  # for a writer
IDENTITY = np.dtype([("number", "<u4"), ("identity", "<u8")])


def verify_folder(path: str | Path, *, full: bool = False) -> list[str]:
    """Return what is wrong with the ledger in a folder, even one too damaged to open; an empty list if it is intact.

    With `full` everything is read, even what an earlier check has found intact and what has not changed since. Not
    detectable are undo and redo lines that were cut off whole at the end of the log, an edit cut off there together
    with its tensors, and a ledger that was rewritten with matching digests.
    """
    path = Path(path)
    try:
        header = read_header(path)
    except LedgerError as problem:
        return [str(problem)]
    problems = _Check(path, header["digest"]).run(full=full)
    if not problems:
        return []
    try:  # a writer may have been at work: look again while there is none
        with lock(path / LOCK, WAIT_SECONDS):
            return _Check(path, header["digest"]).run(full=full)
    except StorageError:  # a folder that cannot be written, or a writer that does not finish
        again = _Check(path, header["digest"]).run(full=full)
        return [problem for problem in again if problem in problems]


@dataclass(eq=False)
class _Check:
    """One look at everything."""

    path: Path
    header_digest: str
    problems: list[str] = field(default_factory=list)
    identities: dict[int, int] = field(default_factory=dict)  # of files that were intact, by the number of the edit

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.path)
        self.state = LedgerState(self.header_digest, self.path)
        self.prefix = hashlib.sha256()  # of the log, up to its last complete line

    def run(self, *, full: bool) -> list[str]:
        begin = time.perf_counter()
        try:
            with open_to_read(self.path / LOG) as log:
                if not full:
                    self._resume(log)
                known = self.state.lines
                unfinished = self._read_log(log)
        except OSError as problem:
            return [f"{self.path / LOG} cannot be read ({problem})."]
        if unfinished:
            self.problems.append(f"{LOG} ends in an unfinished line of {unfinished} bytes; the next edit drops it.")
        if not self.state.lines:
            self.problems.append(f"{LOG} is empty, and no ledger has an empty log.")
        changed = self._check_tensors()
        self._check_names()
        if not self.problems and (changed or self.state.lines != known):
            self._remember(time.perf_counter() - begin)
        return self.problems

    def _read_log(self, log: BinaryIO) -> int:
        """Check every line that follows; return how many bytes of an unfinished line there are."""
        state = self.state
        log.seek(state.offset)
        number = state.lines
        for line in log:
            if not line.endswith(b"\n"):
                return len(line)
            number += 1
            self.prefix.update(line)
            try:
                event, stated = parse_line(line)
                if digest_of(event, state.digest) != stated:
                    self.problems.append(f"Line {number} of {LOG}, or the line before it, was altered.")
                state.digest = stated  # so that one altered line is one problem
                state.apply(event, line, canonical_json(event))
            except (ValueError, RebindError) as problem:
                state.offset += len(line)
                self.problems.append(f"Line {number} of {LOG} is damaged ({problem}).")
        return 0

    def _check_tensors(self) -> bool:
        """Check the tensors of edits whose files are new or have changed; return whether there are any."""
        identities, changed = self._identities(), []
        rows = self.state.table.rows
        for row, number in enumerate(rows["number"].tolist()):
            if identities.get(number) is None or identities[number] != self.identities.get(number):
                changed.append(row)
        for row in changed:
            id = edit_id(int(rows["number"][row]))
            try:
                (edit,) = self.state.read([row])
                edit.require_complete()
            except RebindError as problem:
                self.problems.append(f"Edit {id}: {problem}")
        self.identities = identities
        return bool(changed)

    def _identities(self) -> dict[int, int]:
        """Return what tells whether the file of an edit has changed, by the number of the edit."""
        found = dict(_files(self.path / EDITS))
        sealed = dict(_files(self.path / SEALED_FOLDER)).get(self.state.sealed_file)
        identities = {}
        table = self.state.table.rows
        for number, flags in zip(table["number"].tolist(), table["flags"].tolist(), strict=True):
            identity = sealed if flags & SEALED else found.get(f"{edit_id(number)}.safetensors")
            if identity is not None:
                identities[number] = identity
        return identities

    def _check_names(self) -> None:
        known = {
            f"{id}.safetensors" for id in EditSequence(self.state, self.state.table.with_flag(SEALED, on=False)).ids
        }
        for name in sorted(name for name, _ in _files(self.path / EDITS)):
            if name not in known and not is_leftover(name, self.state):
                self.problems.append(f"{EDITS}/{name} belongs to no line of {LOG}.")

    # What is remembered

    def _resume(self, log: BinaryIO) -> None:
        """Begin where the last check ended, if the log still begins with what that check has read."""
        for name in reversed(self.snapshots.names(KIND)):
            data = self.snapshots.read(name)
            if data is None:
                continue
            end = data.index(b"\n") + 1
            about = json.loads(data[:end])
            state = load_state(data[end : end + about["state"]], self.path, self.header_digest)
            prefix = hashlib.sha256()
            left = 0 if state is None else state.offset
            log.seek(0)
            while left > 0 and (piece := log.read(min(PIECE, left))):
                prefix.update(piece)
                left -= len(piece)
            if state is not None and left == 0 and prefix.hexdigest() == about["prefix"]:
                stored = np.frombuffer(data[end + about["state"] :], IDENTITY)
                self.identities = dict(zip(stored["number"].tolist(), stored["identity"].tolist(), strict=True))
                self.state, self.prefix = state, prefix
                return

    def _remember(self, seconds: float) -> None:
        state = b"".join(dump_state(self.state, self.header_digest))
        identities = np.array(list(self.identities.items()), IDENTITY)
        if self.snapshots.is_worth(seconds, len(state) + identities.nbytes):
            about = {"prefix": self.prefix.hexdigest(), "state": len(state)}
            parts: Iterable[bytes] = [json.dumps(about).encode() + b"\n", state, identities.tobytes()]
            self.snapshots.replace(KIND, self.snapshots.write(KIND, list(parts)))


def _files(folder: Path) -> list[tuple[str, int]]:
    """Return the files in a folder, each with a digest of its size, times and inode."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, _identity(entry)) for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []


def _identity(entry: os.DirEntry[str]) -> int:
    status = entry.stat()
    return short_digest(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}".encode())
