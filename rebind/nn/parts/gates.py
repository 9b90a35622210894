"""The gates of a rule, made from the input: one module a name.

`beta` is a rate between 0 and 1, `alpha` a decay, and `dt` the decay's step, as Mamba-2 has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Rule
from rebind.nn.parts.products import joined

SLOWEST, FASTEST = 1e-3, 1e-1  # softplus(dt_bias) starts between these, as Mamba-2's dt does
LARGEST_RATE = 16.0  # exp(A_log) starts between 1 and this


class Decay(nn.Module):
    """log α = −exp(A_log) · dt with dt = softplus(W_a x + dt_bias), one of each a head (Mamba-2, Gated DeltaNet)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Own parameters only. Rates and steps start log-uniform (softplus(b) ≈ eᵇ for steps this small)."""
        nn.init.uniform_(self.A_log, 0.0, math.log(LARGEST_RATE))
        nn.init.uniform_(self.dt_bias, math.log(SLOWEST), math.log(FASTEST))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """ln α and dt [..., heads], in float32 or better."""
        return self.made(self.project(x))

    def made(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """ln α and dt of W_a x [..., heads]. α itself is never formed: near 1 it would lose its digits."""
        wide = working_dtype(raw)
        dt = functional.softplus(raw.to(wide) + self.dt_bias)
        return dt * -self.A_log.to(wide).exp(), dt


@dataclass(frozen=True, eq=False)
class Made:
    """A token's gates by name, [..., heads] each, but for a decay of which only the logarithm is needed."""

    gates: dict[str, float | Tensor]
    log_decay: Tensor | None = None  # ln α in the stead of the gate `Rule.decay`


class Gates(nn.Module):
    """Every gate that a rule takes, from x [..., dim]: [..., heads] each."""

    makes = ("alpha", "beta", "dt")

    def __init__(self, rule: Rule, dim: int, heads: int) -> None:
        super().__init__()
        unknown = [name for name in rule.gates if name not in self.makes]
        if unknown:
            raise InputError(
                f"rule {rule.name!r} takes a gate {unknown[0]!r}, a layer makes {', '.join(self.makes)}: name it one "
                f"of these, or give Gates in rebind/nn/gates.py a way to make it"
            )
        self.names = tuple(rule.gates)
        self.by_logarithm = rule.decay == "alpha"
        self.beta = nn.Linear(dim, heads, bias=False) if "beta" in rule.gates else None  # W_β of eq. 21
        self.decay = Decay(dim, heads) if {"alpha", "dt"} & set(rule.gates) else None

    @property
    def projections(self) -> list[nn.Linear]:
        """What turns x into what `made` takes."""
        found = [] if self.beta is None else [self.beta]
        return found if self.decay is None else [*found, self.decay.project]

    def forward(self, x: Tensor) -> Made:
        return self.made(joined(x, *self.projections) if self.names else None)

    def made(self, raw: Tensor | None) -> Made:
        """The gates of what `projections` gave, side by side; None where a rule has no gates."""
        if raw is None:
            return Made({})
        raw = raw.to(working_dtype(raw))
        found: dict[str, float | Tensor] = {}
        if self.beta is not None:
            rate, raw = (raw, raw) if self.decay is None else raw.chunk(2, dim=-1)
            found["beta"] = torch.sigmoid(rate)
        if self.decay is None:
            return Made(found)
        log_alpha, dt = self.decay.made(raw)
        if "dt" in self.names:
            found["dt"] = dt
        if self.by_logarithm:
            return Made(found, log_alpha)
        if "alpha" in self.names:
            found["alpha"] = log_alpha.to(_widest(log_alpha)).exp()
        return Made(found)


def _widest(x: Tensor) -> torch.dtype:
    """Where α is formed for a rule that makes its decay of it: a decay near 1 keeps its digits."""
    return torch.float32 if x.device.type == "mps" else torch.float64
