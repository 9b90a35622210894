"""A run's log: one JSON object a line, cut back to the checkpoint when a run goes on from one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rebind.errors import InputError, StorageError

Row = dict[str, Any]


class Log:
    """Rows on disk. What decides nothing but the clock goes into another file, so that logs can be compared."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int) -> None:
        """Forget what was written after the first `size` bytes."""
        if self.size < size:
            raise InputError(
                f"{self.path} has {self.size} bytes and its checkpoint expected {size} or more: restore the file, or "
                f"train into another folder"
            )
        if self.path.exists():
            os.truncate(self.path, size)

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows: on disk when this returns."""
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            raise StorageError(
                f"cannot write {self.path} ({problem.strerror}), expected room and write access: free some space and "
                f"run the same command again, it goes on from its last checkpoint"
            ) from problem

    def rows(self) -> list[Row]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
