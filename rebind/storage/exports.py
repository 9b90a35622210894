"""Export folders: a later export may replace an earlier one, and nothing else is ever lost with it.

Every export carries a manifest with its kind and the names of its files. Only a folder with such a manifest, and
without any other file, is replaced.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rebind.errors import InputError
from rebind.storage.atomic import TEMPORARY, check_writable, filled_folder, flush_to_disk, read_json_object, write_json
from rebind.storage.problems import storage_errors

MANIFEST = ".rebind-export.json"
AT_WORKING_FOLDER, EXCHANGE = -100, 2  # arguments of renameat2: paths as they are, and both names are exchanged


def replace_folder(path: str | Path, fill: Callable[[Path], None], *, kind: str, overwrite: bool = False) -> Path:
    """Let `fill` write an export into a temporary folder, then put it in place; return the folder's full path.

    The folder must be new or empty. With `overwrite` it may also hold an earlier export of the same kind and nothing
    else. That one stays until the new one is complete, and comes back if the exchange fails.
    """

    def fill_and_list(folder: Path) -> None:
        fill(folder)
        write_json(folder / MANIFEST, {"kind": kind, "files": _files(folder)})

    path = Path(path).resolve()
    check_replaceable(path, kind=kind, overwrite=overwrite)
    with storage_errors(path), filled_folder(path, fill_and_list) as staged:
        check_replaceable(path, kind=kind, overwrite=overwrite)  # filling takes minutes: somebody may have come first
        old = _set_aside(path)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists() and exchange(staged, path):  # no reader finds nothing, whenever this process is killed
            flush_to_disk(path.parent)
            return path
        if path.exists():
            path.rename(old)
        try:
            staged.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        flush_to_disk(path.parent)
        if old.exists():
            old.rename(staged)  # a temporary name: were this process killed now, half of it would not be restored
    return path


def check_replaceable(path: str | Path, *, kind: str, overwrite: bool = False) -> None:
    """Check before long work that `replace_folder` would accept this folder."""
    path = Path(path).resolve()
    check_writable(path.parent)
    old = _set_aside(path)
    if old.exists() and not path.exists():
        old.rename(path)  # a process was killed in the middle of the exchange
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file", expected="a folder", advice="Choose another", code="file_in_the_way")
    names = _files(path)
    if not names:
        return
    stored_kind, own_names = _manifest(path)
    if stored_kind != kind:
        raise InputError(
            f"{path} holds {f'an export of kind {stored_kind!r}' if stored_kind else 'files that are no export'}",
            expected=f"a new or empty folder, or an export of kind {kind!r}",
            advice="Choose another folder",
            code="not_an_export",
        )
    if not overwrite:
        raise InputError(
            f"{path} holds an earlier export",
            expected="a new or empty folder",
            advice="Choose another folder, or use {overwrite} to replace the export",
            settings={"overwrite": True},
            code="folder_not_empty",
        )
    if others := [name for name in names if name not in own_names]:
        listing = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise InputError(
            f"{path} holds files besides the export: {listing}",
            advice="Move them elsewhere, or choose another folder",
            code="other_files_in_export",
        )


def add_to_export(file: str | Path) -> None:
    """Record a file that is about to be written in the manifest of the export it lies in, if it lies in one.

    A later export then replaces the file together with the others.
    """
    file = Path(file).resolve()
    for folder in file.parents:
        kind, names = _manifest(folder)
        if kind:
            names.append(file.relative_to(folder).as_posix())
            write_json(folder / MANIFEST, {"kind": kind, "files": sorted(set(names))})
            return


def exchange(one: Path, two: Path) -> bool:
    """Let two folders change their names in one step; return False where the system or the disk cannot do that."""
    try:
        rename = ctypes.CDLL(None).renameat2  # of Linux
    except (AttributeError, OSError, TypeError):
        return False
    return bool(rename(AT_WORKING_FOLDER, os.fsencode(one), AT_WORKING_FOLDER, os.fsencode(two), EXCHANGE) == 0)


def _set_aside(path: Path) -> Path:
    """Return where an export lies while another one takes its place."""
    return path.with_name(f".{path.name}.rebind-old")


def _manifest(folder: Path) -> tuple[str, list[str]]:
    """Return the kind and the file names that an export recorded; an empty kind if the folder is no export."""
    stored = read_json_object(folder / MANIFEST) or {}
    return stored.get("kind", ""), stored.get("files", [])


def _files(folder: Path) -> list[str]:
    """Return the names of all files and links below a folder, except the manifest and temporaries."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in paths if not TEMPORARY.fullmatch(path.name))
    return sorted(name for name in names if name != MANIFEST)
