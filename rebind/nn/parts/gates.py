"""What a layer computes from its input beside queries, keys and values: a short convolution of them, and its gates.

`beta` is a rate between 0 and 1 (or 2), `alpha` a decay, and `dt` the step of the decay, as in Mamba-2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Rule
from rebind.nn.parts.checks import require_positive
from rebind.nn.parts.dense import project_gated
from rebind.nn.parts.documents import Documents
from rebind.nn.parts.padding import Packing, take_tokens
from rebind.ops.convolution import short_convolution, split_convolution

MIN_STEP, MAX_STEP = 1e-3, 1e-1  # softplus(dt_bias) starts between these, as in Mamba-2
MAX_RATE = 16.0  # exp(A_log) starts between 1 and this


class ShortConvolution(nn.Module):
    """silu of a depthwise causal convolution over the last `size` tokens.

    The window carried from call to call holds the size − 1 inputs before the next token, zeros before the first one.
    """

    def __init__(self, channels: int, size: int, *, bias: bool = False) -> None:
        super().__init__()
        require_positive(conv_size=size)
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.size**-0.5), self.size**-0.5)

    def initial_window(self, batch: int) -> Tensor:
        """Return the window before the first token [B, size − 1, channels]."""
        return self.weight.new_zeros(batch, self.size - 1, self.weight.shape[0])

    def forward(
        self,
        x: Tensor,
        window: Tensor,
        mask: Tensor | None = None,
        parts: Sequence[int] | None = None,
        documents: Documents | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Convolve tokens x [B, T, channels]; return the output in `parts` of these widths, and the next window."""
        parts = [self.weight.shape[0]] if parts is None else list(parts)
        if documents is not None:
            longer, places = documents.insert_windows(x, window)
            out = self._convolve(longer, window.new_zeros(1, *window.shape[1:]))[:, places]
            return out.split(parts, dim=-1), documents.last_tokens(longer, self.size - 1)
        if mask is None:
            first = x.shape[1] - (self.size - 1)
            end = x[:, first:].clone() if first >= 0 else torch.cat([window[:, first:].to(x.dtype), x], dim=1)
            if self.bias is None:
                return split_convolution(x, self.weight, window, parts), end
            return self._convolve(x, window).split(parts, dim=-1), end
        packing = Packing.from_mask(mask)  # the neighbor of a token is the next real one
        packed = packing.pack(x)
        last = packing.counts[:, None] + torch.arange(self.size - 1, device=x.device)
        next_window = take_tokens(torch.cat([window.to(x.dtype), packed], dim=1), last)
        out = take_tokens(self._convolve(packed, window), packing.position)
        return out.split(parts, dim=-1), next_window

    def step(self, x: Tensor, window: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve one token x [B, channels]; return the output and the next window."""
        inputs = torch.cat([window.to(x.dtype), x.unsqueeze(1)], dim=1)
        total = (inputs * self.weight.mT).sum(1)
        out = functional.silu(total if self.bias is None else total + self.bias).to(x.dtype)
        next_window = inputs[:, 1:]
        return out, next_window if mask is None else torch.where(mask[:, None, None], next_window, window.to(x.dtype))

    def _convolve(self, x: Tensor, window: Tensor) -> Tensor:
        if self.bias is None:
            return short_convolution(x, self.weight, window)
        tokens = torch.cat([window.to(x.dtype), x], dim=1)
        weight, bias = self.weight.to(x.dtype).unsqueeze(1), self.bias.to(x.dtype)
        return functional.silu(functional.conv1d(tokens.mT, weight, bias, groups=len(weight)).mT)


# Decay


@dataclass(frozen=True)
class SoftplusDecay:
    """ln α = −exp(A_log) · softplus(W x + dt_bias): Mamba-2, Gated DeltaNet, Kimi Linear.

    Args:
        rank: Width between the two matrices that W is the product of. None: W is one matrix.
    """

    rank: int | None = None
    name: ClassVar[str] = "softplus"

    def __call__(self, x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ln α and dt for x = W x + dt_bias and rate = exp(A_log)."""
        dt = functional.softplus(x)
        return dt * -rate, dt


@dataclass(frozen=True)
class SigmoidDecay:
    """ln α = lowest · σ(exp(A_log) · (W x + dt_bias)), which is never below `lowest`: GLM-5.3, Ling 3.0.

    Args:
        rank: Width between the two matrices that W is the product of. None: W is one matrix.
        lowest: The lowest ln α.
    """

    rank: int | None = None
    lowest: float = -5.0
    name: ClassVar[str] = "sigmoid"

    def __post_init__(self) -> None:
        if not self.lowest < 0:
            problem = f"The lowest logarithm of a decay is {self.lowest!r}"
            raise InputError(problem, expected="a negative number", code="growing_decay")

    def __call__(self, x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ln α, and no dt, for x = W x + dt_bias and rate = exp(A_log)."""
        return torch.sigmoid(x * rate) * self.lowest, None


DecayGate = SoftplusDecay | SigmoidDecay
DECAYS: dict[str, type[DecayGate]] = {"softplus": SoftplusDecay, "sigmoid": SigmoidDecay}


def get_decay(decay: str | DecayGate) -> DecayGate:
    """Return the decay gate of that name; an object passes through."""
    if isinstance(decay, (SoftplusDecay, SigmoidDecay)):
        return decay
    if decay not in DECAYS:
        raise unknown_name("decay gate", decay, DECAYS)
    return DECAYS[decay]()


class Decay(nn.Module):
    """The decay of every head, or of every key channel of it, computed from the input by a decay gate.

    Args:
        dim: Width of the input.
        heads: Number of heads, each with a rate exp(A_log).
        channels: Width of the keys, for a decay per channel. None: one decay per head.
        gate: The function.
    """

    def __init__(
        self, dim: int, heads: int, *, channels: int | None = None, gate: str | DecayGate = "softplus"
    ) -> None:
        super().__init__()
        self.gate, self.channels = get_decay(gate), channels
        width = heads * (channels or 1)
        self.project = nn.Linear(dim, self.gate.rank or width, bias=False)
        self.expand = None if self.gate.rank is None else nn.Linear(self.gate.rank, width, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rates and steps log-uniformly (softplus(b) ≈ eᵇ for steps this small). The projection stays.

        The rates of a sigmoid start at 1, since they scale its input.
        """
        nn.init.uniform_(self.A_log, 0.0, math.log(MAX_RATE) if isinstance(self.gate, SoftplusDecay) else 0.0)
        nn.init.uniform_(self.dt_bias, math.log(MIN_STEP), math.log(MAX_STEP))

    def forward(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ln α and dt [..., heads (, channels)] of `project(x)`, in float32 or better.

        Near 1, α itself would lose its digits.
        """
        wide = working_dtype(projected)
        x = (projected if self.expand is None else self.expand(projected)).to(wide) + self.dt_bias
        rate = self.A_log.to(wide).exp()
        if self.channels is not None:
            x, rate = x.unflatten(-1, (-1, self.channels)), rate.unsqueeze(-1)
        return self.gate(x, rate)


class Gates(nn.Module):
    """The gates of a rule, [..., heads] each, or [..., heads, width] where the rule has one per channel.

    `alpha` is a decay and `dt` its step, `beta` is max_beta · σ(W x), other gates with channels are σ(W x), and the
    rest keep their defaults.

    Args:
        rule: The rule.
        dim: Width of the input.
        heads: Number of memories.
        widths: Channels of a "key", after φ, and of a "value".
        decay: How `alpha` is computed.
        max_beta: The least upper bound of `beta`: 1, or 2 for writes that may turn a value into its opposite.
    """

    def __init__(
        self,
        rule: Rule,
        dim: int,
        heads: int,
        widths: Mapping[str, int],
        *,
        decay: str | DecayGate = "softplus",
        max_beta: float = 1.0,
    ) -> None:
        super().__init__()
        self.rule, self.max_beta = rule, max_beta
        self.beta = nn.Linear(dim, heads, bias=False) if "beta" in rule.gates else None  # W_β of Schlag et al. eq. 21
        channels = widths["key"] if rule.channels.get("alpha") == "key" else None
        decays = bool({"alpha", "dt"} & set(rule.gates))
        self.decay = Decay(dim, heads, channels=channels, gate=decay) if decays else None
        others = {name: widths[of] for name, of in rule.channels.items() if name not in ("alpha", "beta")}
        self.others = nn.ModuleDict({name: nn.Linear(dim, heads * width, bias=False) for name, width in others.items()})
        self._other_widths = others
        if not 0 < max_beta <= rule.largest.get("beta", 2.0):
            expected = f"more than 0, and at most {rule.largest.get('beta', 2.0):g} for rule {rule.name!r}"
            raise InputError(f"max_beta is {max_beta}", expected=expected, code="gate_out_of_range")
        if "dt" in rule.gates and not isinstance(get_decay(decay), SoftplusDecay):
            expected = f"'softplus', whose step rule {rule.name!r} also writes with"
            raise InputError(f"The decay gate is {decay!r}", expected=expected, code="decay_without_step")

    @property
    def projections(self) -> list[nn.Linear]:
        """The projections of x that `forward` takes side by side."""
        first = self.beta, None if self.decay is None else self.decay.project
        return [project for project in (*first, *self.others.values()) if isinstance(project, nn.Linear)]

    def forward(self, projected: Tensor) -> tuple[dict[str, float | Tensor], Tensor | None]:
        """Return the gates by name, and ln α in place of the gate `Rule.decay`."""
        parts = iter(projected.split([project.out_features for project in self.projections], dim=-1))
        gates: dict[str, float | Tensor] = {}
        if self.beta is not None:
            rate = torch.sigmoid(_widen(next(parts)))
            gates["beta"] = rate if self.max_beta == 1 else rate * self.max_beta
        decay = None if self.decay is None else next(parts)
        for name, width in self._other_widths.items():
            gates[name] = torch.sigmoid(_widen(next(parts))).unflatten(-1, (-1, width))
        if self.decay is None:
            return gates, None
        log_alpha, dt = self.decay(decay)
        if "dt" in self.rule.gates:
            gates["dt"] = dt
        if self.rule.decay == "alpha":
            return gates, log_alpha
        if "alpha" in self.rule.gates:  # the rule computes its decay from α, which needs all digits
            gates["alpha"] = log_alpha.to(torch.float32 if log_alpha.device.type == "mps" else torch.float64).exp()
        return gates, None


def _widen(x: Tensor) -> Tensor:
    return x.to(working_dtype(x))


# The output


@dataclass(frozen=True)
class OutputGate:
    """Reads are multiplied by activation(W x) before the output projection.

    Args:
        activation: "silu" or "sigmoid".
        rank: Width between the two matrices that W is the product of. None: W is one matrix.
        bias: Whether W x has a bias.
    """

    activation: str = "silu"
    rank: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ("silu", "sigmoid"):
            raise unknown_name("output gate", self.activation, ("none", "silu", "sigmoid"))

    def project(self, gate: Tensor, read: Tensor, output: nn.Linear, dtype: torch.dtype) -> Tensor:
        """Return W_o (activation(gate) · read), computed in that dtype."""
        if self.activation == "silu":
            return project_gated(gate, read, output, dtype)
        return output((torch.sigmoid(gate) * read).to(dtype))


def gate_projections(gate: OutputGate | None, dim: int, width: int) -> tuple[nn.Linear | None, nn.Linear | None]:
    """Return W of an output gate, or the two matrices that it is the product of."""
    if gate is None:
        return None, None
    if gate.rank is None:
        return nn.Linear(dim, width, bias=gate.bias), None
    return nn.Linear(dim, gate.rank, bias=False), nn.Linear(gate.rank, width, bias=gate.bias)


def get_output_gate(gate: str | OutputGate | None) -> OutputGate | None:
    """Return the output gate with that activation; an object passes through, and "none" is None."""
    if gate is None or gate == "none":
        return None
    return OutputGate(gate) if isinstance(gate, str) else gate
