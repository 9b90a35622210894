"""The sequences of the retrieval task: S keys and values, written once (setting 1) or with replacement (setting 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rebind.lab.stacks import Lesson, stack_padded


@dataclass(frozen=True)
class Sequences:
    """Writes and queries for every model. −1 marks padding, which writes nothing and is not counted.

    If each key and each value occurs once, the order of the writes does not matter: value j is at position j, and
    `values` is None.
    """

    keys: Tensor  # [models, B, L]
    queries: Tensor  # [models, B, Q]
    targets: Tensor  # [models, B, Q]: the values to read
    values: Tensor | None = None  # [models, B, L]

    def as_lesson(self) -> Lesson:
        parts = (self.keys, self.queries, self.targets)
        return parts if self.values is None else (*parts, self.values)


@dataclass(frozen=True)
class Task:
    """The task of a stack of models. Each model has its own generator, and sees the sequences it would see alone."""

    sizes: Sequence[int]  # S of each model: how many keys and values there are
    replacement: bool  # keys and values occur again and the latest counts: 2S writes; otherwise S writes

    def draw_lessons(self, count: int, generators: Sequence[torch.Generator]) -> Sequences:
        """Draw sequences with one query each."""
        keys, values = self._draw_writes(self._lengths, count, generators)
        positions = []
        for length, generator in zip(self._lengths, generators, strict=True):
            first = keys.shape[-1] - length if self.replacement else 0  # behind the padding
            positions.append(first + torch.randint(length, (count, 1), generator=generator, device=generator.device))
        position = torch.stack(positions)
        queries = keys.gather(-1, position)
        targets = position if values is None else latest(keys, values, queries)
        return Sequences(keys, queries, targets, values)

    def draw_tests(self, count: int, generators: Sequence[torch.Generator], *, short: bool = False) -> Sequences:
        """Draw sequences that query every key they contain; the short ones have length S."""
        keys, values = self._draw_writes(self.sizes if short else self._lengths, count, generators)
        indices = torch.arange(max(self.sizes), device=keys.device).expand(*keys.shape[:2], -1)
        if values is None:
            return Sequences(keys, keys, indices.where(keys >= 0, -1))
        return Sequences(keys, indices, latest(keys, values, indices), values)

    @property
    def _lengths(self) -> list[int]:
        return [2 * size if self.replacement else size for size in self.sizes]

    def _draw_writes(
        self, lengths: Sequence[int], count: int, generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor | None]:
        """Draw keys and values, [models, count, L]. Padding comes first, or last where the order does not matter."""
        device, pairs = generators[0].device, list(zip(self.sizes, lengths, generators, strict=True))
        if not self.replacement:
            noise = [torch.rand(count, size, generator=generator, device=device) for size, _, generator in pairs]
            keys = stack_padded(noise, value=2.0).argsort(-1)
            return keys.masked_fill(keys >= torch.tensor(self.sizes, device=device)[:, None, None], -1), None
        writes = [
            torch.randint(size, (2, count, length), generator=generator, device=device)
            for size, length, generator in pairs
        ]
        longest = max(lengths)
        keys, values = torch.stack([functional.pad(x, (longest - x.shape[-1], 0), value=-1) for x in writes], dim=1)
        return keys, values


def latest(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """Return the value that was last written at each query's key: [..., Q], −1 where there is none."""
    order = torch.arange(1, keys.shape[-1] + 1, device=keys.device)
    last = ((queries.unsqueeze(-1) == keys.unsqueeze(-2)) * order).amax(-1)
    return values.gather(-1, (last - 1).clamp_min(0)).where(last > 0, -1)
