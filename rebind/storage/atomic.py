"""Files and folders that appear complete or not at all, whatever happens to the process that writes them.

Content goes into a temporary beside its destination, is flushed to disk and then renamed. A reader, or the next
start after a crash, sees the old content or the new one. Temporaries that a killed process left are removed a day
later by the next write into the same folder.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from rebind.errors import InputError
from rebind.storage.problems import nearest_existing, storage_errors, symbolic_link_error

STALE_SECONDS = 24 * 3600  # a temporary this old belongs to a process that was killed
TEMPORARY = re.compile(r"\.rebind-[0-9a-f]{12}\.tmp")


def write_file(path: str | Path, data: bytes) -> None:
    """Write a file atomically, with missing parent folders and the permissions that the umask allows.

    A symbolic link at `path` is replaced by the file; what it points to stays as it is.
    """
    path = Path(path)
    with storage_errors(path):
        make_folders(path.parent)
        remove_temporaries(path.parent, STALE_SECONDS)
        temporary = _temporary(path)
        try:
            with temporary.open("xb") as file:  # not mkstemp, which creates files that only their owner can read
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)
        finally:
            with suppress(OSError):  # cleaning up must not hide the error that made it necessary
                temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: object) -> None:
    """Write a value as indented JSON, atomically."""
    write_file(path, to_json(value, indent=1).encode() + b"\n")


def to_json(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON text; raise InputError (code not_json) for NaN, infinities and unknown types."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise InputError(
            f"This value cannot be stored as JSON ({problem})",
            expected="finite numbers, texts, lists and dictionaries",
            advice="Convert it first",
            code="not_json",
        ) from None


def make_folders(path: str | Path) -> None:
    """Create a folder with its parents and flush each new name to disk."""
    path = Path(path)
    with storage_errors(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            with suppress(PermissionError):  # a parent may be writable without being readable
                sync(folder.parent)


def path_inside(root: str | Path, name: str | PurePath) -> Path:
    """Return `root / name`, a place to write to; raise if it lies outside or a folder on the way is a symbolic link.

    Use it for everything below a ledger, an export or a run folder, which may come from somebody else.
    """
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise InputError(f"{name} lies outside {root}", expected="a relative path without ..", code="path_outside")
    folder = Path(root)
    for part in parts[:-1]:
        folder = folder / part
        if folder.is_symlink():
            raise symbolic_link_error(folder)
    return folder / parts[-1]


def check_writable(
    folder: str | Path,
    *,
    advice: str = "Choose another folder",
    settings: Mapping[str, object] | None = None,
) -> None:
    """Check before long work that a folder can be written, or created; nothing is left behind."""
    folder = Path(folder).absolute()
    with storage_errors(folder, advice=advice, settings=settings):
        nearest = nearest_existing(folder)
        if not nearest.is_dir():
            raise InputError(
                f"{nearest} is a file", expected="a folder", advice=advice, settings=settings, code="file_in_the_way"
            )
        Path(tempfile.mkdtemp(prefix=".rebind-", suffix=".tmp", dir=nearest)).rmdir()


def create_folder(path: str | Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a temporary folder, then give it its name. For caches and checkpoints.

    A folder that already exists, or that another process finishes first, stays and wins: both hold the same content,
    and a reader may have the first one open.
    """
    path = Path(path)
    if path.is_dir():
        return
    with storage_errors(path), filled_folder(path, fill) as temporary:
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
        sync(path.parent)


@contextmanager
def filled_folder(path: Path, fill: Callable[[Path], None]) -> Iterator[Path]:
    """Provide a temporary folder beside `path` with what `fill` wrote, flushed to disk."""
    make_folders(path.parent)
    remove_temporaries(path.parent, STALE_SECONDS)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        fill(temporary)
        usual_mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666
        for root, _, names in os.walk(temporary):
            for file in (Path(root, name) for name in names):
                mode = file.lstat().st_mode
                if stat.S_ISREG(mode):
                    file.chmod(stat.S_IMODE(mode) | usual_mode)  # safetensors lets only the owner read its files
                    sync(file)
            sync(Path(root))
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_temporaries(folder: str | Path, older_than: float = 0.0) -> None:
    """Remove temporaries that killed processes left in a folder; those of the last `older_than` seconds stay."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not TEMPORARY.fullmatch(entry.name):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime < older_than:
                continue
            remove(Path(entry.path))


def remove(path: Path) -> None:
    """Remove a file, a symbolic link or a whole folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if os.name == "nt":  # Windows opens no folders, and flushes only files that are open for writing
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is no such file or it holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _temporary(path: Path) -> Path:
    """Return a name beside `path`, on the same file system, that no other writer uses."""
    return path.with_name(f".rebind-{secrets.token_hex(6)}.tmp")
