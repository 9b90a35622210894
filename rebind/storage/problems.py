"""One description for everything that can go wrong while writing: `storage_errors` turns OSError into StorageError."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rebind.errors import StorageError

FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
WRONG_KIND = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def storage_errors(path: Path, *, advice: str = "", settings: Mapping[str, object] | None = None) -> Iterator[None]:
    """Raise StorageError with the path, the system's errno, a code and advice where the body raises an OSError.

    Codes: disk_full, no_write_access, file_in_the_way, folder_in_the_way, symbolic_link; storage_failure otherwise.
    `advice` and `settings` replace the usual advice. safetensors reports a full disk as its own SafetensorError,
    which is treated like the OSError that it wraps. Errors without an errno come from a library and pass through.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as problem:
        number = problem.errno if isinstance(problem, OSError) else _wrapped_errno(problem)
        if number is None:
            raise
        raise _describe(path, number, advice, settings) from problem


def symbolic_link_error(path: Path) -> StorageError:
    """Return the error for a symbolic link where rebind would write through it."""
    error = StorageError(
        f"{path} is a symbolic link, and rebind does not write through links",
        advice="Replace the link by what it points to, or choose another folder",
        code="symbolic_link",
    )
    error.errno = errno.ELOOP
    return error


def _wrapped_errno(problem: SafetensorError) -> int | None:
    match = re.search(r"os error (\d+)", str(problem))
    return int(match[1]) if match else None


def _describe(path: Path, number: int, advice: str, settings: Mapping[str, object] | None) -> StorageError:
    if number == errno.ELOOP and path.is_symlink():
        return symbolic_link_error(path)
    problem = f"Cannot write {path} ({os.strerror(number)})"
    code, usual_advice = "storage_failure", "Check the disk, or choose another folder"
    if number in FULL:
        code, usual_advice = "disk_full", "Free some space, or choose another folder"
    elif number in DENIED:
        code, usual_advice = "no_write_access", "Get write access to the folder, or choose another one"
    elif number in WRONG_KIND and (obstacle := _obstacle(path)):
        kind = "folder" if obstacle.is_dir() else "file"
        problem = f"Cannot write {path}: there is a {kind} at {obstacle}"
        code, usual_advice = f"{kind}_in_the_way", "Move it elsewhere, or choose another name"
    error = StorageError(problem, advice=advice or usual_advice, code=code, settings=settings)
    error.errno = number
    return error


def _obstacle(path: Path) -> Path | None:
    """Return the file where a folder is needed, or the folder where a file was to be written."""
    nearest = nearest_existing(path)
    return nearest if nearest == path or not nearest.is_dir() else None


def nearest_existing(path: Path) -> Path:
    """Return the path itself if anything is there, even a dangling link, else the closest parent that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists() or place.is_symlink())
