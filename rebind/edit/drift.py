"""How far an edited model has moved from its base model where nothing should have changed.

*Drift* compares the two models on canary prompts, which no edit is about: KL(base ‖ edited) of the next token, in
nats. *Growth* is ‖W' − W‖ / ‖W‖ of every edited matrix. A model can drift without growing much, and grow before it
drifts; together they reveal most broken models. Both are cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rebind.edit.ledger.log import JSON

# Many topics and kinds of continuation: a certain word, an open end, a number, code, other languages.
CANARY_PROMPTS = (
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
    """How far a model is from its base model."""

    kl: float  # nats: the mean over the canary prompts
    largest: float  # nats: the largest of them
    prompt: str  # the canary prompt with the largest one
    growth: float  # ‖W' − W‖ / ‖W‖: the largest of all sites
    site: str  # the site with the largest growth; empty if nothing was edited

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


def measure_drift(
    base: Tensor,  # [n, vocabulary]: log-probabilities of the next token after each prompt
    edited: Tensor,
    growth: Mapping[str, float],
    prompts: Sequence[str] = CANARY_PROMPTS,
) -> Drift:
    """Compare the next tokens of a base model and an edited model."""
    kl = divergence(base, edited)
    worst = int(kl.nan_to_num(torch.inf).argmax())
    site = max(growth, key=lambda name: growth[name], default="")
    return Drift(float(kl.mean()), float(kl[worst]), prompts[worst], growth.get(site, 0.0), site)


def divergence(base: Tensor, edited: Tensor) -> Tensor:
    """Return KL(base ‖ edited) of each row in nats, [n] float64, from log-probabilities [n, vocabulary]."""
    gap = base.exp() * (base - edited.to(base.device))
    return gap.masked_fill(base == -torch.inf, 0.0).sum(-1, dtype=torch.float64).clamp_min(0.0)


def relative_growth(base: Mapping[str, Tensor], edited: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ‖W' − W‖ / ‖W‖ of each site."""
    growth = {}
    for site, before in base.items():
        wide = before.float()
        moved = torch.linalg.vector_norm(edited[site].to(wide) - wide)
        size = torch.linalg.vector_norm(wide).clamp_min(torch.finfo(wide.dtype).tiny)
        growth[site] = float(moved / size)
    return growth
