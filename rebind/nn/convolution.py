"""A short causal convolution: what a token's neighbours were, before keys and values are made of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.nn.layer import require_positive
from rebind.nn.padding import Packing


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

    def forward(self, x: Tensor, window: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens x [B, T, channels] after `window`: what comes out, and the next window."""
        if mask is None:
            seen = torch.cat([window.to(x.dtype), x], dim=1)
            return self._convolve(seen), seen[:, seen.shape[1] - (self.size - 1) :]
        packing = Packing.of(mask)  # a neighbour is the next real token, whatever lies between
        seen = torch.cat([window.to(x.dtype), packing.close(x)], dim=1)
        last = packing.counts[:, None] + torch.arange(self.size - 1, device=x.device)
        return packing.open(self._convolve(seen)), seen[torch.arange(len(x), device=x.device)[:, None], last]

    def step(self, x: Tensor, window: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One token x [B, channels]."""
        seen = torch.cat([window.to(x.dtype), x.unsqueeze(1)], dim=1)
        out = functional.silu(torch.einsum("bsc,cs->bc", seen, self.weight))
        after = seen[:, 1:]
        return out, after if mask is None else torch.where(mask[:, None, None], after, window.to(x.dtype))

    def _convolve(self, seen: Tensor) -> Tensor:
        """[B, size − 1 + T, channels] → [B, T, channels]."""
        out = functional.conv1d(seen.mT, self.weight.unsqueeze(1), groups=self.channels)
        return functional.silu(out.mT)
