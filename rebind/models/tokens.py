"""Padded rows of token ids, as a model runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tokens:
    """Padded rows of token ids."""

    ids: Tensor  # [rows, tokens]
    mask: Tensor  # [rows, past + tokens]: 1 where there is a token, the mask of the past in front
    positions: Tensor  # [rows, tokens]: the position of each token in its own sequence

    @classmethod
    def left_padded(cls, rows: Sequence[Sequence[int]], device: torch.device, *, least: int = 0) -> Tokens:
        """Return rows aligned at their ends, for a cache of prefixes or a key at the last token.

        They are padded to the longest row, or to `least` tokens where that is more.
        """
        ids, mask = _pad(rows, "left", device, least)
        return cls(ids, mask, (mask.cumsum(-1) - 1).clamp_min(0))

    @classmethod
    def following(cls, past: Tokens, rows: Sequence[Sequence[int]]) -> Tokens:
        """Return rows aligned at their beginnings, right after `past`."""
        ids, mask = _pad(rows, "right", past.ids.device)
        positions = past.mask.sum(-1, keepdim=True) + torch.arange(ids.shape[-1], device=ids.device)
        return cls(ids, torch.cat([past.mask, mask], dim=-1), positions)

    @classmethod
    def right_padded(cls, rows: Sequence[Sequence[int]], device: torch.device) -> Tokens:
        """Return rows aligned at their beginnings, with nothing before them."""
        return cls.following(cls.left_padded([()] * len(rows), device), rows)

    def select(self, rows: Tensor) -> Tokens:
        """Return the chosen rows [n]."""
        return Tokens(self.ids[rows], self.mask[rows], self.positions[rows])


def _pad(rows: Sequence[Sequence[int]], side: str, device: torch.device, least: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of different lengths as one tensor, and a mask that is 1 where there is a token."""
    lengths = torch.tensor([len(row) for row in rows]).unsqueeze(-1)
    places = torch.arange(max(int(lengths.max()), least))
    is_token = places < lengths if side == "right" else places >= len(places) - lengths
    ids = torch.zeros(is_token.shape, dtype=torch.long)
    ids[is_token] = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.long)
    return ids.to(device), is_token.long().to(device)
