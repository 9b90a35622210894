"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from rebind.errors import InputError, StorageError

BLOCK = 4096  # bytes that a sample of a file takes
STALE_AFTER = 24 * 3600  # seconds: a temporary this old belongs to a process that was killed
OF_ANOTHER_KIND = (IsADirectoryError, NotADirectoryError, FileExistsError)


class TakenError(InputError, StorageError):
    """Something of another kind lies where a file or a folder was to be written."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or the next start after a crash, sees the old bytes or the new, never a part.

    The bytes are on disk before the name changes hands, and the folder after it: a power cut cannot leave
    the new name on empty blocks. Missing parent folders are made; a link is followed, not replaced.
    """
    path = Path(path).resolve()
    temporary = _temporary(path)
    try:
        with _disk_problems_named(path):
            make_folders(path.parent)
            with temporary.open("xb") as file:  # not mkstemp: the file's mode is then the umask's, not 0600
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync(path.parent)
    finally:
        with contextlib.suppress(OSError):  # a tidy-up that fails must not hide why it was needed
            temporary.unlink(missing_ok=True)


def make_folders(path: Path) -> None:
    """A folder and those it lies in, each on disk in the one above it."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(PermissionError):  # of one that may be written to and not listed
            _sync(folder.parent)


def write_folder_atomically(path: Path, fill: Callable[[Path], None]) -> None:
    """Have `fill` write into a temporary folder beside `path`, then give it that name.

    A folder that is already there, or that another process finishes first, is kept and this one
    discarded: both would hold the same thing, and a reader may have the first one open.
    """
    path = Path(path)
    if path.is_dir():
        return
    temporary = _temporary(path)
    try:
        with _disk_problems_named(path):
            make_folders(path.parent)
            remove_stale(path.parent, f".{path.name}.*.tmp")
            temporary.mkdir()
            fill(temporary)
            _open_to_readers(temporary)
            for folder, _, files in os.walk(temporary):
                for name in files:
                    _sync(Path(folder, name))
                _sync(Path(folder))
            _rename_unless_there(temporary, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """Give each file the mode of a new one, as the umask has it: what safetensors writes is for its owner alone."""
    new = folder / f".{secrets.token_hex(6)}"
    new.touch(exist_ok=False)
    usual = new.stat().st_mode
    new.unlink()
    for path in (Path(root, name) for root, _, names in os.walk(folder) for name in names):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) and mode | usual != mode:
            path.chmod(stat.S_IMODE(mode | usual))


def _temporary(path: Path) -> Path:
    """A name beside the target, on the same file system, that no other writer has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def without_temporary(name: str) -> str:
    """The name that a temporary file was to have; another as it is.

    >>> without_temporary("d/.a.json.0123456789ab.tmp"), without_temporary(".mine.tmp")
    ('d/a.json', '.mine.tmp')
    """
    return re.sub(r"(^|/)\.([^/]+)\.[0-9a-f]{12}\.tmp$", r"\1\2", name)


def sampled(opened: BinaryIO | io.FileIO, starts: Iterable[int]) -> str:
    """The sha256 of the blocks of an open file that begin there: to read all of a large one takes long."""
    digest = hashlib.sha256()
    for start in starts:
        opened.seek(start)
        digest.update(opened.read(BLOCK))
    return digest.hexdigest()


def _rename_unless_there(temporary: Path, path: Path) -> None:
    try:
        temporary.rename(path)
    except OSError:
        if not path.is_dir():
            raise


def require_writable(path: Path, step: str) -> None:
    """Ask before the work whether a folder can be written, or made; nothing is left behind. `step` says what to do."""
    path = Path(path).expanduser().absolute()
    try:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        if not there.is_dir():
            raise InputError(f"{there} is a file, expected a folder: {step}")
        Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=there)).rmdir()
    except OSError as problem:
        error = StorageError(
            f"cannot write {path} ({problem.strerror or problem}), expected a folder with room and write access: {step}"
        )
        error.errno = problem.errno
        raise error from None


def require_writable_beside(path: Path, step: str) -> None:
    """The same of a folder that is filled beside its place and then put there, whatever may be written in it."""
    path = Path(path).expanduser().resolve()
    if is_file(path):
        raise InputError(f"{path} is a file, expected a folder: {step}")
    require_writable(path.parent, step)


def is_file(path: Path | str) -> bool:
    """Whether a file is there; a text that no file can have for its name is none."""
    try:
        return Path(path).is_file()
    except OSError:
        return False


def remove_stale(folder: Path, *patterns: str) -> None:
    """Remove folders of these names that a killed process was filling."""
    for left in (left for pattern in patterns for left in folder.glob(pattern)):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_AFTER:
                shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    if os.name == "nt":  # opens no folders, and flushes only what was opened for writing
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _in_the_way(path: Path) -> StorageError | None:
    """What lies where a file or a folder was to be written, if that is what was wrong."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if there == path and there.is_dir():
        return TakenError(f"{path} is a folder, expected a file: choose another name")
    if there.is_dir():
        return None
    where = "" if there == path else f"cannot write {path}: "
    return TakenError(f"{where}{there} is a file, expected a folder: choose another name")


@contextlib.contextmanager
def _disk_problems_named(path: Path) -> Iterator[None]:
    """Say which path could not be written: a bare `No space left on device` names none."""
    try:
        yield
    except StorageError:
        raise
    except OSError as problem:
        if problem.errno is None:  # raised by a library for reasons of its own, not by the system
            raise
        error = _in_the_way(path) if isinstance(problem, OF_ANOTHER_KIND) else None
        error = error or StorageError(
            f"cannot write {path} ({problem.strerror or problem}), expected a folder with room and write access: "
            f"free some space, or choose another folder"
        )
        error.errno = problem.errno
        raise error from problem
