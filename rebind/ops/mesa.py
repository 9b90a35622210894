"""MesaNet: a memory that answers every query with the ridge regression of all pairs so far.

    A_t = γ_t A_{t−1} + β_t k_t k_tᵀ          B_t = γ_t B_{t−1} + β_t v_t k_tᵀ          o_t = B_t (A_t + Λ)⁻¹ q_t

B (A + Λ)⁻¹ is the closed form of `rebind.memory.ridge` with C = Λ, written from an empty memory. No A_t is ever formed:
x ↦ A_t x is a scan that reads with x what keys wrote at keys, so conjugate gradients solve (A_t + Λ) x_t = q_t for all
tokens at once with one scan per iteration, and one more scan reads B_t with x_t.

**Backward.** With λ_t = (A_t + Λ)⁻¹ x̄_t, one more solve, q̄ = λ and the others' gradients are those of −λ·(A + Λ) x with
x and λ held fixed: one backward pass of one scan, however many iterations there were. Gradients of gradients, and
whatever follows single operations (compilers, torch.func, forward differentiation), go through the iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops.gradients import gradients_of
from rebind.ops.inputs import require_shared_heads
from rebind.ops.kernels import is_followed
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
    matrices = k, ridge.to(wide), log_decay, write, None if state is None else state.keys, cu_seqlens, backend
    solve = _solve if is_followed(q, *matrices[:5]) else _Solve.apply
    x = solve(q, iterations, *matrices)
    # One scan for both memories, B above A.
    start = None if state is None else torch.cat([state.values.to(wide), state.keys.to(wide)], dim=-2)
    options: dict[str, Any] = {"log_decay": log_decay, "write": write, "cu_seqlens": cu_seqlens, "backend": backend}
    out, final = scan(x, k, torch.cat([values, k], dim=-1), state=start, **options)
    end = final.split([v.shape[-1], k.shape[-1]], dim=-2)
    return out[..., : v.shape[-1]].to(v.dtype), MesaState(end[1], end[0])


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


def _apply(
    x: Tensor,
    k: Tensor,
    ridge: Tensor,
    log_decay: Tensor | None,
    write: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> Tensor:
    """Return (A_t + Λ) x_t for every token [B, T, H, d_k]."""
    options: dict[str, Any] = {"log_decay": log_decay, "write": write, "cu_seqlens": cu_seqlens, "backend": backend}
    return scan(x, k, k, state=state, **options)[0] + ridge * x


def _solve(b: Tensor, iterations: int, *matrices: Any) -> Tensor:
    """Return (A_t + Λ)⁻¹ b_t for every token [B, T, H, d_k]; `matrices` are the arguments of `_apply` after x."""
    return conjugate_gradients(lambda x: _apply(x, *matrices), b, iterations)


class _Solve(torch.autograd.Function):
    """`_solve`, with the gradients of the solution in place of those of the iterations."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, iterations: int, *matrices: Any) -> Tensor:
        x = _solve(b, iterations, *matrices)
        ctx.save_for_backward(b, x, *matrices[:6])
        ctx.iterations, ctx.backend = iterations, matrices[6]
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        b, x, *tensors, cu_seqlens = ctx.saved_tensors
        rest: tuple[Any, ...] = cu_seqlens, ctx.backend

        def solve(b: Tensor, *tensors: Tensor | None) -> list[Tensor]:
            return [_solve(b, ctx.iterations, *tensors, *rest)]

        def product(*tensors: Any) -> list[Tensor]:
            return [_apply(x, *tensors, *rest)]

        if torch.is_grad_enabled() or is_followed(slope):  # the caller wants a graph, or a batch
            d_b, *gradients = gradients_of(solve, (b, *tensors), (slope,))
        else:
            (d_b,), fixed = solve(slope, *tensors), [None if tensor is None else tensor.detach() for tensor in tensors]
            gradients = gradients_of(product, fixed, (-d_b,), create_graph=False)
        return d_b, None, *gradients, None, None


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
