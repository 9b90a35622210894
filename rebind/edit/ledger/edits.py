"""A sequence of edits that are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import TOKEN_BYTES, Edit
from rebind.edit.ledger.table import EditTable, Kind, Rows, fact_keys, subject_key

READ_TOGETHER = 256


class EditSource(Protocol):
    """What edits are read from: the state of a ledger."""

    @property
    def table(self) -> EditTable: ...

    def read(self, rows: Iterable[int]) -> list[Edit]: ...


class EditSequence(Sequence[Edit]):
    """Edits of a ledger, in order, and possibly further ones behind them that no ledger has.

    Length, slices, kinds, tokens and the edits about a subject are known without reading an edit; an edit is read
    from the log whenever it is accessed.
    """

    def __init__(self, source: EditSource | None, rows: Rows, further: tuple[Edit, ...] = ()) -> None:
        self.source, self.rows, self.further = source, rows, further

    @classmethod
    def of(cls, edits: Sequence[Edit]) -> EditSequence:
        """Return a sequence of edits as what this class is."""
        return edits if isinstance(edits, EditSequence) else cls(None, np.zeros(0, np.int64), tuple(edits))

    def __len__(self) -> int:
        return len(self.rows) + len(self.further)

    @overload
    def __getitem__(self, index: int) -> Edit: ...
    @overload
    def __getitem__(self, index: slice) -> EditSequence: ...
    def __getitem__(self, index: int | slice) -> Edit | EditSequence:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                return EditSequence.of([self[i] for i in range(begin, end, step)])
            count = len(self.rows)
            further = self.further[max(begin - count, 0) : max(end - count, 0)]
            return EditSequence(self.source, self.rows[begin:end], further)
        number = range(len(self))[index]
        return self.at([number])[0]

    def __iter__(self) -> Iterator[Edit]:
        for begin in range(0, len(self.rows), READ_TOGETHER):
            yield from self._read(self.rows[begin : begin + READ_TOGETHER])
        yield from self.further

    def __add__(self, others: Sequence[Edit]) -> EditSequence:
        return EditSequence(self.source, self.rows, (*self.further, *others))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one is two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EditSequence({len(self)} edits)"

    def at(self, indices: Iterable[int]) -> list[Edit]:
        """Return the edits at some places of the sequence."""
        places = list(indices)
        stored = iter(self._read([self.rows[place] for place in places if place < len(self.rows)]))
        count = len(self.rows)
        return [next(stored) if place < count else self.further[place - count] for place in places]

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """What the edits are known by, [n, 2]."""
        further = np.frombuffer(b"".join(edit.token for edit in self.further), "<u8").reshape(-1, TOKEN_BYTES // 8)
        return further if self.source is None else np.concatenate([self.source.table.rows["token"][self.rows], further])

    def kinds(self) -> list[Kind]:
        """Return the kinds of the edits."""
        if self.source is None:
            stored = []
        else:
            table = self.source.table
            stored = [table.kinds[number] for number in np.unique(table.rows["kind"][self.rows])]
        return list(dict.fromkeys([*stored, *map(Kind.of, self.further)]))

    def where(self, condition: Callable[[Kind], bool]) -> EditSequence:
        """Return the edits of some kinds."""
        further = tuple(edit for edit in self.further if condition(Kind.of(edit)))
        if self.source is None:
            return EditSequence(None, self.rows, further)
        table = self.source.table
        numbers = [number for number, kind in enumerate(table.kinds) if condition(kind)]
        if len(numbers) == len(table.kinds):
            return EditSequence(self.source, self.rows, further)
        return EditSequence(self.source, self.rows[np.isin(table.rows["kind"][self.rows], numbers)], further)

    def mentioning(self, keys: Iterable[int]) -> list[int]:
        """Return the places of the edits that have facts with some keys (`fact_keys`), in order."""
        wanted = set(keys)
        stored: list[int] = []
        if self.source is not None and wanted:
            rows = self.source.table.mentioning(wanted)
            places = np.searchsorted(self.rows, rows)
            inside = places < len(self.rows)
            places, rows = places[inside], rows[inside]
            stored = places[self.rows[places] == rows].tolist()
        count = len(self.rows)
        return stored + [
            count + index for index, edit in enumerate(self.further) if not wanted.isdisjoint(fact_keys(edit.facts))
        ]

    def about(self, subjects: Iterable[str]) -> list[int]:
        """Return the places of the edits with facts about some subjects, which are `comparable`."""
        return self.mentioning(map(subject_key, subjects))

    def with_facts_like(self, facts: Iterable[Fact]) -> EditSequence:
        """Return the edits that have a fact about the subject, or with the prompt, of one of these facts."""
        return self._select(self.mentioning(fact_keys(facts)))

    def without(self, id: str) -> EditSequence:
        """Return these edits without one of their ledger."""
        row = None if self.source is None else self.source.table.row_of(int(id[1:]))
        rows = self.rows if row is None else self.rows[self.rows != row]
        return EditSequence(self.source, rows, self.further)

    def including(self, id: str) -> EditSequence:
        """Return these edits and another one of their ledger, at its place."""
        assert self.source is not None
        row = self.source.table.row_of(int(id[1:]))
        return EditSequence(self.source, np.union1d(self.rows, [row]).astype(np.int64), self.further)

    def _select(self, places: Iterable[int]) -> EditSequence:
        chosen = np.fromiter(places, np.int64)
        count = len(self.rows)
        further = tuple(self.further[place - count] for place in chosen[chosen >= count])
        return EditSequence(self.source, self.rows[chosen[chosen < count]], further)

    def with_tokens(self, tokens: NDArray[Any]) -> list[Edit] | None:
        """Return the edits with these tokens, of this sequence or undone ones; None if the ledger lacks any."""
        known = {edit.token: edit for edit in self.further}
        rows: dict[bytes, int] = {}
        if self.source is not None:
            own = self.source.table.rows["token"]
            rows = {own[row].tobytes(): int(row) for row in np.flatnonzero(np.isin(own[:, 0], tokens[:, 0]))}
        keys = [token.tobytes() for token in tokens]
        if any(token not in known and token not in rows for token in keys):
            return None
        return [known[token] if token in known else self._read([rows[token]])[0] for token in keys]

    @property
    def ids(self) -> list[str]:
        """The ids of the edits."""
        numbers = [] if self.source is None else self.source.table.rows["number"][self.rows].tolist()
        return [*map(edit_id, numbers), *(edit.id for edit in self.further)]

    def _read(self, rows: Iterable[int]) -> list[Edit]:
        return [] if self.source is None else self.source.read(map(int, rows))


def edit_id(number: int) -> str:
    """Return the id of the edit with this number.

    >>> edit_id(7)
    'e0007'
    """
    return f"e{number:04d}"
