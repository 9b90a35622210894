"""How a model answers facts: the probability and rank of a target, and what it says instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rebind.edit.facts.encoding import Encoded, encode_many
from rebind.edit.facts.fact import Fact
from rebind.models.batching import in_portions
from rebind.models.trunk import Tokens, Trunk


@dataclass(frozen=True)
class FactScore:
    """One fact's prompt put to the model."""

    probability: float  # of the whole target: the product over its tokens
    rank: int  # of the target's first token, 1 the highest
    nll: float  # of the target, a token
    exact: bool  # whether every token of the target is the model's first choice
    says: str  # the model's first choice for the next token


@torch.no_grad()
def score_facts(
    trunk: Trunk,
    tokenizer: Any,
    start: tuple[int, ...],
    facts: Sequence[Fact],
    *,
    chat: bool = False,
    tokens_at_once: int = 16_384,
) -> list[FactScore]:
    """A score for each fact, prompts of like length run together."""
    encoded = encode_many(facts, tokenizer, start, chat=chat, limit=trunk.context)
    sizes = [(1, len(one.ids) + len(one.target) - 1) for one in encoded]
    order = sorted(range(len(encoded)), key=lambda index: sizes[index])
    found: dict[int, FactScore] = {}
    run = partial(_score_some, trunk, tokenizer, encoded)
    for portion, scores in in_portions(sizes, order, tokens_at_once, run):
        found.update(zip(portion, scores, strict=True))
    return [found[index] for index in range(len(encoded))]


def _score_some(trunk: Trunk, tokenizer: Any, encoded: Sequence[Encoded], portion: Sequence[int]) -> list[FactScore]:
    asked = [encoded[index] for index in portion]
    rows = [[*one.ids, *one.target[:-1]] for one in asked]
    tokens = Tokens.following(Tokens.left_padded([()] * len(rows), trunk.device), rows)
    where = [(row, len(one.ids) - 1 + step) for row, one in enumerate(asked) for step in range(len(one.target))]
    wanted = torch.tensor([token for one in asked for token in one.target], device=trunk.device)
    said = _Said.of(trunk.logits(tokens, torch.tensor(where, device=trunk.device)), wanted)
    first = [0, *accumulate(len(one.target) for one in asked)]
    says = tokenizer.batch_decode([[said.best[begin]] for begin in first[:-1]])
    return [
        said.score(slice(begin, end), target=one.target, says=says[index])
        for index, (one, (begin, end)) in enumerate(zip(asked, pairwise(first), strict=True))
    ]


@dataclass(frozen=True)
class _Said:
    """What the model says at places where tokens are wanted, as plain numbers: one copy from the device for all."""

    picked: list[float]  # the wanted token's log-probability
    rank: list[int]  # and its rank
    best: list[int]  # the first choice

    @classmethod
    def of(cls, logits: Tensor, wanted: Tensor) -> _Said:
        wanted = wanted.to(logits.device).unsqueeze(-1)
        chosen = logits.gather(-1, wanted)
        picked = (chosen - logits.logsumexp(-1, keepdim=True)).squeeze(-1)
        rank = (logits > chosen).sum(-1) + 1
        return cls(picked.tolist(), rank.tolist(), logits.argmax(-1).tolist())

    def score(self, span: slice, *, target: Sequence[int], says: str) -> FactScore:
        picked = self.picked[span]
        return FactScore(
            probability=math.exp(math.fsum(picked)),
            rank=self.rank[span][0],
            nll=-math.fsum(picked) / len(picked),
            exact=self.best[span] == list(target),
            says=says,
        )
