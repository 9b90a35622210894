"""MesaNet: a layer that answers every query with the ridge regression of all pairs so far.

    A ← γ A + β k kᵀ          B ← γ B + β v kᵀ          y = W_o norm(B (A + Λ)⁻¹ q)

B (A + Λ)⁻¹ is the memory that `rebind.memory.ridge` writes with all pairs at once, so the layer is that closed form
with weights that are learned. `rebind.ops.mesa` solves for the reads by conjugate gradients.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.parts.checks import require_positive
from rebind.ops import MesaState, mesa, mesa_step

LOWEST_RIDGE = 0.25  # keeps A + Λ well conditioned, so that few iterations are enough
INITIAL_RIDGE = 1.0


class MesaLayer(FastWeight):
    """A `FastWeight` that reads B (A + Λ)⁻¹ q. Its memory is B [d_v, d_k] with A [d_k, d_k] below it.

    Every iteration is a scan over the sequence, so that the layer takes about as many times as long as Gated DeltaNet.

    Args:
        dim: Width of the input and the output.
        heads: Number of memories, each with a decay γ, a weight β of each pair, and a ridge Λ that is learned.
        iterations: Steps of conjugate gradients; d_k of them are exact up to rounding.
        **options: Those of `FastWeight`, except for `rule`.
    """

    splits: ClassVar[bool] = False

    def __init__(self, dim: int, heads: int, *, iterations: int = 30, **options: Any) -> None:
        super().__init__(dim, heads, rule="gated_delta", **options)  # whose gates are γ and β
        require_positive(iterations=iterations)
        if self.phi.normalizer.extra_rows:
            problem = "A ridge regression has no denominator"
            raise InputError(problem, expected="the normalizer 'l2', 'sum' or 'none'", code="mesa_with_denominator")
        self.iterations = iterations
        self.raw_ridge = nn.Parameter(torch.empty(heads, self.phi.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with a ridge of 1. The projections stay."""
        nn.init.constant_(self.raw_ridge, math.log(math.expm1(INITIAL_RIDGE - LOWEST_RIDGE)))

    @property
    def ridge(self) -> Tensor:
        """The diagonal of Λ [heads, width of φ], never below 0.25."""
        return functional.softplus(self.raw_ridge) + LOWEST_RIDGE

    @property
    def state_size(self) -> int:
        """Heads × width of φ(k) × (d_v + width of φ(k))."""
        return self.heads * self.phi.width * self._memory_rows

    @property
    def _memory_rows(self) -> int:
        return self.d_v + self.phi.width

    def _scan(self, arguments: dict[str, Any], start: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        state = None if start is None else self._parts(start)
        pairs = _pair_arguments(arguments)
        out, end = mesa(**pairs, ridge=self.ridge, state=state, cu_seqlens=bounds, iterations=self.iterations)
        return out, torch.cat([end.values, end.keys], dim=-2)

    def _step(self, arguments: dict[str, Any], memory: Tensor) -> Tensor:
        state = self._parts(memory)
        out = mesa_step(**_pair_arguments(arguments), state=state, ridge=self.ridge, iterations=self.iterations)
        memory.copy_(torch.cat([state.values, state.keys], dim=-2))
        return out

    def _parts(self, memory: Tensor) -> MesaState:
        values, keys = memory.split([self.d_v, self.phi.width], dim=-2)
        return MesaState(keys.contiguous(), values.contiguous())


def _pair_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("q", "k", "v", "log_decay", "write")}
