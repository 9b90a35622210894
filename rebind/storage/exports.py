"""Export folders: a folder that a later export may replace, and nothing else may be lost with it.

Every export carries a manifest with its kind and the names of its files. Only a folder with such a manifest, and
without any other file, is ever replaced.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from rebind.errors import InputError
from rebind.storage.atomic import (
    TEMPORARY,
    check_writable,
    filled_folder,
    read_json_object,
    remove,
    sync,
    write_json,
)
from rebind.storage.problems import storage_errors

MANIFEST = ".rebind-export.json"


def replace_folder(path: str | Path, fill: Callable[[Path], None], *, kind: str, overwrite: bool = False) -> Path:
    """Let `fill` write an export into a temporary folder, then put it in place; return the folder's path.

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
        remove(old)
        if path.exists():
            path.rename(old)
        try:
            staged.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        sync(path.parent)
        if old.exists():
            old.rename(staged)  # a temporary name: if this process is killed, nobody restores half a folder
            shutil.rmtree(staged, ignore_errors=True)
    return path


def check_replaceable(path: str | Path, *, kind: str, overwrite: bool = False) -> None:
    """Check before long work that `replace_folder` would accept this folder."""
    path = Path(path).resolve()
    check_writable(path.parent)
    old = _set_aside(path)
    if old.exists() and not path.exists():
        old.rename(path)  # a process was killed in the middle of the exchange
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"{path} is a file", expected="a folder", advice="Choose another", code="file_in_the_way")
    names = _files(path)
    if not names:
        return
    manifest = _manifest(path)
    if manifest is None:
        raise InputError(
            f"{path} holds files that are not from an export",
            expected="a new or empty folder",
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
    if manifest[0] != kind:
        raise InputError(
            f"{path} holds an export of kind {manifest[0]!r}",
            expected=f"one of kind {kind!r}",
            advice="Choose another folder",
            code="export_of_other_kind",
        )
    if strangers := [name for name in names if name not in manifest[1]]:
        shown = ", ".join(strangers[:3]) + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else "")
        raise InputError(
            f"{path} holds files besides the export: {shown}",
            advice="Move them elsewhere, or choose another folder",
            code="other_files_in_export",
        )


def add_to_export(file: str | Path) -> None:
    """Record a file that is about to be written in the manifest of the export it lies in, if it lies in one.

    A later export then replaces the file together with the others.
    """
    file = Path(file).absolute()
    for folder in file.parents:
        if (manifest := _manifest(folder)) is not None:
            kind, names = manifest
            write_json(
                folder / MANIFEST, {"kind": kind, "files": sorted({*names, file.relative_to(folder).as_posix()})}
            )
            return


def _set_aside(path: Path) -> Path:
    """Return where an export lies while another one takes its place."""
    return path.with_name(f".{path.name}.rebind-old")


def _manifest(folder: Path) -> tuple[str, list[str]] | None:
    """Return the kind and the file names that an export recorded; None if the folder is no export."""
    path = folder / MANIFEST
    stored = None if path.is_symlink() else read_json_object(path)
    if stored is None or not isinstance(stored.get("kind"), str) or not isinstance(stored.get("files"), list):
        return None
    return stored["kind"], stored["files"]


def _files(folder: Path) -> list[str]:
    """Return the names of all files and links below a folder, except the manifest and temporaries."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in paths if not TEMPORARY.fullmatch(path.name))
    return sorted(name for name in names if name != MANIFEST)
