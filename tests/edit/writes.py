"""Edits made of random writes and ledgers that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.fold import cast_weights, stored_writes_at
from rebind.edit.ledger.ledger import Ledger
from rebind.memory.precision import solving_dtype
from tests.support import Draw

SITES = ("model.layers.2.mlp.down_proj", "model.layers.3.mlp.down_proj")
D_K, D_V = 6, 4
MODEL, OTHER = "a" * 64, "b" * 64  # fingerprints


def new_edit(seed: int = 0, rows: int = 2, sites: tuple[str, ...] = SITES, **changes: Any) -> Edit:
    draw = Draw(seed, torch.float32)
    tensors = {"targets": draw.normal(rows, D_V)}
    for site in sites:
        write = draw.write(rows, D_K, D_V)
        tensors |= {f"{site}/keys": write.keys, f"{site}/values": write.values, f"{site}/gain": write.gain}
    facts = tuple(Fact.parse(f"The {{subject {seed}-{row}}} is", "naïve 法国\u2028") for row in range(rows))
    settings = {"layers": [2, 3], "lam": 0.1 + 0.2, "clamp": None}
    fields = {"facts": facts, "method": "memit", "settings": settings, "sites": sites, "tensors": tensors}
    return Edit(**{**fields, "scores": {"before": 1e-7}, "versions": {"torch": "2"}, **changes})


def open_ledger(folder: Path) -> Ledger:
    return Ledger.open(folder, MODEL, model_name="tiny")


def ids(edits: Iterable[Edit]) -> list[str]:
    return [edit.id for edit in edits]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def weights(ledger: Ledger, base: Tensor, site: str = SITES[0]) -> Tensor:
    return fold_edits(base, site, ledger.active)


def fold_edits(base: Tensor, site: str, edits: Sequence[Edit]) -> Tensor:
    """Return the weights of a site after `edits`, folded at once."""
    folded = base.to(solving_dtype(base))
    for write in stored_writes_at(site, edits, folded):
        folded = write.apply(folded)
    return cast_weights(folded, base.dtype, site)
