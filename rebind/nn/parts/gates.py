"""What a fast-weight layer computes from its input: a short convolution of it, and the gates of its rule.

`beta` is a rate between 0 and 1, `alpha` a decay, and `dt` the step of the decay, as in Mamba-2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.memory.precision import working_dtype
from rebind.memory.rules import Rule
from rebind.nn.parts.checks import require_positive
from rebind.nn.parts.padding import Packing, take_tokens
from rebind.ops.convolution import short_convolution, split_convolution

MIN_STEP, MAX_STEP = 1e-3, 1e-1  # softplus(dt_bias) starts between these, as in Mamba-2
MAX_RATE = 16.0  # exp(A_log) starts between 1 and this


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


class Decay(nn.Module):
    """log α = −exp(A_log) · dt with dt = softplus(W_a x + dt_bias), one of each per head (Mamba-2, Gated DeltaNet)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rates and steps log-uniformly (softplus(b) ≈ eᵇ for steps this small). The projection stays."""
        nn.init.uniform_(self.A_log, 0.0, math.log(MAX_RATE))
        nn.init.uniform_(self.dt_bias, math.log(MIN_STEP), math.log(MAX_STEP))

    def forward(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return ln α and dt [..., heads] of W_a x, in float32 or better. Near 1, α itself would lose its digits."""
        wide = working_dtype(projected)
        dt = functional.softplus(projected.to(wide) + self.dt_bias)
        return dt * -self.A_log.to(wide).exp(), dt


class Gates(nn.Module):
    """The gates `alpha`, `beta` and `dt` of a rule, [..., heads] each; gates of other names keep their defaults."""

    def __init__(self, rule: Rule, dim: int, heads: int) -> None:
        super().__init__()
        self.rule = rule
        self.beta = nn.Linear(dim, heads, bias=False) if "beta" in rule.gates else None  # W_β of Schlag et al. eq. 21
        self.decay = Decay(dim, heads) if {"alpha", "dt"} & set(rule.gates) else None

    @property
    def projections(self) -> list[nn.Linear]:
        """The projections of x that `forward` takes side by side."""
        both = self.beta, None if self.decay is None else self.decay.project
        return [project for project in both if project is not None]

    def forward(self, projected: Tensor) -> tuple[dict[str, float | Tensor], Tensor | None]:
        """Return the gates by name, and ln α in place of the gate `Rule.decay`."""
        gates: dict[str, float | Tensor] = {}
        projected = projected.to(working_dtype(projected))
        if self.beta is not None:
            rate, projected = projected.tensor_split([self.beta.out_features], dim=-1)
            gates["beta"] = torch.sigmoid(rate)
        if self.decay is None:
            return gates, None
        log_alpha, dt = self.decay(projected)
        if "dt" in self.rule.gates:
            gates["dt"] = dt
        if self.rule.decay == "alpha":
            return gates, log_alpha
        if "alpha" in self.rule.gates:  # the rule computes its decay from α, which needs all digits
            gates["alpha"] = log_alpha.to(torch.float32 if log_alpha.device.type == "mps" else torch.float64).exp()
        return gates, None
