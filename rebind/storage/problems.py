"""One description for everything that can go wrong with a file.

While writing, OSError becomes StorageError. While what was stored is used, errors of Python become InputError: a file
may be forged with matching digests.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rebind.errors import InputError, RebindError, StorageError

FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
WRONG_KIND = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the body into a StorageError with the path, the errno, a code and advice.

    safetensors and tokenizers report a full disk as errors of their own, which are treated like the OSError that they
    wrap. Errors without an errno come from a library, not from the system, and pass through.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as problem:  # tokenizers raises plain ones
        number = problem.errno if isinstance(problem, OSError) else _wrapped_errno(problem)
        if number is None:
            raise
        raise _describe(path, number) from problem


@contextmanager
def damage_errors(path: Path, *, advice: str, code: str) -> Iterator[None]:
    """Turn the errors that values of other types and sizes cause into an InputError that names the file."""
    try:
        yield
    except RebindError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        raise InputError(f"What is stored in {path} cannot be used ({problem!r})", advice=advice, code=code) from None


def symbolic_link_error(path: Path) -> StorageError:
    """Return the error for a symbolic link that reading or writing would follow."""
    error = StorageError(
        f"{path} is a symbolic link, and rebind follows no links inside its folders",
        advice="Replace the link by what it points to, or choose another folder",
        code="symbolic_link",
    )
    error.errno = errno.ELOOP
    return error


def nearest_existing(path: Path) -> Path:
    """Return the path itself if anything is there, even a dangling link, else the closest parent that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists() or place.is_symlink())


def _wrapped_errno(problem: Exception) -> int | None:
    if type(problem) not in (Exception, SafetensorError):
        return None
    match = re.search(r"os error (\d+)", str(problem))
    return int(match[1]) if match else None


def _describe(path: Path, number: int) -> StorageError:
    if number == errno.ELOOP and path.is_symlink():
        return symbolic_link_error(path)
    problem = f"Cannot write {path} ({os.strerror(number)})"
    code, advice = "storage_failure", "Check the disk, or choose another folder"
    if number in FULL:
        code, advice = "disk_full", "Free some space, or choose another folder"
    elif number in DENIED:
        code, advice = "no_write_access", "Get write access to the folder, or choose another one"
    elif number in WRONG_KIND:
        obstacle = nearest_existing(path)
        kind = "folder" if obstacle.is_dir() else "file"
        problem = f"Cannot write {path}: there is a {kind} at {obstacle}"
        code, advice = f"{kind}_in_the_way", "Move it elsewhere, or choose another name"
    error = StorageError(problem, advice=advice, code=code)
    error.errno = number
    return error
