"""The gates of a rule, made from the input: one module a name.

`beta` is a rate between 0 and 1, `alpha` a decay, and `dt` the decay's step, as Mamba-2 has it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Rule

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
        """α and dt [..., heads], in float32 or better."""
        raw = self.project(x)
        wide = working_dtype(raw)
        dt = functional.softplus(raw.to(wide) + self.dt_bias.to(wide))
        return (-self.A_log.to(wide).exp() * dt).to(_widest(x)).exp(), dt


class Gates(nn.Module):
    """Every gate that a rule takes, from x [..., dim]: {name: [..., heads]}."""

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
        self.beta = nn.Linear(dim, heads, bias=False) if "beta" in rule.gates else None  # W_β of eq. 21
        self.decay = Decay(dim, heads) if {"alpha", "dt"} & set(rule.gates) else None

    def forward(self, x: Tensor) -> dict[str, float | Tensor]:
        found: dict[str, float | Tensor] = {}
        if self.beta is not None:
            raw = self.beta(x)
            found["beta"] = torch.sigmoid(raw.to(working_dtype(raw)))
        if self.decay is not None:
            alpha, dt = self.decay(x)
            found |= {"alpha": alpha, "dt": dt}
        return {name: found[name] for name in self.names}


def _widest(x: Tensor) -> torch.dtype:
    """Where α is formed: the scan takes its logarithm again, and a decay near 1 must come back."""
    return torch.float32 if x.device.type == "mps" else torch.float64
