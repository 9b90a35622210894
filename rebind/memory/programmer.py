"""The original fast weight programmer (Schmidhuber, 1992; Schlag et al. eqs. 1–2).

    a, b = W_a x, W_b x
    W ← σ(W + a bᵀ)        (1)
    y = W x                (2)

The squashing function σ bounds the memory and makes its step nonlinear, so steps do not compose: there is a `step`
here and no `Write`. With σ the identity it is the `sum` rule with key b and value a.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.memory.checks import require_broadcastable, require_finite, require_tensors, require_width
from rebind.memory.precision import common_dtype, working_dtype


@dataclass(frozen=True)
class FastWeightProgrammer:
    """A matrix memory with an additive step, squashed by σ."""

    squash: Callable[[Tensor], Tensor] = torch.tanh  # σ

    def step(self, memory: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return σ(W + a bᵀ) for a memory [..., d_v, d_k], a [..., d_v], b [..., d_k]."""
        require_tensors(2, memory=memory)
        require_tensors(1, a=a, b=b)
        require_width("a", a, memory.shape[-2], "this memory")
        require_width("b", b, memory.shape[-1], "this memory")
        require_broadcastable("memory, a and b", memory.shape[:-2], a.shape[:-1], b.shape[:-1])
        require_finite(memory=memory, a=a, b=b)
        dtype = working_dtype(memory, a, b)
        outer = a.to(dtype).unsqueeze(-1) * b.to(dtype).unsqueeze(-2)
        return self.squash(memory.to(dtype) + outer).to(memory.dtype)

    def run(self, x: Tensor, slow_a: Tensor, slow_b: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs [..., T, d_v] and the final memory for inputs x [..., T, d].

        `slow_a` [d_v, d] and `slow_b` [d, d] are the slow weights; the memory starts at zero.
        """
        require_tensors(2, x=x, slow_a=slow_a, slow_b=slow_b)
        require_width("slow_a", slow_a, x.shape[-1], "this input")
        require_width("slow_b", slow_b, x.shape[-1], "this input")
        if memory is None:
            memory = x.new_zeros(*x.shape[:-2], slow_a.shape[-2], x.shape[-1])
        dtype, out = working_dtype(x, slow_a, slow_b, memory), common_dtype(x, slow_a, slow_b)
        wide = x.to(dtype)
        a, b, state = wide @ slow_a.to(dtype).mT, wide @ slow_b.to(dtype).mT, memory.to(dtype)
        outputs = []
        for t in range(x.shape[-2]):
            state = self.step(state, a[..., t, :], b[..., t, :])
            outputs.append((state @ wide[..., t, :].unsqueeze(-1)).squeeze(-1))
        read = torch.stack(outputs, dim=-2) if outputs else wide.new_zeros(*x.shape[:-1], slow_a.shape[-2])
        return read.to(out), state.to(memory.dtype)
