"""MesaNet: a memory that answers every query with the ridge regression of all pairs so far.

    A_t = γ_t A_{t−1} + β_t k_t k_tᵀ          B_t = γ_t B_{t−1} + β_t v_t k_tᵀ          o_t = B_t (A_t + Λ)⁻¹ q_t

B (A + Λ)⁻¹ is the closed form of `rebind.memory.ridge` with C = Λ, written from an empty memory. No A_t is ever formed:
x ↦ A_t x is a scan that reads with x what keys wrote at keys, so conjugate gradients solve (A_t + Λ) x_t = q_t for all
tokens at once with one scan per iteration, and one more scan reads B_t with x_t.

**Backward.** With λ_t = (A_t + Λ)⁻¹ x̄_t, one more solve, q̄ = λ and the others' gradients are those of −λ·(A + Λ) x with
x and λ held fixed: one backward pass of one scan, however many iterations there were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops.inputs import require_shared_heads
from rebind.ops.scan import scan
from rebind.ops.step import step


class MesaState(NamedTuple):
    """What a sequence leaves."""

    keys: Tensor  # A [N, H, d_k, d_k]
    values: Tensor  # B [N, H, d_v, d_k]


def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ridge: Tensor,
    log_decay: Tensor | None = None,
    write: Tensor | None = None,
    state: MesaState | None = None,
    cu_seqlens: Tensor | None = None,
    iterations: int = 30,
    backend: str = "auto",
) -> tuple[Tensor, MesaState]:
    """Write every pair in turn, and answer each query by ridge regression.

    Args:
        q: Queries [B, T, H_k, d_k].
        k: Keys [B, T, H_k, d_k].
        v: Values [B, T, H, d_v].
        ridge: The diagonal of Λ [H, d_k], positive.
        log_decay: ln γ [B, T, H]. None: nothing decays.
        write: β [B, T, H]. None: 1.
        state: Where to start from, as `mesa` returned it. None: zeros.
        cu_seqlens: Boundaries of packed sequences, as for `scan`.
        iterations: Steps of conjugate gradients; d_k of them are exact up to rounding.
        backend: As for `scan`.

    Returns:
        The output [B, T, H, d_v] in v's dtype, and the state at the end.
    """
    q, k = _prepare(q, k, v, ridge, iterations)
    wide = working_dtype(v)
    q, k, values = q.to(wide), k.to(wide), v.to(wide)
    start = MesaState(*(None, None) if state is None else state)
    shared: dict[str, Any] = {"log_decay": log_decay, "write": write, "cu_seqlens": cu_seqlens, "backend": backend}

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        read, final = scan(x, k, k, state=start.keys, **shared)
        return read + ridge.to(wide) * x, final

    def solve(b: Tensor) -> Tensor:
        with torch.no_grad():
            return conjugate_gradients(lambda x: apply(x)[0], b, iterations)

    solved = solve(q)
    product, keys = apply(solved)
    x = solved + _Solve.apply(q - product, solve)  # type: ignore[no-untyped-call]
    out, final = scan(x, k, values, state=start.values, **shared)
    return out.to(v.dtype), MesaState(keys, final)


@torch.no_grad()
def mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: MesaState,
    *,
    ridge: Tensor,
    log_decay: Tensor | None = None,
    write: Tensor | None = None,
    iterations: int = 30,
) -> Tensor:
    """Write one pair [B, H, width] into each memory, in place, and answer the query: `mesa` with T = 1."""
    q, k = _prepare(q, k, v, ridge, iterations)
    wide = state.keys.dtype
    q, k = q.to(wide), k.to(wide)
    step(q, k, k, state.keys, log_decay=log_decay, write=write)

    def apply(x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) @ state.keys.mT).squeeze(-2) + ridge.to(wide) * x

    x = conjugate_gradients(apply, q, iterations)
    return step(x, k, v.to(wide), state.values, log_decay=log_decay, write=write).to(v.dtype)


def conjugate_gradients(apply: Callable[[Tensor], Tensor], b: Tensor, iterations: int) -> Tensor:
    """Return x with `apply(x)` ≈ b for every row of b [..., d], `apply` being symmetric and positive definite."""
    x, residual = torch.zeros_like(b), b
    direction, energy = residual, residual.square().sum(-1, keepdim=True)
    least = energy * torch.finfo(b.dtype).eps ** 2  # a row that is solved stays as it is
    for _ in range(iterations):
        image = apply(direction)
        length = (direction * image).sum(-1, keepdim=True)
        rate = torch.where(energy > least, energy / length.where(length > 0, 1.0), 0.0)
        x = x + rate * direction
        residual = residual - rate * image
        now = residual.square().sum(-1, keepdim=True)
        direction = residual + torch.where(energy > least, now / energy.where(energy > 0, 1.0), 0.0) * direction
        energy = now
    return x


class _Solve(torch.autograd.Function):
    """The correction A⁻¹ r of a solution, for a residual r that is zero but has a gradient."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return ctx.solve(slope), None


def _prepare(q: Tensor, k: Tensor, v: Tensor, ridge: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Check what `scan` will not; return q and k of every value head."""
    require_shared_heads(k, v)
    if ridge.shape != (v.shape[-2], k.shape[-1]):
        raise ShapeError(
            f"The ridge has shape {list(ridge.shape)}",
            expected=f"one number per value head and key channel, {[v.shape[-2], k.shape[-1]]}",
            code="ridge_does_not_match",
        )
    if iterations < 1:
        raise InputError(f"There are {iterations} iterations", expected="1 or more", code="invalid_iterations")
    sharing = v.shape[-2] // k.shape[-2]
    return (q, k) if sharing == 1 else (q.repeat_interleave(sharing, dim=-2), k.repeat_interleave(sharing, dim=-2))
