"""Thresholds: how near a state must come to a key to read its row.

A row should be read wherever its subject is mentioned, and nowhere else. How far a mention may be from the keys is seen
from the keys of the same fact: each framing is a mention that the others must recognize. How near strangers come is
seen from a sample of ordinary text, from the keys of other subjects, and from namesakes, which share the last word of
the subject. The threshold is half way between the two, within bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.models.prompts import Prompt

LOWEST, HIGHEST = 0.7, 0.88
OWN_QUANTILE = 0.1  # of the framings, the farthest may be missed
ALONE = 0.9  # how far a mention may be from the key of a fact that has one key only
MERGED = 0.95  # keys of a fact that are at least as similar become one
NAMESAKES = ("Maria", "Robert")
AT_ONCE = 2**28  # overlaps that are in memory at once


def namesake_prompts(fact: Fact) -> list[Prompt]:
    """Return the prompt of a fact about others who share the last word of its subject; none if it has one word."""
    words = fact.subject.split()
    if len(words) < 2:
        return []
    before, after = fact.parts
    names = [name for first in NAMESAKES if (name := f"{first} {words[-1]}") != fact.subject]
    return [Prompt(f"{before}{name}{after}", subject=(len(before), len(before) + len(name))) for name in names]


def keys_by_owner(owner: Tensor, count: int) -> Tensor:
    """Return the indices of the keys of each owner, [count, most keys of one]; −1 where there are fewer."""
    order, sizes = owner.argsort(stable=True), torch.bincount(owner, minlength=count)
    table = torch.full((count, max(int(sizes.max()), 1)), -1, device=owner.device)
    place = torch.arange(len(owner), device=owner.device) - (sizes.cumsum(0) - sizes)[owner[order]]
    table[owner[order], place] = order
    return table


def overlaps_by_owner(keys: Tensor, table: Tensor) -> Tensor:
    """Return the overlaps between the keys of each owner, [count, k, k]; NaN where there is no key."""
    own = keys[table.clamp_min(0)].masked_fill((table < 0).unsqueeze(-1), torch.nan)
    return own @ own.mT


def merge_keys(table: Tensor, overlaps: Tensor, similarity: float = MERGED) -> Tensor:
    """Return the row [m] that each key goes into: nearly equal keys of one owner share the row of the first of them."""
    leader = torch.zeros_like(table)  # the place of the key that leads the row
    leads = torch.zeros_like(table, dtype=torch.bool)
    for place in range(table.shape[1]):
        near = leads[:, :place] & (overlaps[:, place, :place] >= similarity)
        joins = near.any(-1)
        leads[:, place] = ~joins
        first = near.int().argmax(-1) if place else leader[:, 0]
        leader[:, place] = torch.where(joins, first, place)
    is_key = table >= 0
    leaders = table.gather(1, leader)[is_key]
    rows = torch.empty_like(leaders)
    rows[table[is_key]] = leaders.unique(return_inverse=True)[1]
    return rows


def own_spread(overlaps: Tensor) -> Tensor:
    """Return how similar a framing of each owner is to the nearest other one, at the farthest few, [count]."""
    itself = torch.eye(overlaps.shape[-1], dtype=torch.bool, device=overlaps.device)
    others = overlaps.masked_fill(itself, torch.nan).nan_to_num(-torch.inf)
    nearest = others.max(-1).values
    spread = nearest.masked_fill(nearest == -torch.inf, torch.nan).nanquantile(OWN_QUANTILE, dim=-1)
    return spread.nan_to_num(ALONE)


def nearest_strangers(keys: Tensor, subject: Tensor, strangers: Sequence[Tensor]) -> Tensor:
    """Return the largest overlap of each key with keys of other subjects and with strangers, [m]."""
    nearest, size = [], max(1, AT_ONCE // max(len(rows) for rows in (keys, *strangers)))
    for part, own in zip(keys.split(size), subject.split(size), strict=True):
        others = (part @ keys.mT).masked_fill(own.unsqueeze(-1) == subject, -1.0)
        similarities = [others.max(-1).values, *((part @ rows.mT).max(-1).values for rows in strangers if len(rows))]
        nearest.append(torch.stack(similarities).max(0).values)
    return torch.cat(nearest)


def choose_thresholds(spread: Tensor, nearest: Tensor) -> Tensor:
    """Return the thresholds of rows, half way between the spread of their owners and the nearest stranger, [m]."""
    return ((spread + nearest) / 2).clamp(LOWEST, HIGHEST)
