"""Rows in a file, one JSON object per line, that survive a kill: complete lines stay, a torn last line is ignored.

The last field of a row, "crc", is a checksum of the row, of all rows before it and of the file's name, so that damage
is noticed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rebind.errors import InputError, StorageError
from rebind.storage.atomic import read_file, to_json
from rebind.storage.problems import storage_errors, symbolic_link_error
from rebind.storage.seals import check_line, checksum_at_end, seal_line

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
        texts = [to_json(row) for row in rows]  # before any file is opened: it may refuse a row
        with _open_for_writing(self.path, create=True) as handle:
            end = _end_of_last_line(handle)
            _write_at(handle, end, _sealed(texts, _checksum_before(handle, end) or self._first_checksum))

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

    @property
    def _first_checksum(self) -> int:
        """What the first row is chained to: the name of the file, so that files cannot be exchanged."""
        return zlib.crc32(self.path.name.encode())

    def _rows(self) -> Iterator[tuple[Row, int]]:
        """Yield each complete row with the offset where its line ends."""
        try:
            *lines, _ = read_file(self.path).split(b"\n")
        except FileNotFoundError:
            return
        except StorageError:
            raise
        except OSError as problem:
            advice = "Restore the file, or remove its folder and run again"
            raise InputError(
                f"{self.path} cannot be read ({problem.strerror})", advice=advice, code="damaged_row"
            ) from None
        end, checksum = 0, self._first_checksum
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            try:
                content, checksum = check_line(line, checksum)
                row = json.loads(content)
            except (ValueError, RecursionError) as problem:
                raise InputError(
                    f"Line {number} of {self.path} is damaged ({problem})",
                    advice="Restore the file, or remove its folder and run again",
                    code="damaged_row",
                ) from None
            yield row, end


def _sealed(texts: Iterable[str], checksum: int) -> bytes:
    """Return rows as lines with checksums, the first one chained to the row with `checksum`."""
    lines = []
    for text in texts:
        lines.append(seal_line(text, checksum).encode() + b"\n")
        checksum = checksum_at_end(lines[-1])
    return b"".join(lines)


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


def _checksum_before(handle: int, end: int) -> int:
    """Return the checksum of the line that ends at an offset."""
    begin = max(end - 32, 0)
    os.lseek(handle, begin, os.SEEK_SET)
    return checksum_at_end(os.read(handle, end - begin))


def _end_of_last_line(handle: int) -> int:
    """Return the offset behind the last newline; 0 if there is none."""
    size = os.lseek(handle, 0, os.SEEK_END)
    for length in (1, size):  # nearly always the last byte is the newline
        os.lseek(handle, max(size - length, 0), os.SEEK_SET)
        newline = os.read(handle, length).rfind(b"\n")
        if newline >= 0:
            return size - length + newline + 1
    return 0
