"""The logit lens: what each layer would say if the model ended there.

A block's output, at every token, goes straight to what the model does after its last block: the final norm and the
output head. That is done by the model itself, run from above its last block on, so whatever a family puts there
(a projection, a scale, a soft cap) is in it, and the last layer's row is exactly what the model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rebind.analysis.traces import Question, ask
from rebind.edit.facts.fact import Fact
from rebind.models.trunk import Hidden, Tokens, Trunk

LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True, eq=False)
class Lens:
    """Layers × tokens."""

    question: Question
    answer: str  # the token looked for
    answer_id: int
    top: tuple[tuple[str, ...], ...]  # [layers][tokens]: the likeliest next token
    top_probability: Tensor  # [layers, tokens]
    probability: Tensor  # [layers, tokens], of the answer
    rank: Tensor  # [layers, tokens], of the answer; 1 is the likeliest

    @property
    def appears(self) -> int | None:
        """The first layer from which on the answer is the likeliest after the prompt; None if it is not at the end."""
        behind = (self.rank[:, -1] != 1).nonzero()
        first = int(behind[-1]) + 1 if len(behind) else 0
        return first if first < len(self.rank) else None

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.question.text,
            "tokens": list(self.question.labels),
            "answer": self.answer,
            "appears": self.appears,
            "top": [list(row) for row in self.top],
            "top_probability": self.top_probability.tolist(),
            "probability": self.probability.tolist(),
            "rank": self.rank.tolist(),
        }


@torch.no_grad()
def look(
    trunk: Trunk,
    tokenizer: Any,
    start: tuple[int, ...],
    prompt: str,
    target: str | None = None,
    *,
    answer_id: int | None = None,
) -> Lens:
    """What each layer would say after each token, and where the target's first token stands in it.

    Without a target it is the token `answer_id`, or the model's own first choice.
    """
    question, wanted = ask(Fact("{}", prompt, target or "."), tokenizer, start, trunk.context)
    hidden = _hidden(trunk, question)
    said = torch.log_softmax(_logits(trunk, question, hidden[-1:])[-1], -1)
    answer = torch.tensor(wanted) if target else said[-1].argmax() if answer_id is None else torch.tensor(answer_id)
    answer = answer.to(said.device)
    best, best_said, mine, rank = [], [], [], []
    step = max(1, LOGITS_AT_ONCE // (len(question.ids) * said.shape[-1]))
    for begin in range(0, len(hidden), step):
        logits = torch.log_softmax(_logits(trunk, question, hidden[begin : begin + step]), -1)
        top = logits.max(-1)
        best.append(top.indices)
        best_said.append(top.values.exp())
        mine.append(logits[..., answer].exp())
        rank.append((logits > logits[..., answer, None]).sum(-1) + 1)
    tokens = torch.cat(best).tolist()
    return Lens(
        question=question,
        answer=str(tokenizer.decode([int(answer)])),
        answer_id=int(answer),
        top=tuple(tuple(str(tokenizer.decode([token])) for token in row) for row in tokens),
        top_probability=torch.cat(best_said).double().cpu(),
        probability=torch.cat(mine).double().cpu(),
        rank=torch.cat(rank).cpu(),
    )


def _tokens(trunk: Trunk, question: Question, rows: int) -> Tokens:
    ids = torch.tensor(question.ids, device=trunk.device).expand(rows, -1)
    everywhere = torch.ones_like(ids)
    return Tokens(ids, everywhere, everywhere.cumsum(-1) - 1)


def _hidden(trunk: Trunk, question: Question) -> Sequence[Hidden]:
    """Every block's output, [tokens, width] each."""
    seen: list[Hidden] = []

    def see(_: Any, __: Any, out: Any) -> None:
        seen.append((out[0] if isinstance(out, tuple) else out)[0])

    handles = [block.register_forward_hook(see) for block in trunk.blocks]
    try:
        tokens = _tokens(trunk, question, 1)
        trunk.logits(tokens, torch.tensor([(0, len(question.ids) - 1)], device=trunk.device))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _logits(trunk: Trunk, question: Question, hidden: Sequence[Hidden]) -> Tensor:
    """[layers, tokens, vocabulary]: these states as if the last block had answered them."""
    rows, width = len(hidden), len(question.ids)
    where = torch.cartesian_prod(torch.arange(rows), torch.arange(width)).to(trunk.device)
    states = torch.stack([one.to(hidden[-1].device) for one in hidden])
    logits = trunk.logits(_tokens(trunk, question, rows), where, start=(len(trunk.blocks) - 1, states))
    return logits.unflatten(0, (rows, width))
