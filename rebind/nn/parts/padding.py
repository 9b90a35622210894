"""Batches with padding: the real tokens packed to the front of their rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """Moves the real tokens of every row to its front, in order, and back."""

    order: Tensor  # [B, T] the token at each position of the packed row, the real ones first
    position: Tensor  # [B, T] the packed position of each real token
    counts: Tensor  # [B] real tokens per row

    @classmethod
    def from_mask(cls, mask: Tensor) -> Packing:
        """Create the packing of a mask [B, T], true for real tokens."""
        order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
        return cls(order, (mask.cumsum(1) - 1).clamp(min=0), mask.sum(1))

    def pack(self, x: Tensor) -> Tensor:
        """Return tokens [B, T, ...] with the real ones in front and zeros behind."""
        real = torch.arange(x.shape[1], device=x.device) < self.counts[:, None]
        return zero_padding(take_tokens(x, self.order), real)


def token_positions(past: int, length: int, real: Tensor | None, device: torch.device) -> Tensor:
    """Return the positions [B or 1, length] of tokens that follow `past` others, among the real ones [B, past + T]."""
    if real is None:
        return torch.arange(past, past + length, device=device)[None]
    return (real.cumsum(1) - 1).clamp(min=0)[:, past:]


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of x [B, T, ...] at index [B, S]: [B, S, ...]."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, index]


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [*mask.shape, ...] with zeros where the mask is false, even in place of NaN."""
    return x if mask is None else x.masked_fill(~mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), 0.0)
