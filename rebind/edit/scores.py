"""How a model answers facts: the probability and rank of a target, and what it says instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rebind.edit.budget import in_portions
from rebind.edit.encoding import Encoded, encode_many
from rebind.edit.facts import Fact
from rebind.edit.trunk import Tokens, Trunk


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
    said = torch.log_softmax(trunk.logits(tokens, torch.tensor(where)), dim=-1)
    each = said.split([len(one.target) for one in asked])
    return [_score(tokenizer, one.target, mine) for one, mine in zip(asked, each, strict=True)]


def _score(tokenizer: Any, target: Sequence[int], said: Tensor) -> FactScore:
    """The score of a target whose tokens' log-probabilities are among `said` [tokens, vocabulary]."""
    wanted = torch.tensor(target, device=said.device)
    picked = said.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    first, best = said[0], said.argmax(-1)
    return FactScore(
        probability=float(picked.sum().exp()),
        rank=int((first > picked[0]).sum()) + 1,
        nll=float(-picked.mean()),
        exact=bool((best == wanted).all()),
        says=str(tokenizer.decode(best[:1])),
    )
