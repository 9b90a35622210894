"""Folders that replace an older one of their kind, and nothing else: filled beside it, then put in its place.

`rebind.files` writes folders that are new, and keeps one that is there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from rebind.errors import InputError, StorageError
from rebind.files import remove_stale, write_folder_atomically


def write_folder(path: Path, fill: Callable[[Path], None], mark: str, overwrite: bool) -> Path:
    """Fill a folder beside `path`, then put it in its place; until then what is there stays as it is."""
    path = path.resolve()
    require_free(path, mark, overwrite)
    remove_stale(path.parent, f".{path.name}.*.new", f"..{path.name}.*.new.*.tmp")
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        write_folder_atomically(staged, fill)
        require_free(path, mark, overwrite)  # saving takes minutes: somebody may have come first
        _swap(staged, path)
    except (OSError, SafetensorError) as problem:
        number = getattr(problem, "errno", None)
        error = StorageError(
            f"cannot write {path} ({os.strerror(number) if number else problem}), expected a folder with room and "
            f"write access: free some space, or choose another folder"
        )
        error.errno = number
        raise error from problem
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return path


def require_free(path: Path, mark: str, overwrite: bool) -> None:
    """`mark` is the file that shows what lies there to be of the kind that would replace it."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or not (path / mark).is_file():
        kind = "holds other things" if path.is_dir() else "is a file"
        raise InputError(f"{path} {kind} and is not replaced, expected a new or empty folder: choose another name")
    if not overwrite:
        raise InputError(f"{path} is not empty, expected a new or empty folder: choose another, or pass overwrite=True")


def _swap(staged: Path, path: Path) -> None:
    if not path.exists():
        staged.rename(path)
        return
    retired = staged.with_suffix(".old")
    path.rename(retired)
    try:
        staged.rename(path)
    except BaseException:
        retired.rename(path)
        raise
    shutil.rmtree(retired, ignore_errors=True)
