"""RMSNorm in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rebind.memory.precision import working_dtype


class RMSNorm(nn.Module):
    """x / rms(x) · w over the last dimension; the mean of squares is taken in float32 or better."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(working_dtype(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)
