"""Hopfield networks: memories that complete a pattern from a part of it.

The classical network stores ±1 patterns in a Hebbian matrix, which is the `sum` rule with every pattern as its own
key. It holds about 0.138·N of them. The modern network stores the patterns themselves and descends an exponential
energy; one step of it is one pass of softmax attention, and it holds exponentially many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.memory.checks import known, require_broadcastable, require_finite, require_tensors, require_width
from rebind.memory.precision import working_dtype


@dataclass(frozen=True)
class HopfieldRecall:
    """The state in which a recall ended."""

    state: Tensor  # [..., N]
    steps: int  # number of updates (of sweeps, if asynchronous)
    converged: bool  # whether the last one changed nothing


@dataclass(frozen=True, eq=False)
class Classical:
    """±1 patterns, quadratic energy −½ xᵀWx."""

    weights: Tensor  # [..., N, N], symmetric, zero diagonal

    @classmethod
    def store(cls, patterns: Tensor) -> Classical:
        """Store patterns [..., n, N] of ±1 by Hebb's rule: W = (1/N) Σ ξξᵀ without its diagonal."""
        require_tensors(2, patterns=patterns)
        if known((patterns.abs() != 1).any()):
            problem = f"Patterns contain {float(patterns[patterns.abs() != 1].flatten()[0]):.3g}"
            advice = "Take patterns.sign()"
            raise InputError(problem, expected="+1 and −1 only", advice=advice, code="patterns_not_binary")
        wide = patterns.to(working_dtype(patterns))
        weights = wide.mT @ wide / patterns.shape[-1]
        diagonal = torch.diag_embed(weights.diagonal(dim1=-2, dim2=-1))
        return cls((weights - diagonal).to(patterns.dtype))

    @property
    def units(self) -> int:
        return self.weights.shape[-1]

    def energy(self, state: Tensor) -> Tensor:
        """Return −½ xᵀWx, [...]; no asynchronous update raises it."""
        _check_state(state, self.weights)
        return (-0.5 * (state * _overlap(self.weights, state)).sum(-1)).to(state.dtype)

    def recall(
        self,
        cue: Tensor,
        *,
        mode: Literal["synchronous", "asynchronous"] = "synchronous",
        steps: int = 100,
        generator: torch.Generator | None = None,
    ) -> HopfieldRecall:
        """Update until nothing changes, for at most `steps` updates or sweeps. A unit with no input stays as it is.

        Synchronous: all units at once; fast, but it can end in a cycle of two states. Asynchronous: one unit after
        another, in an order drawn from `generator` (in index order without one); it always converges.
        """
        _check_state(cue, self.weights)
        if mode not in ("synchronous", "asynchronous"):
            raise InputError(f"The mode is {mode!r}", expected="'synchronous' or 'asynchronous'", code="unknown_mode")
        state = cue.expand(*torch.broadcast_shapes(cue.shape[:-1], self.weights.shape[:-2]), self.units)
        for step in range(1, steps + 1):
            new = (
                self._sweep(state, generator) if mode == "asynchronous" else _sign(_overlap(self.weights, state), state)
            )
            if torch.equal(new, state):
                return HopfieldRecall(state, step, converged=True)
            state = new
        return HopfieldRecall(state, steps, converged=False)

    def _sweep(self, state: Tensor, generator: torch.Generator | None) -> Tensor:
        state = state.clone()
        order = range(self.units) if generator is None else torch.randperm(self.units, generator=generator).tolist()
        for unit in order:
            field = (self.weights[..., unit, :].to(working_dtype(state, self.weights)) * state).sum(-1)
            state[..., unit] = _sign(field, state[..., unit])
        return state


@dataclass(frozen=True, eq=False)
class Modern:
    """Continuous patterns X [..., M, N], energy −lse(β, Xξ) + ½ξᵀξ + const."""

    patterns: Tensor  # [..., M, N]
    beta: float = 1.0  # β: inverse temperature; large β picks one pattern, small β averages them

    def __post_init__(self) -> None:
        require_tensors(2, patterns=self.patterns)
        require_finite(patterns=self.patterns)
        if self.patterns.shape[-2] == 0:
            raise InputError("There are no patterns", expected="at least one", code="no_patterns")
        if not 0 < self.beta < float("inf"):
            raise InputError(f"The β of the network is {self.beta}", expected="a positive number", code="invalid_beta")

    def step(self, state: Tensor) -> Tensor:
        """Return Xᵀ softmax(β X ξ) for states ξ [..., N]: softmax attention with X as keys and values."""
        _check_state(state, self.patterns)
        weights = torch.softmax(self.beta * _overlap(self.patterns, state), dim=-1)
        return (weights.unsqueeze(-2) @ self.patterns.to(weights.dtype)).squeeze(-2).to(state.dtype)

    def recall(self, cue: Tensor, *, steps: int = 1, tolerance: float = 0.0) -> HopfieldRecall:
        """Repeat `step` until it moves no entry by more than `tolerance`."""
        state = cue
        for count in range(1, steps + 1):
            new = self.step(state)
            moved = (new - state).abs().max() if new.numel() else new.new_zeros(())
            state = new
            if moved <= tolerance:
                return HopfieldRecall(state, count, converged=True)
        return HopfieldRecall(state, steps, converged=False)

    def energy(self, state: Tensor) -> Tensor:
        """Return −β⁻¹ log Σ exp(β xᵢ·ξ) + ½‖ξ‖² + β⁻¹ log M + ½ max‖xᵢ‖², [...].

        It is never negative, and no step raises it.
        """
        _check_state(state, self.patterns)
        lse = torch.logsumexp(self.beta * _overlap(self.patterns, state), dim=-1) / self.beta
        patterns, query = self.patterns.to(lse.dtype), state.to(lse.dtype)
        count = torch.tensor(float(patterns.shape[-2]), dtype=patterns.dtype)
        longest = patterns.square().sum(-1).amax(-1)
        energy = query.square().sum(-1) / 2 - lse + count.log() / self.beta + longest / 2
        return energy.to(state.dtype)


def _check_state(state: Tensor, network: Tensor) -> None:
    """Check a state against the weights or the patterns of its network."""
    require_tensors(1, state=state)
    require_width("state", state, network.shape[-1], "this network")
    require_broadcastable("the network and the state", network.shape[:-2], state.shape[:-1])
    require_finite(state=state)


def _overlap(patterns: Tensor, state: Tensor) -> Tensor:
    """Return xᵢ·ξ for every row xᵢ, [..., M], in the working dtype."""
    dtype = working_dtype(patterns, state)
    return (state.to(dtype).unsqueeze(-2) @ patterns.to(dtype).mT).squeeze(-2)


def _sign(field: Tensor, previous: Tensor) -> Tensor:
    return torch.where(field > 0, 1.0, torch.where(field < 0, -1.0, previous)).to(previous.dtype)
