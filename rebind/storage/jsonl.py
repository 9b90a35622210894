"""Rows in a file, one JSON object per line, that survive a kill: complete lines stay, a torn last line is ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rebind.errors import InputError, StorageError
from rebind.storage.atomic import to_json
from rebind.storage.problems import storage_errors, symbolic_link_error

Row = dict[str, Any]


class JsonLines:
    """A file of rows with one writer. A torn last line, left by a crash, is dropped by the next append."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> list[Row]:
        """Return all complete rows; none if the file does not exist."""
        return [row for row, _ in self._rows()]

    def append(self, rows: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Add one row or several in a single write, all or none; they are on disk when this returns."""
        rows = [rows] if isinstance(rows, Mapping) else rows
        data = "".join(f"{to_json(row)}\n" for row in rows).encode()
        with _open_for_writing(self.path, create=True) as handle:
            _write_at(handle, _end_of_last_line(handle), data)

    def truncate(self, count: int) -> list[Row]:
        """Keep the first `count` rows and return them."""
        rows = list(self._rows())
        if count > len(rows):
            raise InputError(
                f"{self.path} has {len(rows)} rows",
                expected=f"at least {count}",
                advice="Restore the file, or choose another folder",
                code="rows_missing",
            )
        if os.path.lexists(self.path):
            with _open_for_writing(self.path) as handle:
                _write_at(handle, rows[count - 1][1] if count else 0, b"")
        return [row for row, _ in rows[:count]]

    def _rows(self) -> Iterator[tuple[Row, int]]:
        """Yield each complete row with the offset where its line ends."""
        try:
            *lines, _ = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        end = 0
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise InputError(
                    f"Line {number} of {self.path} is damaged",
                    expected="a JSON object",
                    advice="Restore the file, or remove its folder and run again",
                    code="damaged_row",
                )
            yield row, end


def append_at(path: str | Path, offset: int, data: bytes) -> None:
    """Write `data` at `offset` of an existing file, in place of whatever follows; all of it, on disk, or nothing."""
    path = Path(path)
    with _open_for_writing(path) as handle:
        size = os.fstat(handle).st_size
        if size < offset:
            raise StorageError(
                f"{path} is shorter than expected ({size} bytes instead of {offset})",
                advice="Restore the file from a copy",
                code="file_too_short",
            )
        _write_at(handle, offset, data)


@contextmanager
def _open_for_writing(path: Path, *, create: bool = False) -> Iterator[int]:
    """Open a file without following a symbolic link; errors name its path."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():  # not every system has O_NOFOLLOW
        raise symbolic_link_error(path)
    with storage_errors(path):
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, flags | (os.O_CREAT if create else 0), 0o666)
        try:
            yield handle
        finally:
            os.close(handle)


def _write_at(handle: int, offset: int, data: bytes) -> None:
    try:
        os.ftruncate(handle, offset)
        os.lseek(handle, offset, os.SEEK_SET)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    except BaseException:
        with suppress(OSError):  # if this fails too, readers ignore the torn line
            os.ftruncate(handle, offset)
        raise


def _end_of_last_line(handle: int) -> int:
    """Return the offset behind the last newline; 0 if there is none."""
    size = os.lseek(handle, 0, os.SEEK_END)
    for length in (1, size):  # nearly always the last byte is the newline
        os.lseek(handle, max(size - length, 0), os.SEEK_SET)
        newline = os.read(handle, length).rfind(b"\n")
        if newline >= 0:
            return size - length + newline + 1
    return 0
