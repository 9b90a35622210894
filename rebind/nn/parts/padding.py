"""Batches with padding: where the real tokens are, and how to close the gaps between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """Real tokens moved to the front of their rows, in order, and back."""

    order: Tensor  # [B, T] which token stands at each place: the real ones first
    place: Tensor  # [B, T] where each real token went
    counts: Tensor  # [B] real tokens a row

    @classmethod
    def of(cls, mask: Tensor) -> Packing:
        """From a mask [B, T], true for real tokens."""
        order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
        place = (mask.cumsum(1) - 1).clamp(min=0)
        return cls(order, place, mask.sum(1))

    def close(self, x: Tensor) -> Tensor:
        """Tokens [B, T, ...] with the real ones in front, and zeros behind."""
        return cleared(take(x, self.order), torch.arange(x.shape[1], device=x.device) < self.counts[:, None])

    def open(self, x: Tensor) -> Tensor:
        """Packed tokens [B, T, ...] back where they were; padding gets some token's."""
        return take(x, self.place)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, ...] at index [B, S]: [B, S, ...]."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, index]


def cleared(x: Tensor, mask: Tensor | None) -> Tensor:
    """x [*mask, ...] with zeros where the mask is false, NaN and all."""
    return x if mask is None else x.masked_fill(~mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), 0.0)
