"""The tensors of an edit on disk: a safetensors file of its own, or a part of the file of a compacted ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from rebind.errors import LedgerError
from rebind.storage import open_to_read, path_inside

UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError)


def damaged(problem: str, advice: str = "Restore the folder from a copy") -> LedgerError:
    """Return the error for a file of a ledger that is missing or was altered."""
    return LedgerError(problem, advice=advice, code="ledger_damaged")


class StoredTensors(Mapping[str, Tensor]):
    """Tensors on disk. Every access reads them, checks their digest, and remembers only their names.

    Whoever needs several of them calls `load`, which reads once.
    """

    def __init__(self, path: Path, sha256: str, start: int = 0, length: int | None = None) -> None:
        self.path, self.sha256, self.start, self.length = path, sha256, start, length
        self._names: tuple[str, ...] | None = None

    def load(self) -> dict[str, Tensor]:
        """Return all tensors."""
        try:
            tensors = load(self.read())
        except UNREADABLE as problem:
            raise damaged(f"{self.path} cannot be read ({problem})", self._advice) from None
        self._names = tuple(tensors)
        return tensors

    def read(self) -> bytes:
        """Return the bytes of the tensors; raise LedgerError if they were altered."""
        try:
            with open_to_read(path_inside(self.path.parents[1], Path(*self.path.parts[-2:]))) as file:
                file.seek(self.start)
                data = file.read() if self.length is None else file.read(self.length)
        except OSError as problem:
            raise damaged(f"{self.path} cannot be read ({problem})", self._advice) from None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise damaged(f"{self.path} was altered: its digest does not match the log", self._advice)
        return data

    @property
    def _advice(self) -> str:
        whole = self.length is None
        return f"Restore the file from a copy, or undo edit {self.path.stem}" if whole else "Restore it from a copy"

    def __getitem__(self, name: str) -> Tensor:
        return self.load()[name]

    def __contains__(self, name: object) -> bool:
        return name in (self._names or tuple(self))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names or tuple(self.load()))

    def __len__(self) -> int:
        return sum(1 for _ in self)
