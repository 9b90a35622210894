"""The logit lens: what each layer would predict if the model ended there.

The output of a block at every token is passed to the final norm and the output head of the model. The model itself
computes them, resumed above its last block, so whatever a family has there (a projection, a scale, a soft cap) is
included, and the row of the last layer is exactly the prediction of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rebind.analysis.traces import PromptTokens, read_prompt
from rebind.analysis.tracing import hooked, record_in
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import Prompt
from rebind.models.tokens import Tokens
from rebind.models.trunk import Hidden


@dataclass(frozen=True, eq=False)
class Lens:
    """The first choice at each layer and token, and the probability and rank of one answer there."""

    prompt: PromptTokens
    answer: str  # the token whose rank is shown
    answer_id: int
    top: tuple[tuple[str, ...], ...]  # [layers][tokens]: the likeliest next token
    top_probability: Tensor  # [layers, tokens]
    probability: Tensor  # [layers, tokens], of the answer
    rank: Tensor  # [layers, tokens], of the answer; 1 is the likeliest

    @property
    def appears(self) -> int | None:
        """The layer from which the answer stays the first choice after the prompt; None if the last layer differs."""
        not_first = (self.rank[:, -1] != 1).nonzero()
        first = int(not_first[-1]) + 1 if len(not_first) else 0
        return first if first < len(self.rank) else None

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt.text,
            "tokens": list(self.prompt.labels),
            "answer": self.answer,
            "appears": self.appears,
            "top": [list(row) for row in self.top],
            "top_probability": self.top_probability.tolist(),
            "probability": self.probability.tolist(),
            "rank": self.rank.tolist(),
        }


@torch.no_grad()
def logit_lens(model: LanguageModel, prompt: str, target: str | None = None, *, answer_id: int | None = None) -> Lens:
    """Compute the prediction of each layer after each token, and the rank and probability of an answer.

    The answer is the first token of `target`, or else the token `answer_id`, or else the first choice of the model.
    """
    prompt_tokens, target_id = read_prompt(model, Prompt(prompt, target or ""))
    trunk, decode, count = model.trunk, model.tokenizer.decode, len(prompt_tokens.ids)
    tokens = Tokens.left_padded([prompt_tokens.ids], trunk.device)
    all_positions = torch.stack([torch.zeros(count), torch.arange(count)], dim=-1).long().to(trunk.device)
    hidden: list[Hidden] = []
    with hooked([(block, record_in(hidden, trunk, tokens)) for block in trunk.blocks]):
        logits = trunk.logits(tokens, all_positions[-1:])
    answer = answer_id if target_id is None else target_id
    if answer is None:
        answer = int(logits[0].argmax())
    rows = []
    for states in hidden:
        logits = trunk.logits(tokens, all_positions, resume=(len(trunk.blocks) - 1, states))
        log_probs = torch.log_softmax(logits, -1)  # [tokens, vocabulary]
        best = log_probs.max(-1)
        top = tuple(str(decode([token])) for token in best.indices.tolist())
        rank = (log_probs > log_probs[:, [answer]]).sum(-1) + 1
        rows.append((top, best.values.exp().double().cpu(), log_probs[:, answer].exp().double().cpu(), rank.cpu()))
    tops, top_probability, probability, ranks = zip(*rows, strict=True)
    numbers = (torch.stack(column) for column in (top_probability, probability, ranks))
    return Lens(prompt_tokens, str(decode([answer])), answer, tops, *numbers)
