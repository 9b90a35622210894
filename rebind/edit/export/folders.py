"""Folders that replace an older one of their kind, and nothing else: filled beside it, then put in its place.

A folder that no export wrote, or with a file that none did (`listing`), is never replaced. `rebind.files` writes
folders that are new, and keeps one that is there.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rebind.edit.export.listing import other_files, own_files, write_list
from rebind.errors import InputError, StorageError
from rebind.files import remove_stale, write_folder_atomically

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

ATTEMPTS = 5  # at putting a folder in a place where others put theirs


def write_folder(path: Path, fill: Callable[[Path], None], mark: str, overwrite: bool) -> Path:
    """Fill a folder beside `path`, then put it in its place; until then what is there stays as it is."""

    def fill_and_list(target: Path) -> None:
        fill(target)
        write_list(target)

    path = path.resolve()
    require_free(path, mark, overwrite)
    name = glob.escape(path.name)
    remove_stale(path.parent, f".{name}.*.new", f"..{name}.*.new.*.tmp")
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        write_folder_atomically(staged, fill_and_list)
        with _alone(path):
            _swap(staged, path, mark, overwrite)
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
    """`mark` is a file that all of the kind that would replace it have.

    What an export that was killed had moved aside is put back first.
    """
    with _alone(path):
        _require_free(path, mark, overwrite)


def _require_free(path: Path, mark: str, overwrite: bool) -> None:
    left = [] if path.exists() else _aside(path, "old")
    if len(left) == 1:
        with contextlib.suppress(OSError):
            left[0].rename(path)
    _require_replaceable(path, mark, overwrite, path)


def _require_replaceable(folder: Path, mark: str, overwrite: bool, path: Path) -> None:
    """`path` is what the folder is called, wherever it is now."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or not (folder / mark).is_file():
        raise _not_replaced(folder, path)
    if not overwrite:
        raise InputError(f"{path} is not empty, expected a new or empty folder: choose another, or pass overwrite=True")
    own = own_files(folder, mark)
    if mark not in own:
        raise _not_replaced(folder, path)
    if others := other_files(folder, own):
        raise InputError(
            f"{path} holds {_named(others)} besides an earlier export and is not replaced, expected only what an "
            f"export wrote: move {'it' if len(others) == 1 else 'them'} elsewhere, or choose another name"
        )


def _not_replaced(folder: Path, path: Path) -> InputError:
    kind = "holds other things" if folder.is_dir() else "is a file"
    return InputError(f"{path} {kind} and is not replaced, expected a new or empty folder: choose another name")


def _named(names: list[str]) -> str:
    """At most three of them.

    >>> _named(["a"]), _named(["a", "b", "c"]), _named(["a", "b", "c", "d", "e"])
    ('a', 'a, b and c', 'a, b, c and 2 more')
    """
    told = names if len(names) <= 3 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)


def _swap(staged: Path, path: Path, mark: str, overwrite: bool) -> None:
    """Put a folder in the place of what may be replaced; where another export is faster, in the place of that one.

    Others are kept away by a lock, but not on all file systems, nor are other programs.
    """
    for _ in range(ATTEMPTS):
        _require_free(path, mark, overwrite)  # saving takes minutes: somebody may have come first
        retired = path.with_name(f".{path.name}.{secrets.token_hex(6)}.old")
        with contextlib.suppress(FileNotFoundError):
            path.rename(retired)
        try:
            _require_replaceable(retired, mark, overwrite, path)  # what was put into it until now would go with it
            staged.rename(path)
        except BaseException as problem:
            if not path.exists():
                if retired.exists():
                    retired.rename(path)
                raise
            if isinstance(problem, InputError) and retired.exists():
                raise InputError(
                    f"{problem}; another export is there now, and what was there is in {retired}"
                ) from None
            if not isinstance(problem, (InputError, OSError)):
                raise
        else:
            _discard_retired(path, mark)
            return
    raise InputError(f"{path} is replaced by others again and again, expected one export at a time: try again later")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let no other export look at a folder while one replaces it: lock the folder that it lies in, if that can be."""
    with contextlib.ExitStack() as locked:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                handle = os.open(path.parent, os.O_RDONLY)
                locked.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _discard_retired(path: Path, mark: str) -> None:
    """Remove what exports have moved aside, this one or a killed one, if it holds nothing else."""
    for retired in _aside(path, "old"):
        with contextlib.suppress(InputError, OSError):
            _require_replaceable(retired, mark, True, path)
            retired.rename(retired.with_suffix(".gone"))  # half of it could not be told from somebody else's
    for gone in _aside(path, "gone"):
        shutil.rmtree(gone, ignore_errors=True)


def _aside(path: Path, kind: str) -> list[Path]:
    """What exports to this path have moved aside: "old" if it may have to come back, "gone" if not."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.{kind}")
    return [folder for folder in path.parent.glob(f".*.{kind}") if name.fullmatch(folder.name)]
