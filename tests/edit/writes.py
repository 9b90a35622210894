"""Edits of random writes, for the tests of edits and ledger."""

from __future__ import annotations

import torch

from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit
from tests.support import Draw

SITES = ("model.layers.2.mlp.down_proj", "model.layers.3.mlp.down_proj")
D_K, D_V = 6, 4


def new_edit(seed=0, rows=2, sites=SITES, **changes):
    draw = Draw(seed, torch.float32)
    tensors = {"targets": draw.normal(rows, D_V)}
    for site in sites:
        write = draw.write(rows, D_K, D_V)
        tensors |= {f"{site}/keys": write.keys, f"{site}/values": write.values, f"{site}/gain": write.gain}
    facts = tuple(Fact.parse(f"The {{subject {seed}-{row}}} is", "naïve 法国\u2028") for row in range(rows))
    settings = {"layers": [2, 3], "lam": 0.1 + 0.2, "clamp": None}
    given = {"facts": facts, "method": "memit", "settings": settings, "sites": sites, "tensors": tensors}
    return Edit(**{**given, "scores": {"before": 1e-7}, "versions": {"torch": "2"}, **changes})
