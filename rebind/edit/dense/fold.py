"""The rows of a dense memory after some edits, and how they change when edits come and go.

The rows lie in the order of their edits. An edit changes its own rows and, through the agreements between edits about
one subject (`rebind.edit.dense.rows`), those of other edits about its subjects: only these are read again. All other
rows are copied, so the result has the same bytes as a fold of all edits from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rebind.edit.dense.rows import EditRows, Variant, moved_subjects, read_variants
from rebind.edit.ledger.edit import CONSOLIDATES, Edit
from rebind.edit.ledger.edits import EditSequence
from rebind.edit.ledger.table import Kind
from rebind.memory.dense import MANY, Dense

MAX_CHANGED = 0.25  # share of the edits: if more come and go, everything is folded again


@dataclass(eq=False)
class EditKeys:
    """The rows of an edit on their device, with whitened keys."""

    rows: EditRows
    keys: Tensor  # [m, d]
    values: Tensor  # [v, d]
    thresholds: Tensor  # [m]
    owner: Tensor  # [m]

    def rows_of(self, variants: Sequence[int], values: Tensor) -> Dense:
        """Return the rows of some variants, with these values of all of them."""
        keys, thresholds, owner = self.keys, self.thresholds, self.owner
        if len(variants) < len(values):
            is_read = torch.zeros(len(values), dtype=torch.bool, device=owner.device)
            is_read[list(variants)] = True
            rows = is_read[owner]
            keys, thresholds, owner = keys[rows], thresholds[rows], owner[rows]
        used, owner = owner.unique_consecutive(return_inverse=True)
        return Dense(keys, values[used], thresholds, owner=owner)


WithKeys = Callable[[Edit], EditKeys]  # read and whiten the rows of an edit


def matters(kind: Kind) -> bool:
    """Return whether edits of a kind change the dense memory."""
    return kind.has_rows or kind.consolidates


@dataclass(frozen=True, eq=False)
class DenseFold:
    """The memory of every layer, and how many rows in which layer each edit has."""

    tokens: NDArray[Any]  # of the edits that matter, [n, 2]
    layers: NDArray[np.int64]  # [n]
    counts: NDArray[np.int64]  # [n]
    memories: dict[int, Dense]
    removable: tuple[Edit, ...] = ()  # edits that no ledger has: they cannot be read again when they are taken out

    @classmethod
    def empty(cls) -> DenseFold:
        none = np.zeros(0, np.int64)
        return cls(np.zeros((0, 2), "<u8"), none, none, {})

    def after(self, edits: EditSequence, with_keys: WithKeys) -> DenseFold:
        """Return the fold of these edits."""
        edits = edits.where(matters)
        if np.array_equal(self.tokens, edits.tokens):
            return self
        origin = _origins(self.tokens, edits.tokens)  # the place in this fold of each of the edits, or −1
        changed = self._changed(edits, origin)
        if changed is None:
            empty = DenseFold.empty()
            return empty._updated(edits, np.full(len(edits), -1), range(len(edits)), with_keys)
        subjects = {subject for edit in changed for subject in subjects_of(edit)}
        touched = sorted({*edits.about(subjects), *np.flatnonzero(origin < 0).tolist()})
        return self._updated(edits, origin, touched, with_keys)

    def _changed(self, edits: EditSequence, origin: NDArray[np.int64]) -> list[Edit] | None:
        """Return the edits that come and those that go; None if they are too many, or in another order."""
        old = origin[origin >= 0]
        removed = np.setdiff1d(np.arange(len(self.tokens)), old, assume_unique=True)
        new = np.flatnonzero(origin < 0).tolist()
        if len(removed) + len(new) > 1 + MAX_CHANGED * len(edits) or bool((np.diff(old) < 0).any()):
            return None
        gone = (edits + self.removable).with_tokens(self.tokens[removed])
        return None if gone is None else [*edits.at(new), *gone]

    def _updated(
        self, edits: EditSequence, origin: NDArray[np.int64], touched: Iterable[int], with_keys: WithKeys
    ) -> DenseFold:
        """Return the fold of edits in which those at some places are read, and the others are as they were."""
        segments = self._read(edits, list(touched), with_keys)
        layers, counts, starts = (np.zeros_like(origin) for _ in range(3))
        is_old = origin >= 0
        layers[is_old], counts[is_old] = self.layers[origin[is_old]], self.counts[origin[is_old]]
        for layer in np.unique(self.layers).tolist():
            rows = np.where(self.layers == layer, self.counts, 0)
            inside = is_old & (layers == layer)
            starts[inside] = (np.cumsum(rows) - rows)[origin[inside]]
        for place, (layer, segment) in segments.items():
            layers[place], counts[place], starts[place] = layer, len(segment), -1
        memories = {}
        for layer in np.unique(layers[counts > 0]).tolist():
            places = np.flatnonzero((layers == layer) & (counts > 0))
            memories[layer] = self._joined(layer, places, starts, counts, segments)
        return DenseFold(edits.tokens, layers, counts, memories, edits.further)

    def _joined(
        self,
        layer: int,
        places: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        segments: Mapping[int, tuple[int, Dense]],
    ) -> Dense:
        """Return a memory from new segments and stretches of the old one."""
        begins, ends = starts[places], starts[places] + counts[places]
        follows = (begins[1:] == ends[:-1]) & (begins[1:] >= 0) & (begins[:-1] >= 0)
        pieces: list[Dense] = []
        for group in np.split(np.arange(len(places)), np.flatnonzero(~follows) + 1):
            first, last = group[0], group[-1]
            if begins[first] < 0:
                pieces.append(segments[int(places[first])][1])
            else:
                pieces.append(self.memories[layer].between(int(begins[first]), int(ends[last])))
        memory = Dense.concatenate(pieces)
        return memory.with_cells() if len(memory) > MANY else replace(memory, cells=None)

    def _read(self, edits: EditSequence, touched: list[int], with_keys: WithKeys) -> dict[int, tuple[int, Dense]]:
        """Return the layer and the rows of the edits at some places; those without rows are missing or empty."""
        places = touched
        if len(touched) < len(edits):
            subjects = {subject for edit in edits.at(touched) for subject in subjects_of(edit)}
            places = sorted({*touched, *edits.about(subjects)})
        dense = [(place, edit.loaded()) for place, edit in zip(places, edits.at(places), strict=True) if edit.has_rows]
        keyed = [with_keys(edit) for _, edit in dense]
        moved = moved_subjects(edits.where(lambda kind: kind.consolidates))
        read = read_variants([(edit.id, one.rows) for (_, edit), one in zip(dense, keyed, strict=True)], moved)
        values = [one.values for one in keyed]
        used: list[list[int]] = [[] for _ in keyed]  # variants
        for variants in read.values():
            for index, variant in variants:
                used[index].append(variant)
            if len(variants) > 1:
                _add_up(variants, keyed, values)
        wanted = set(touched)
        return {
            place: (one.rows.layer, one.rows_of(chosen, own))
            for (place, _), one, chosen, own in zip(dense, keyed, used, values, strict=True)
            if place in wanted
        }


def subjects_of(edit: Edit) -> set[str]:
    """Return the subjects whose rows an edit adds or takes away."""
    settings: Any = edit.settings
    moved = settings.get(CONSOLIDATES, {}).get("subjects", ())
    return {*moved, *(EditRows.subjects_in(edit) if edit.has_rows else ())}


def _origins(old: NDArray[Any], new: NDArray[Any]) -> NDArray[np.int64]:
    """Return the place in `old` of every row of `new`, −1 where there is none."""
    shorter = min(len(old), len(new))
    differs = (old[:shorter] != new[:shorter]).any(1)
    front = int(differs.argmax()) if differs.any() else shorter
    tail = (old[::-1][: shorter - front] != new[::-1][: shorter - front]).any(1)
    back = int(tail.argmax()) if tail.any() else shorter - front
    origin = np.full(len(new), -1, np.int64)
    origin[:front] = np.arange(front)
    origin[len(new) - back :] = np.arange(len(old) - back, len(old))
    places = {token.tobytes(): place for place, token in enumerate(old[front : len(old) - back], start=front)}
    for place in range(front, len(new) - back):
        origin[place] = places.get(new[place].tobytes(), -1)
    return origin


def _add_up(variants: Sequence[Variant], edits: Sequence[EditKeys], values: list[Tensor]) -> None:
    """Let the rows of variants about one subject return the sum of their values: they were not searched together."""
    for index, variant in variants:
        layer = edits[index].rows.layer
        others = [other for other in variants if other != (index, variant) and edits[other[0]].rows.layer == layer]
        for other, other_variant in others:
            values[index] = values[index].clone()
            values[index][variant] += edits[other].values[other_variant].to(values[index])
