"""A short causal convolution, which mixes each token with the few before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.nn.parts.checks import require_positive
from rebind.nn.parts.padding import Packing, take_tokens
from rebind.ops.convolution import short_convolution, split_convolution


class ShortConvolution(nn.Module):
    """silu of a depthwise causal convolution over the last `size` tokens.

    The window carried from call to call holds the size − 1 inputs before the next token, zeros before the first one.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        require_positive(conv_size=size)
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.size**-0.5), self.size**-0.5)

    def initial_window(self, batch: int) -> Tensor:
        """Return the window before the first token [B, size − 1, channels]."""
        return self.weight.new_zeros(batch, self.size - 1, self.weight.shape[0])

    def forward(
        self, x: Tensor, window: Tensor, mask: Tensor | None = None, parts: Sequence[int] | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Convolve tokens x [B, T, channels]; return the output in `parts` of these widths, and the next window."""
        parts = [self.weight.shape[0]] if parts is None else list(parts)
        if mask is None:
            first = x.shape[1] - (self.size - 1)
            end = x[:, first:].clone() if first >= 0 else torch.cat([window[:, first:].to(x.dtype), x], dim=1)
            return split_convolution(x, self.weight, window, parts), end
        packing = Packing.from_mask(mask)  # the neighbor of a token is the next real one
        packed = packing.pack(x)
        last = packing.counts[:, None] + torch.arange(self.size - 1, device=x.device)
        next_window = take_tokens(torch.cat([window.to(x.dtype), packed], dim=1), last)
        out = take_tokens(short_convolution(packed, self.weight, window), packing.position)
        return out.split(parts, dim=-1), next_window

    def step(self, x: Tensor, window: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve one token x [B, channels]; return the output and the next window."""
        inputs = torch.cat([window.to(x.dtype), x.unsqueeze(1)], dim=1)
        out = functional.silu((inputs * self.weight.mT).sum(1)).to(x.dtype)
        next_window = inputs[:, 1:]
        return out, next_window if mask is None else torch.where(mask[:, None, None], next_window, window.to(x.dtype))
