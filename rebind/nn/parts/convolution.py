"""A short causal convolution: what a token's neighbours were, before keys and values are made of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.nn.layers.base import require_positive
from rebind.nn.parts.padding import Packing
from rebind.ops.convolve import convolved, short_convolution


class ShortConvolution(nn.Module):
    """silu of a depthwise causal convolution over the last `size` tokens.

    The window carried from call to call is the size − 1 inputs before the next token; zeros before the first.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        require_positive(size=size)
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    @property
    def channels(self) -> int:
        return self.weight.shape[0]

    def initial(self, batch: int) -> Tensor:
        """The window before the first token [B, size − 1, channels]."""
        return self.weight.new_zeros(batch, self.size - 1, self.channels)

    def forward(
        self, x: Tensor, window: Tensor, mask: Tensor | None = None, parts: Sequence[int] | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Tokens x [B, T, channels] after `window`: what comes out, in parts of so many channels; the next window."""
        parts = [self.channels] if parts is None else list(parts)
        if mask is None:
            return convolved(x, self.weight, window, parts), self._after(x, window)
        packing = Packing.of(mask)  # a neighbour is the next real token, whatever lies between
        packed = packing.close(x)
        seen = torch.cat([window.to(x.dtype), packed], dim=1)
        last = packing.counts[:, None] + torch.arange(self.size - 1, device=x.device)
        after = seen[torch.arange(len(x), device=x.device)[:, None], last]
        return packing.open(short_convolution(packed, self.weight, window)).split(parts, dim=-1), after

    def step(self, x: Tensor, window: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One token x [B, channels]."""
        seen = torch.cat([window.to(x.dtype), x.unsqueeze(1)], dim=1)
        out = functional.silu((seen * self.weight.mT).sum(1)).to(x.dtype)
        after = seen[:, 1:]
        return out, after if mask is None else torch.where(mask[:, None, None], after, window.to(x.dtype))

    def _after(self, x: Tensor, window: Tensor) -> Tensor:
        """The last size − 1 tokens of window and x."""
        early = x.shape[1] - (self.size - 1)
        return x[:, early:].clone() if early >= 0 else torch.cat([window[:, early:].to(x.dtype), x], dim=1)
