"""The logit lens: what each layer would say if the model ended there.

The output of a block, at every token, goes to what the model does after its last block: the final norm and the output
head. The model itself does that, resumed above its last block, so whatever a family has there (a projection, a scale,
a soft cap) is included, and the row of the last layer is exactly what the model says.
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
    answer: str  # the token that is looked for
    answer_id: int
    top: tuple[tuple[str, ...], ...]  # [layers][tokens]: the likeliest next token
    top_probability: Tensor  # [layers, tokens]
    probability: Tensor  # [layers, tokens], of the answer
    rank: Tensor  # [layers, tokens], of the answer; 1 is the likeliest

    @property
    def appears(self) -> int | None:
        """The layer from which on the answer is the first choice after the prompt; None if it is not at the end."""
        behind = (self.rank[:, -1] != 1).nonzero()
        first = int(behind[-1]) + 1 if len(behind) else 0
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
    """Compute what each layer would say after each token, and the rank and probability of an answer.

    The answer is the first token of the target, else the token `answer_id`, else the model's own first choice.
    """
    read, target_id = read_prompt(model, Prompt(prompt, target or ""))
    trunk, decode, count = model.trunk, model.tokenizer.decode, len(read.ids)
    tokens = Tokens.left_padded([read.ids], trunk.device)
    everywhere = torch.stack([torch.zeros(count), torch.arange(count)], dim=-1).long().to(trunk.device)
    hidden: list[Hidden] = []
    with hooked([(block, record_in(hidden, trunk, tokens)) for block in trunk.blocks]):
        logits = trunk.logits(tokens, everywhere[-1:])
    wanted = answer_id if target_id is None else target_id
    answer = int(logits[0].argmax()) if wanted is None else wanted
    rows = []
    for states in hidden:
        logits = trunk.logits(tokens, everywhere, resume=(len(trunk.blocks) - 1, states))
        log_probs = torch.log_softmax(logits, -1)  # [tokens, vocabulary]
        best = log_probs.max(-1)
        top = tuple(str(decode([token])) for token in best.indices.tolist())
        rank = (log_probs > log_probs[:, [answer]]).sum(-1) + 1
        rows.append((top, best.values.exp().double().cpu(), log_probs[:, answer].exp().double().cpu(), rank.cpu()))
    tops, top_probability, probability, ranks = zip(*rows, strict=True)
    numbers = (torch.stack(column) for column in (top_probability, probability, ranks))
    return Lens(read, str(decode([answer])), answer, tops, *numbers)
