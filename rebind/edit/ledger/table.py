"""A table of the edits of a ledger: where each line is, and what must be known of an edit without reading it.

A row takes 48 bytes and every mention of a subject or a prompt 12, so the table of a hundred thousand edits is read in
milliseconds, where their lines would take seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rebind.edit.facts.fact import Fact, comparable
from rebind.edit.ledger.edit import TOKEN_BYTES, Edit

ROW = np.dtype(
    [
        ("number", "<u4"),  # of its id
        ("kind", "<u4"),
        ("flags", "<u4"),
        ("length", "<u4"),  # of its line, which begins at `start`
        ("start", "<u8"),
        ("check", "<u8"),  # digest of the line
        ("token", "<u8", (TOKEN_BYTES // 8,)),
    ]
)
MENTION = np.dtype([("key", "<u8"), ("row", "<u4")])
UNDONE, FORCED, SEALED = 1, 2, 4
UNSORTED = 4096  # mentions that are searched one by one

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Kind:
    """What edits have in common: usually a ledger has a handful of kinds."""

    method: str
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    moments: str  # JSON
    has_rows: bool
    consolidates: bool

    @classmethod
    def of(cls, edit: Edit) -> Kind:
        settings: Any = edit.settings
        moments = json.dumps(settings.get("moments"), sort_keys=True)
        layers = tuple(settings.get("layers") or ())
        return cls(edit.method, edit.sites, layers, moments, edit.has_rows, bool(edit.consolidates))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Kind:
        return cls(**{**stored, "sites": tuple(stored["sites"]), "layers": tuple(stored["layers"])})


def short_digest(data: bytes) -> int:
    """Return a digest of 8 bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def subject_key(subject: str) -> int:
    """Return what a subject is looked up by; it must be `comparable`."""
    return short_digest(b"subject " + subject.encode())


def prompt_key(text: str) -> int:
    """Return what a prompt is looked up by; it must be `comparable`."""
    return short_digest(b"prompt " + text.encode())


def fact_keys(facts: Iterable[Fact]) -> list[int]:
    """Return what facts are looked up by: their subjects and their prompts."""
    keys = [(subject_key(comparable(fact.subject)), prompt_key(comparable(fact.text))) for fact in facts]
    return list(dict.fromkeys(key for pair in keys for key in pair))


class GrowingArray:
    """An array that rows are appended to."""

    def __init__(self, data: NDArray[Any]) -> None:
        self._data, self._count = data, len(data)

    @property
    def rows(self) -> NDArray[Any]:
        return self._data[: self._count]

    def append(self, *rows: Any) -> None:
        needed = self._count + len(rows)
        if needed > len(self._data):
            grown = np.zeros(max(needed, 2 * len(self._data), 64), self._data.dtype)
            grown[: self._count] = self.rows
            self._data = grown
        for row in rows:
            self._data[self._count] = row
            self._count += 1


class EditTable:
    """The edits of a ledger in order, as rows, and an index of the subjects and the prompts of their facts."""

    def __init__(
        self, rows: NDArray[Any] | None = None, mentions: NDArray[Any] | None = None, kinds: Iterable[Kind] = ()
    ) -> None:
        self._rows = GrowingArray(np.zeros(0, ROW) if rows is None else rows)
        self._mentions = GrowingArray(np.zeros(0, MENTION) if mentions is None else mentions)
        self.kinds = list(kinds)
        self._kind_numbers = {kind: number for number, kind in enumerate(self.kinds)}
        self._order: Rows = np.zeros(0, np.int64)  # of the first mentions, by key

    @property
    def rows(self) -> NDArray[Any]:
        return self._rows.rows

    @property
    def mentions(self) -> NDArray[Any]:
        return self._mentions.rows

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, number: int, edit: Edit, token: bytes, flags: int, start: int, line: bytes) -> None:
        """Add an edit, which the log has in this line."""
        kind = Kind.of(edit)
        if kind not in self._kind_numbers:
            self._kind_numbers[kind] = len(self.kinds)
            self.kinds.append(kind)
        words = np.frombuffer(token, "<u8")
        row = len(self)
        self._rows.append((number, self._kind_numbers[kind], flags, len(line), start, short_digest(line), words))
        self._mentions.append(*((key, row) for key in fact_keys(edit.facts)))

    def row_of(self, number: int) -> int | None:
        """Return the row of the edit with this number; None if there is none."""
        numbers = self.rows["number"]
        row = int(np.searchsorted(numbers, number))
        return row if row < len(numbers) and numbers[row] == number else None

    def set_flag(self, row: int, flag: int, on: bool) -> None:
        flags = int(self.rows["flags"][row])
        self.rows["flags"][row] = flags | flag if on else flags & ~flag

    def has_flag(self, row: int, flag: int) -> bool:
        return bool(self.rows["flags"][row] & flag)

    def with_flag(self, flag: int, on: bool) -> Rows:
        """Return the rows that have a flag, or that do not have it."""
        return np.flatnonzero(((self.rows["flags"] & flag) != 0) == on)

    def mentioning(self, keys: Iterable[int]) -> Rows:
        """Return the rows of the edits with facts that have one of these keys (`fact_keys`), in order."""
        wanted = np.array(sorted(set(keys)), "<u8")
        mentions = self.mentions
        if len(mentions) - len(self._order) > UNSORTED:
            self._order = np.argsort(mentions["key"], kind="stable")
        ordered = mentions[self._order]["key"] if len(self._order) else np.zeros(0, "<u8")
        first, last = (np.searchsorted(ordered, wanted, side=side) for side in ("left", "right"))
        ranges = [self._order[begin:end] for begin, end in zip(first, last, strict=True) if end > begin]
        rest = np.flatnonzero(np.isin(mentions["key"][len(self._order) :], wanted)) + len(self._order)
        return np.unique(mentions["row"][np.concatenate([*ranges, rest]).astype(np.int64)]).astype(np.int64)
