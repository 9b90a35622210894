"""Two recurrences over the keys of a sequence, each in one GPU kernel per direction.

Both are small loops that plain torch turns into hundreds of passes over memory: with it the full sweep of `overwrite`
takes over ten minutes. `rebind.lab.retrieval.models` has the definitions, and the tests compare.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64  # of the memory, per program of `_tanh_backward`


class Corrected(torch.autograd.Function):
    """aᵀT₀ [n, L] for φ(k) [n, L, D], one query φ(q) [n, D] per sequence and ε [n, L], all contiguous.

        x_j = k_j·r,   r ← r − ε_j x_j k_j                           from the last key to the first, r = q at first
        y_j = g_j − ε_j k_j·p,   p ← p + y_j k_j                     from the first key to the last, p = 0 at first
        dk_j = y_j r_j − ε_j x_j p_j,   dε_j = −x_j k_j·p_j,   dq = p

    where g is the gradient of x. Backward recomputes r_j on the way, by r_j = r_{j−1} + ε_j x_j k_j.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, q: Tensor, erase: Tensor) -> Tensor:
        x, rest = torch.empty_like(erase), torch.empty_like(q)
        _sweep[(len(k),)](k, q, erase, x, rest, k.shape[1], **_one_program_wide(k))
        ctx.save_for_backward(k, erase, x, rest)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, erase, x, rest = ctx.saved_tensors
        gradients = torch.empty_like(k), torch.empty_like(rest), torch.empty_like(erase)
        constants = _one_program_wide(k)
        _sweep_back[(len(k),)](k, erase, x, rest, gradient.contiguous(), *gradients, k.shape[1], **constants)
        return gradients


class TanhMemory(torch.autograd.Function):
    """The memory [n, S, D] after W ← tanh(W + v φ(k)ᵀ) for φ(k) [n, L, D] and rows v [n, L], contiguous; −1 is no row.

    A row depends on no other, so a program takes one row through all keys. What a key wrote reaches the end through
    every tanh that follows: its gradient is the memory's times Π (1 − W²) over these. The product is stored from one
    write into a row to the next: one number per key, not one per state.
    """

    @staticmethod
    def forward(ctx: Any, phi_k: Tensor, values: Tensor, size: int) -> Tensor:
        n, length, width = phi_k.shape
        memory = phi_k.new_empty(n, size, width)
        between, after = torch.empty_like(phi_k), torch.empty_like(memory)
        _tanh_forward[(n, size)](phi_k, values, memory, between, after, length, size, **_one_program_wide(phi_k))
        ctx.save_for_backward(values, between, after)
        return memory

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        values, between, after = ctx.saved_tensors
        n, length, width = between.shape
        d_phi, row_gradient = torch.zeros_like(between), gradient * after
        wide = min(COLUMNS, triton.next_power_of_2(width))
        grid = (n, triton.cdiv(width, wide))
        size = gradient.shape[1]
        _tanh_backward[grid](row_gradient, values, between, d_phi, length, size, D=width, WIDE=wide, num_warps=1)
        return d_phi, None, None


def _one_program_wide(features: Tensor) -> dict[str, int]:
    """Return the constants of kernels in which one program holds all features of a key."""
    width = features.shape[-1]
    return {"D": width, "WIDE": triton.next_power_of_2(width), "num_warps": 1}


@triton.jit(do_not_specialize=["L"])
def _sweep(keys, query, erase, reads, rest, L, D: tl.constexpr, WIDE: tl.constexpr):
    n = tl.program_id(0)
    column = tl.arange(0, WIDE)
    inside = column < D
    r = tl.load(query + n * D + column, mask=inside, other=0.0)
    for back in tl.range(0, L, num_stages=4):  # loads the next keys while one is processed
        token = n * L + L - 1 - back
        key = tl.load(keys + token * D + column, mask=inside, other=0.0)
        x = tl.sum(r * key)
        tl.store(reads + token, x)
        r -= tl.load(erase + token) * x * key
    tl.store(rest + n * D + column, r, mask=inside)


@triton.jit(do_not_specialize=["L"])
def _sweep_back(keys, erase, reads, rest, gradient, d_keys, d_query, d_erase, L, D: tl.constexpr, WIDE: tl.constexpr):
    n = tl.program_id(0)
    column = tl.arange(0, WIDE)
    inside = column < D
    r = tl.load(rest + n * D + column, mask=inside, other=0.0)
    p = tl.zeros([WIDE], dtype=tl.float32)
    for at in tl.range(0, L, num_stages=4):
        token = n * L + at
        key = tl.load(keys + token * D + column, mask=inside, other=0.0)
        rate, x = tl.load(erase + token), tl.load(reads + token)
        r += rate * x * key
        read = tl.sum(key * p)
        y = tl.load(gradient + token) - rate * read
        tl.store(d_keys + token * D + column, y * r - rate * x * p, mask=inside)
        tl.store(d_erase + token, -x * read)
        p += y * key
    tl.store(d_query + n * D + column, p, mask=inside)


@triton.jit
def _small_tanh(x):
    """Lambert's continued fraction to x²/9, for |x| ≤ 1: exact to a relative 6e-8."""
    s = x * x
    return x * (945 + s * (105 + s)) / (945 + s * (420 + 15 * s))


@triton.jit(do_not_specialize=["L", "S"])
def _tanh_forward(phi, values, out, between, after, L, S, D: tl.constexpr, WIDE: tl.constexpr):
    n, row = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDE)
    inside = column < D
    memory = tl.zeros([WIDE], dtype=tl.float32)
    passed = memory + 1.0  # Π (1 − W²) since the row was written
    written = False  # until then the row is zero
    for t in range(L):
        if tl.load(values + n * L + t) == row:  # only here can an argument of tanh be beyond ±1
            place = (n * L + t) * D + column
            tl.store(between + place, passed, mask=inside)
            memory += tl.load(phi + place, mask=inside, other=0.0)
            memory = tl.where(tl.abs(memory) < 1, _small_tanh(memory), 1 - 2 / (1 + tl.exp(2 * memory)))
            passed = 1 - memory * memory
            written = True
        elif written:
            memory = _small_tanh(memory)
            passed *= 1 - memory * memory
    tl.store(out + (n * S + row) * D + column, memory, mask=inside)
    tl.store(after + (n * S + row) * D + column, passed, mask=inside)


@triton.jit(do_not_specialize=["L", "S"])
def _tanh_backward(gradient, values, between, d_phi, L, S, D: tl.constexpr, WIDE: tl.constexpr):
    """From the last key to the first; `gradient` starts as that of what was written last into each row."""
    n = tl.program_id(0)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    for back in range(L):
        t = L - 1 - back
        value = tl.load(values + n * L + t)
        written = (column < D) & (value >= 0)
        row = gradient + (n * S + value) * D + column
        place = (n * L + t) * D + column
        d_key = tl.load(row, mask=written, other=0.0)
        tl.store(d_phi + place, d_key, mask=written)
        tl.store(row, d_key * tl.load(between + place, mask=written, other=0.0), mask=written)
        tl.debug_barrier()  # the next key may be in the same row
