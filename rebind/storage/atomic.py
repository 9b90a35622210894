"""Files and folders that appear complete or not at all, whatever happens to the process that writes them.

Content goes into a temporary beside its destination, is flushed to disk and then renamed. A reader, or the next
start after a crash, sees the old content or the new one. Temporaries that a killed process left are removed a day
later, by the next write into the same folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from rebind.errors import InputError
from rebind.storage.problems import nearest_existing, storage_errors, symbolic_link_error

STALE_SECONDS = 24 * 3600  # a temporary this old belongs to a process that was killed
Buffer: TypeAlias = bytes | memoryview
_SWEPT: dict[Path, float] = {}  # when this process looked for stale temporaries in a folder
DIGESTS = ".rebind-digests.json"  # of the files in a sealed folder
TEMPORARY = re.compile(r"\.rebind-[0-9a-f]{12}\.tmp")


def write_file(
    path: str | Path, data: bytes | Iterable[Buffer], *, staging: str | Path | None = None, flush: bool = True
) -> None:
    """Write a file atomically, with missing parent folders and the permissions that the umask allows.

    A symbolic link at `path` is replaced by the file; what it points to stays as it is. The temporary lies beside it,
    or in the folder `staging` of the same file system, where the temporaries of killed processes are easily found.
    Without `flush` the file is complete or absent only as long as the machine runs: for caches that carry a digest.
    """
    path = Path(path)
    parts = [data] if isinstance(data, bytes) else data
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary_beside(path if staging is None else Path(staging) / path.name)
        try:
            with temporary.open("xb") as file:  # not mkstemp, which creates files that only their owner can read
                for part in parts:
                    file.write(part)
                file.flush()
                if flush:
                    os.fsync(file.fileno())
            temporary.replace(path)
            if flush:
                flush_to_disk(path.parent)
        finally:
            with suppress(OSError):  # cleaning up must not hide the error that made it necessary
                temporary.unlink(missing_ok=True)


def open_to_read(path: str | Path) -> io.BufferedReader:
    """Open a file; raise StorageError with code "symbolic_link" if there is a symbolic link in its place."""
    path = Path(path)
    if path.is_symlink():
        raise symbolic_link_error(path)
    no_link = getattr(os, "O_NOFOLLOW", 0)  # a link that appears just now is refused as well
    return os.fdopen(os.open(path, os.O_RDONLY | no_link | getattr(os, "O_BINARY", 0)), "rb")


def read_file(path: str | Path) -> bytes:
    """Return the content of a file, which must not be a symbolic link."""
    with open_to_read(path) as file:
        return file.read()


def write_json(path: str | Path, value: object) -> None:
    """Write a value as indented JSON, atomically."""
    try:
        data = to_json(value, indent=1).encode()
    except UnicodeEncodeError:  # bytes of a command line that are not UTF-8
        problem = f"A text for {Path(path).name} is not valid Unicode"
        raise InputError(problem, expected="UTF-8", code="not_unicode") from None
    write_file(path, data + b"\n")


def to_json(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON text; NaN and infinities are refused, because other programs cannot read them."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise InputError(
            f"This value cannot be stored as JSON ({problem})",
            expected="finite numbers, texts, lists and dictionaries",
            advice="Convert it first",
            code="not_json",
        ) from None


def without_nan(value: Any) -> Any:
    """Return a value for JSON with None in place of NaN and infinities, which JSON does not know."""
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json_object(path: str | Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no such file, a symbolic link, or anything else in it."""
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def make_folders(path: str | Path) -> None:
    """Create a folder with its parents."""
    with storage_errors(Path(path)):
        Path(path).mkdir(parents=True, exist_ok=True)


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


def check_writable(folder: str | Path) -> None:
    """Check before long work that a folder can be written, or created; nothing is left behind."""
    folder = Path(folder).absolute()
    with storage_errors(folder):
        nearest = nearest_existing(folder)
        if not nearest.is_dir():
            raise InputError(
                f"{nearest} is a file", expected="a folder", advice="Choose another folder", code="file_in_the_way"
            )
        probe = _temporary_beside(nearest / "probe")
        probe.mkdir()
        probe.rmdir()


def create_folder(path: str | Path, fill: Callable[[Path], None], *, sealed: bool = False) -> None:
    """Let `fill` write into a temporary folder, then give it its name. For caches and checkpoints.

    A folder that already exists, or that another process finishes first, stays: both hold the same content, and a
    reader may have the first one open. A `sealed` folder has digests of its files, and is made anew if one does not
    match; to check them takes a second per gigabyte.
    """
    path = Path(path)
    if path.is_symlink():
        raise symbolic_link_error(path)
    if sealed and path.is_dir() and read_json_object(path / DIGESTS) != _digests(path):
        remove_folder(path)
    if path.is_dir():
        return

    def fill_and_seal(folder: Path) -> None:
        fill(folder)
        if sealed:
            write_json(folder / DIGESTS, _digests(folder))

    with storage_errors(path), filled_folder(path, fill_and_seal) as temporary:
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
        flush_to_disk(path.parent)


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file in a folder, except that of the digests."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.name != DIGESTS and not path.is_dir():
            digests[path.relative_to(folder).as_posix()] = "" if path.is_symlink() else _digest(path)
    return digests


def _digest(path: Path) -> str:
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def filled_folder(path: Path, fill: Callable[[Path], None]) -> Iterator[Path]:
    """Provide a temporary folder beside `path` with what `fill` wrote, flushed to disk."""
    temporary = _temporary_beside(path)
    temporary.mkdir()
    try:
        fill(temporary)
        usual_mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666
        for root, _, names in os.walk(temporary):
            for file in (Path(root, name) for name in names):
                if not file.is_symlink():
                    file.chmod(file.stat().st_mode | usual_mode)  # safetensors lets only the owner read its files
                    flush_to_disk(file)
            flush_to_disk(Path(root))
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_file(path: str | Path) -> None:
    """Remove a file, if it exists."""
    with storage_errors(Path(path)):
        Path(path).unlink(missing_ok=True)


def remove_folder(path: str | Path) -> None:
    """Remove a folder of ours so that no reader ever sees a part of it; what cannot be removed stays."""
    path = Path(path)
    with suppress(OSError):
        hidden = path.with_name(f".rebind-{secrets.token_hex(6)}.tmp")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_temporaries(folder: str | Path, older_than: float = 0.0) -> None:
    """Remove temporaries that killed processes left in a folder, if they are older than so many seconds."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not TEMPORARY.fullmatch(entry.name):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime < older_than:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            else:
                Path(entry).unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if os.name == "nt":  # Windows opens no folders, and flushes only files that are open for writing
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary_beside(path: Path) -> Path:
    """Return a name that no other writer uses, on the file system of `path`, in a folder without stale temporaries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    now = time.monotonic()
    if now - _SWEPT.get(path.parent, -STALE_SECONDS) >= STALE_SECONDS:  # to look at 100,000 files takes a while
        remove_temporaries(path.parent, STALE_SECONDS)
        _SWEPT[path.parent] = now
    return path.with_name(f".rebind-{secrets.token_hex(6)}.tmp")
