"""Where a fold can resume: the weights after some of the edits, in memory and as snapshots of a ledger."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rebind.edit.ledger.edits import EditSequence
from rebind.edit.ledger.snapshots import Snapshots, arithmetic
from rebind.edit.methods import EarlierKeys, Gram

KIND = "weights"
NAME = re.compile(rf"{KIND}-(\d+)-([0-9a-f]{{32}})-[0-9a-f]{{64}}")
MAX_PARTIAL_FOLDS = 8  # in memory, and as many on disk
ROOM_FOR_OTHERS = 4  # partial folds: with room for so many, one may be of other edits
NEAREST = 8  # edits: partial folds that are nearer to one another save little


@dataclass(frozen=True, eq=False)
class PartialFold:
    """The weights of every site after some edits, not yet rounded, and the keys that these edits have."""

    tokens: NDArray[Any]  # of the edits, [n, 2]
    weights: dict[str, Tensor]  # sites that none of the edits has are missing
    earlier: dict[str, EarlierKeys]  # by site, where gains depend on them

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def precedes(self, tokens: NDArray[Any]) -> bool:
        """Return whether a fold of edits with these tokens can resume here."""
        return self.count <= len(tokens) and bool(np.array_equal(self.tokens, tokens[: self.count]))

    def tensors(self) -> dict[str, Tensor]:
        """Return everything but the tokens, as a snapshot stores it."""
        tensors = {f"weights/{site}": tensor for site, tensor in self.weights.items()}
        for site, earlier in self.earlier.items():
            kind, tensor = ("gram", earlier.matrix) if isinstance(earlier, Gram) else ("keys", earlier)
            tensors[f"{kind}/{site}"] = tensor
            tensors[f"count/{site}"] = torch.tensor(len(earlier))
        return tensors

    @classmethod
    def from_tensors(cls, tokens: NDArray[Any], tensors: dict[str, Tensor]) -> PartialFold:
        """Return the partial fold that `tensors` described."""
        weights: dict[str, Tensor] = {}
        earlier: dict[str, EarlierKeys] = {}
        for name, tensor in tensors.items():
            kind, _, site = name.partition("/")
            if kind == "weights":
                weights[site] = tensor
            elif kind == "gram":
                earlier[site] = Gram(tensor, int(tensors[f"count/{site}"]))
            elif kind == "keys":
                earlier[site] = tensor
        return cls(tokens, weights, earlier)


def milestones(begin: int, end: int) -> set[int]:
    """Return the numbers of edits at which a fold from `begin` to `end` edits should be remembered.

    They lie the denser, the nearer to the end: to undo an edit is to fold all later ones again, and then the fold
    resumes at most as far before the edit as the edit lies before the end.
    """
    numbers = {end - 1, end}
    gap = (end - begin) // 2
    while gap >= NEAREST:
        numbers.add(end - gap)
        gap //= 2
    return {number for number in numbers if number > begin}


def thinned(counts: Sequence[int], end: int, limit: int) -> list[int]:
    """Return at most `limit` of some numbers of edits, in order: dense near the end, as in `milestones`."""
    chosen = sorted(set(counts))
    while len(chosen) > max(limit, 0):
        bounds = [0, *chosen]
        gaps = [
            (chosen[index + 1] - bounds[index]) / (end - bounds[index] + 1) for index in range(len(chosen) - 1)
        ]  # that dropping one would leave, as a share of what lies behind it
        chosen.pop(int(np.argmin(gaps)) if gaps else 0)
    return chosen


class StoredPartialFolds:
    """The partial folds that a ledger has on disk."""

    def __init__(self, snapshots: Snapshots, device: torch.device) -> None:
        self.snapshots, self.device = snapshots, device

    def best(self, tokens: NDArray[Any], beyond: int) -> PartialFold | None:
        """Return the last partial fold at which a fold of edits can resume, if it is beyond so many edits."""
        usable = {count: name for count, name in self._usable(tokens) if count > beyond}
        for count in sorted(usable, reverse=True):
            tensors = self.snapshots.read_tensors(usable[count])
            if tensors is not None:
                return PartialFold.from_tensors(tokens[:count], tensors)
        return None

    def offer(self, partial_folds: Sequence[PartialFold], edits: EditSequence, seconds: float) -> bool:
        """Store the partial folds of a fold that took so many seconds if that is worth it; return whether it was."""
        lasting = [one for one in partial_folds if 0 < one.count <= len(edits.rows)]  # without edits that are on trial
        if not lasting:
            return False
        last = lasting[-1]
        chosen = [last, *(one for one in lasting if last.count - one.count >= NEAREST)]
        size = sum(one.size for one in chosen)
        if not self.snapshots.is_worth(seconds, min(size, max(last.size, self.snapshots.max_bytes))):
            return False
        self.store(chosen, edits.tokens)
        return True

    def store(self, partial_folds: Sequence[PartialFold], tokens: NDArray[Any]) -> None:
        """Store partial folds of a fold of these edits, and delete those that are of little use by now.

        The end of the fold before stays as well, for a redo.
        """
        present = dict(self._usable(tokens))
        fresh = {one.count: one for one in partial_folds}
        largest = max((one.size for one in partial_folds), default=1)
        limit = min(MAX_PARTIAL_FOLDS, self.snapshots.max_bytes // max(largest, 1))
        others = [name for name in self.snapshots.names(KIND) if name not in present.values()]
        others = others[-1:] if limit >= ROOM_FOR_OTHERS else []
        keep = thinned([*present, *fresh], len(tokens), limit - len(others))
        names = {*others, *(present[count] for count in keep if count in present)}
        for count in keep:
            if count not in present:
                kind = f"{KIND}-{count:08d}-{self._digests(tokens, [count])[count]}"
                if (name := self.snapshots.write_tensors(kind, fresh[count].tensors())) is not None:
                    names.add(name)
        self.snapshots.remove(name for name in self.snapshots.names(KIND) if name not in names)

    def _usable(self, tokens: NDArray[Any]) -> list[tuple[int, str]]:
        """Return the number of edits and the name of every partial fold of a fold of these edits."""
        matches = [match for match in map(NAME.fullmatch, self.snapshots.names(KIND)) if match]
        stated = [(int(match[1]), match[2], match[0]) for match in matches if int(match[1]) <= len(tokens)]
        digests = self._digests(tokens, [count for count, _, _ in stated])
        return [(count, name) for count, digest, name in stated if digests[count] == digest]

    def _digests(self, tokens: NDArray[Any], counts: Sequence[int]) -> dict[int, str]:
        """Return what identifies the first edits, for several numbers of them, and the arithmetic of their fold."""
        running, begin, digests = sha256(arithmetic(self.device).encode()), 0, {}
        for count in sorted(set(counts)):
            running.update(np.ascontiguousarray(tokens[begin:count]).tobytes())
            digests[count], begin = running.hexdigest()[:32], count
        return digests
