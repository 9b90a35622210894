"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from rebind.errors import InputError


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target, flush to disk, rename over it; a link is followed, not replaced."""
    path = path.resolve()
    if not path.parent.is_dir():
        raise InputError(f"folder {path.parent} does not exist, expected one to write {path.name} in: make it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system lets a folder be synced."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
