"""Edits read back from a ledger: what the events of its log amount to.

Events are taken one after the other, and one that cannot follow what came before is refused. An edit's event says
everything but its tensors. These stay on disk until they are asked for, and are checked against the digest in the
event before the first is read.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.log import short
from rebind.errors import LedgerError

EDITS = "edits"  # the folder of the tensors, a file an edit


# An edit's tensors on disk


class _Stored(Mapping[str, Tensor]):
    """The tensors of an edit on disk: read when asked for, after the file's digest was checked once."""

    def __init__(self, path: Path, sha256: str) -> None:
        self.path, self.sha256 = path, sha256
        self._names: tuple[str, ...] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._checked():
            raise KeyError(name)
        with self._named(), safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checked())

    def __len__(self) -> int:
        return len(self._checked())

    def _checked(self) -> tuple[str, ...]:
        if self._names is None:
            with self._named():
                with self.path.open("rb") as data:
                    found = hashlib.file_digest(data, "sha256").hexdigest()
                if found != self.sha256:
                    raise LedgerError(
                        f"{self.path} was altered (sha256 {short(found)}, the log says {short(self.sha256)}): "
                        f"restore the file from a copy, or undo edit {self.path.stem}"
                    )
                with safe_open(str(self.path), framework="pt") as file:
                    self._names = tuple(file.keys())
        return self._names

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as problem:
            raise LedgerError(
                f"{self.path} cannot be read ({problem}): restore the file from a copy, or undo edit {self.path.stem}"
            ) from None


def stored_tensors(folder: Path, event: Mapping[str, Any], id: str) -> Mapping[str, Tensor]:
    """The tensors of the edit that an event tells of, in a ledger's folder."""
    return _Stored(folder / EDITS / f"{id}.safetensors", str(event.get("sha256")))


# What the events amount to


@dataclass
class State:
    """What the events so far amount to."""

    digest: str  # of the last line, or of the header
    offset: int = 0  # where the next line begins
    lines: int = 0
    edits: dict[str, Edit] = field(default_factory=dict)  # in order
    undone: set[str] = field(default_factory=set)

    @property
    def next_id(self) -> str:
        return f"e{len(self.edits) + 1:04d}"

    def take(self, event: Mapping[str, Any], tensors: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Let an event happen, or raise ValueError and stay as it was."""
        kind, name = event.get("event"), event.get("id")
        if kind == "edit":
            if name != self.next_id:
                raise ValueError(f"edit {name!r} where {self.next_id} comes next")
            self.edits[self.next_id] = _edit(event, tensors(self.next_id))
        elif kind == "undo" and name in self.edits and name not in self.undone:
            self.undone.add(name)
        elif kind == "redo" and name in self.undone:
            self.undone.remove(name)
            if event.get("forced") is True:
                self.edits[name] = replace(self.edits[name], forced=True)
        else:
            raise ValueError(f"{kind!r} of {name!r}, which cannot follow what came before")


def _edit(event: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Edit:
    try:
        return Edit(
            id=event["id"],
            facts=tuple(Fact.from_json(record) for record in event["facts"]),
            method=event["method"],
            settings=event["settings"],
            sites=tuple(event["sites"]),
            tensors=tensors,
            scores=event["scores"],
            versions=event["versions"],
            created=event["created"],
            forced=event["forced"],
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"an edit without its parts ({problem!r})") from None
