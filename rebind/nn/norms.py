"""RMSNorm in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.precision import without_autocast


class RMSNorm(nn.Module):
    """x / rms(x) · w over the last dimension, in x's dtype; the mean of squares is taken in float32 or better.

    One kernel on a GPU, which asks for a weight of x's dtype; autocast would convert x to float32 and back around it.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if x.dtype.itemsize > 2:
            return functional.rms_norm(x, weight.shape, weight, self.eps)
        with without_autocast(x):
            return functional.rms_norm(x, weight.shape, weight, self.eps)
