"""What the events of a log add up to: the edits, and which of them are undone.

Events are applied one after the other; one that cannot follow those before it is refused. An event holds everything
about an edit but its tensors, which stay on disk until they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.log import damaged, digest_of, parse_line

EDITS = "edits"  # the folder of the tensors, one file per edit


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of an edit on disk, read on access. The digest of the file is checked before the first read."""

    def __init__(self, path: Path, sha256: str) -> None:
        self.path, self.sha256 = path, sha256
        self._checked = False

    def __getitem__(self, name: str) -> Tensor:
        with self._open() as file:
            if name not in file.keys():  # noqa: SIM118 - the file is not a mapping
                raise KeyError(name)
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        with self._open() as file:
            return iter(tuple(file.keys()))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        advice = f"Restore the file from a copy, or undo edit {self.path.stem}"
        try:
            if not self._checked:
                with self.path.open("rb") as data:
                    if hashlib.file_digest(data, "sha256").hexdigest() != self.sha256:
                        raise damaged(f"{self.path} was altered: its digest does not match the log", advice)
                self._checked = True
            with safe_open(str(self.path), framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as problem:
            raise damaged(f"{self.path} cannot be read ({problem})", advice) from None


@dataclass
class LedgerState:
    """The edits after the lines so far, and where the next line goes."""

    digest: str  # of the last line, or of the header if there is none
    folder: Path | None = None  # the ledger's; None if it is in memory
    offset: int = 0  # bytes of the log that were read
    lines: int = 0
    edits: dict[str, Edit] = field(default_factory=dict)  # by id, in order
    undone: set[str] = field(default_factory=set)

    @property
    def next_id(self) -> str:
        return f"e{len(self.edits) + 1:04d}"

    def read_line(self, line: bytes, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Apply the event of a line, which ends in a newline; raise ValueError if it does not continue the chain."""
        event, digest = parse_line(line)
        if digest_of(event, self.digest) != digest:
            raise ValueError("its digest does not match")
        self.apply(event, tensors)
        self.digest = digest
        self.offset += len(line)
        self.lines += 1

    def apply(self, event: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Apply an event, or raise ValueError and change nothing. Without `tensors` an edit's are read from disk."""
        kind, id = event.get("event"), event.get("id")
        if kind == "edit" and id == self.next_id:
            if self.folder is not None:
                tensors = StoredTensors(self.folder / EDITS / f"{id}.safetensors", str(event.get("sha256")))
            try:
                self.edits[id] = Edit.from_json(id, event, {} if tensors is None else tensors)
            except (KeyError, TypeError, AttributeError) as problem:
                raise ValueError(f"an incomplete edit ({problem!r})") from None
        elif kind == "undo" and id in self.edits and id not in self.undone:
            self.undone.add(id)
        elif kind == "redo" and id in self.undone:
            self.undone.remove(id)
            if event.get("forced") is True:
                self.edits[id] = replace(self.edits[id], forced=True)
        else:
            raise ValueError(f"the event {kind!r} of {id!r} cannot follow the events before it")
