"""How far an edited model has moved from its base where nothing should have changed.

Two numbers, both cheap. *Drift*: the canaries, prompts that no edit is about, are put to both models, and the
distributions of the next token compared: KL(base ‖ edited), in nats. *Growth*: ‖W' − W‖ / ‖W‖ of every edited
matrix. A model can drift without growing much and grow without drifting yet; together they tell most broken ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rebind.edit.ledger.log import JSON
from rebind.models.trunk import Tokens, Trunk

# Of our own writing. Many topics and ways of going on: a certain word, an open end, a number, code, other languages.
CANARIES = (
    "Water boils when it is heated, and it freezes when it gets",
    "She put the kettle on, took two cups from the shelf and",
    "The train to the coast leaves at half past six in the",
    "If you add seven and five, you get",
    "Monday, Tuesday, Wednesday, Thursday,",
    "Bread is made of flour, water, yeast and a little",
    "A triangle has three sides, a square has",
    "The doctor listened to his heart and said that everything was",
    "In winter the days are short and the nights are",
    "He could not open the door because he had lost his",
    "Bees collect nectar from flowers and turn it into",
    "The committee will meet again next week to discuss the",
    "My grandmother taught me how to knit when I was a",
    "The price of oil rose sharply last year because",
    "Once upon a time, in a village at the edge of a forest, there lived",
    "Thank you for your letter. I am sorry that it took me so long to",
    "To reset the device, press and hold the button for ten",
    "The two teams were level at half time, but in the second half",
    "Light travels faster than sound, which is why we see the lightning before we hear the",
    "Violins, cellos and double basses all have",
    "def add(a, b):\n    return a +",
    "for (int i = 0; i < n; i++) { sum +=",
    "Guten Morgen! Wie geht es",
    "Il était une fois une petite fille qui",
)


@dataclass(frozen=True)
class Drift:
    """How far a model is from its base."""

    kl: float  # nats: the mean over the canaries
    largest: float  # nats: the canary that moved most
    prompt: str  # which one it is
    growth: float  # ‖W' − W‖ / ‖W‖: the largest of the sites
    site: str  # which one it is; empty where nothing was written

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


@torch.no_grad()
def next_tokens(trunk: Trunk, tokenizer: Any, start: Sequence[int], prompts: Sequence[str] = CANARIES) -> Tensor:
    """Log-probabilities of the token after each prompt, [n, vocabulary]: one batched pass."""
    rows = [[*start, *tokenizer(prompt, add_special_tokens=False).input_ids][: trunk.context] for prompt in prompts]
    tokens = Tokens.following(Tokens.left_padded([()] * len(rows), trunk.device), rows)
    where = torch.tensor([(row, len(ids) - 1) for row, ids in enumerate(rows)], device=trunk.device)
    return torch.log_softmax(trunk.logits(tokens, where), dim=-1)


def divergence(base: Tensor, edited: Tensor) -> Tensor:
    """KL(base ‖ edited) of each row's distribution, in nats: [n] float64, from log-probabilities [n, vocabulary]."""
    gap = base.exp() * (base - edited.to(base.device))
    return gap.masked_fill(base == -torch.inf, 0.0).sum(-1, dtype=torch.float64).clamp_min(0.0)


def growths(base: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, float]:
    """‖W' − W‖ / ‖W‖ of each site."""
    found = {}
    for site, before in base.items():
        wide = before.float()
        moved = torch.linalg.vector_norm(now[site].to(wide) - wide)
        size = torch.linalg.vector_norm(wide).clamp_min(torch.finfo(wide.dtype).tiny)
        found[site] = float(moved / size)
    return found


def measure(base: Tensor, edited: Tensor, grown: Mapping[str, float], prompts: Sequence[str] = CANARIES) -> Drift:
    """The drift between what `next_tokens` was for the base and is for the edited model."""
    kl = divergence(base, edited)
    worst = int(kl.nan_to_num(torch.inf).argmax())
    site = max(grown, key=lambda name: grown[name], default="")
    return Drift(float(kl.mean()), float(kl[worst]), prompts[worst], grown.get(site, 0.0), site)
