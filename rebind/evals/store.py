"""Rows on disk, one JSON object a line, that survive a kill: what was written stays, half a line goes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rebind.errors import InputError, StorageError
from rebind.files import write_atomically

Row = dict[str, Any]


class Lines:
    """A file of rows, only ever appended to; `rows` has those on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._ends: list[int] = [0]  # where each row ends in the file, the first begins at 0
        data = path.read_bytes() if path.exists() else b""
        for line in data.splitlines(keepends=True):
            row = _parsed(line)
            if row is None:
                if self._ends[-1] + len(line) < len(data):
                    raise InputError(
                        f"line {len(self.rows) + 1} of {path} is not a row ({line[:40]!r}), expected a JSON object: "
                        f"restore the file, or remove its folder and run again"
                    )
                break  # the line that a kill cut short
            self.rows.append(row)
            self._ends.append(self._ends[-1] + len(line))

    def keep(self, count: int) -> None:
        """Forget the rows after the first `count`, and half a line if there is one."""
        del self.rows[count:], self._ends[count + 1 :]
        if self.path.exists() and self.path.stat().st_size > self._ends[-1]:
            os.truncate(self.path, self._ends[-1])

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows: on disk when this returns."""
        data = [(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode() for row in rows]
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(data))
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            raise StorageError(
                f"cannot write {self.path} ({problem.strerror}), expected room and write access: free some space and "
                f"run the same command again, it goes on from here"
            ) from problem
        self.rows += rows
        for line in data:
            self._ends.append(self._ends[-1] + len(line))


def _parsed(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def write_json(path: Path, content: Any) -> None:
    data = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, data.encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"no {path.name} in {path.parent}, expected a folder that `rebind eval` made: check it"
        ) from None
    except (OSError, ValueError) as problem:
        raise InputError(f"{path} cannot be read ({problem}): run the evaluation again into another folder") from None
