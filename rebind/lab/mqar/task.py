"""The task of multi-query associative recall (Zoology, Arora et al.), and the settings of the experiment.

A sequence lists pairs of a key and a value, then repeats every key at some distance; its value is due there:

    tokens   k₁ v₁ k₂ v₂ 0 0 k₂ 0 0 0 k₁ 0
    answers  ·  ·  ·  ·  · · v₂ · · · v₁ ·

Keys come from the lower half of the vocabulary, values from the upper half, 0 fills the rest. Distances follow a power
law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.lab.experiment import Experiment
from rebind.lab.stacks import Lesson

SOFTMAX = "softmax"
NORMALIZERS = {  # how each rule's keys are usually scaled; the rest of the layer is the same for all rules
    "sum": "l2",
    "mamba2": "none",
    "longhorn": "none",
    "delta": "l2",
    "gated_delta": "l2",
    "gla": "none",
    "kda": "l2",
    "gdn2": "l2",
    "comba": "l2",
    "rwkv7": "none",
    SOFTMAX: "none",
}
POWER = 0.01  # the distances g have p(g) ∝ g^(POWER − 1)


@dataclass(frozen=True)
class RecallTask:
    """Sequences of `length` tokens that start with `pairs` pairs."""

    length: int
    pairs: int
    vocabulary: int

    @classmethod
    def parse(cls, size: str, vocabulary: int) -> RecallTask:
        """Read a size such as "64x4": 64 tokens with 4 pairs."""
        length, _, pairs = size.partition("x")
        if not (length.isdecimal() and pairs.isdecimal() and 0 < 4 * int(pairs) <= int(length)):
            raise InputError(
                f"The size of a task is {size!r}",
                expected="length x pairs such as 64x4, with at least 4 tokens for each pair",
                code="invalid_task_size",
            )
        if int(pairs) >= vocabulary // 2:
            raise InputError(
                f"{pairs} pairs need more than {2 * int(pairs)} tokens, and the vocabulary has {vocabulary}",
                advice="Raise the vocabulary",
                code="vocabulary_too_small",
            )
        return cls(int(length), int(pairs), vocabulary)

    def draw(self, count: int, generator: torch.Generator) -> Lesson:
        """Draw tokens [count, T], the places [count, P] where keys occur again, and their values [count, P]."""
        half, device = self.vocabulary // 2, generator.device
        keys = self._choose(torch.zeros(half - 1, device=device), count, generator) + 1
        values = self._choose(torch.zeros(self.vocabulary - half, device=device), count, generator) + half
        distances = torch.arange(1, (self.length - 2 * self.pairs) // 2 + 1, device=device)
        places = 2 * self.pairs + 2 * self._choose((POWER - 1) * distances.log(), count, generator)
        tokens = torch.zeros(count, self.length, dtype=torch.long, device=device)
        tokens[:, : 2 * self.pairs] = torch.stack([keys, values], dim=-1).flatten(1)
        return tokens.scatter(-1, places, keys), places, values

    def _choose(self, log_weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Choose distinct indices [count, P] with these weights: the largest of their logarithms plus Gumbel noise."""
        noise = torch.rand(count, len(log_weights), generator=generator, device=generator.device).clamp_min(1e-30)
        return (log_weights - (-noise.log()).log()).argsort(-1, descending=True)[:, : self.pairs]


@dataclass(frozen=True)
class Recall(Experiment):
    """The settings of the task, of the models and of their training."""

    seeds: int = 2
    vocabulary: int = 8192
    trained: tuple[str, ...] = ("64x4", "128x8", "256x16", "256x32", "256x64")  # length x pairs, each equally often
    tested: tuple[str, ...] = ("64x4", "64x8", "64x16", "128x32", "256x64", "512x128", "1024x256")
    layers: int = 2
    heads: int = 2
    conv: int = 4  # tokens that the short convolution sees
    rates: tuple[float, ...] = (10**-2.5, 1e-2, 10**-1.5)
    decay: float = 0.1  # of the weights
    batch: int = 32
    steps: int = 2500  # at most; the rates fall to zero over them, as a cosine
    every: int = 250  # steps between evaluations
    sequences: int = 128  # per evaluation

    def tasks(self, sizes: Sequence[str]) -> list[RecallTask]:
        return [RecallTask.parse(size, self.vocabulary) for size in sizes]

    def hardest(self) -> int:
        """Return which tested size has the most pairs and is no longer than the longest trained one."""
        longest = max(task.length for task in self.tasks(self.trained))
        within = [(task.pairs, at) for at, task in enumerate(self.tasks(self.tested)) if task.length <= longest]
        if not within:
            raise InputError(
                f"All tested sizes are longer than {longest}, the longest trained one",
                expected="one that is not",
                advice="Add a shorter size to tested",
                code="only_longer_tests",
            )
        return max(within)[1]
