"""RMSNorm in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rebind.nn.parts.products import is_untouched
from rebind.ops.normed import add_norm, rms_norm
from rebind.precision import as_autocast, autocast_dtype


class RMSNorm(nn.Module):
    """x / rms(x) · w over the last dimension, in x's dtype; the mean of squares is taken in float32 or better."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def entering(norm: nn.Module, x: Tensor, read: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + read, or x, which goes on to the next layer; and its norm, which enters this one.

    The norm comes as autocast gives it to a product. Norms that are more than an `RMSNorm` (with hooks, adapters,
    parametrizations) are called.
    """
    if type(norm) is RMSNorm and is_untouched(norm) and (read is None or read.dtype.itemsize <= x.dtype.itemsize):
        return add_norm(x, read, norm.weight, norm.eps, autocast_dtype(x))
    x = x if read is None else x + read
    return x, as_autocast(norm(x))
