"""φ(k)·φ(q) of DPFP, and its gradients, in one kernel each way: keys are read once, and φ is never formed.

With p = [relu k ∘ relu q, relu −k ∘ relu −q], numbered around a ring,

    a = Σ_i p_i (p_{i−1} + … + p_{i−ν}),    ∂a/∂p_i = p_{i−ν} + … + p_{i−1} + p_{i+1} + … + p_{i+ν},

and a k_c moves the p of its sign, by q_c, where the two agree in it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16  # of a program: more would not fit its registers


@triton.jit
def _product(keys, query, place, inside, D: tl.constexpr):
    """p at places of the ring, for rows of keys and a query."""
    sign = tl.where(place < D, 1.0, -1.0)
    column = tl.where(place < D, place, place - D)
    k = tl.load(keys + column, mask=inside, other=0.0) * sign
    q = tl.load(query + column, mask=inside, other=0.0) * sign
    return tl.maximum(k, 0.0) * tl.maximum(q, 0.0)


@triton.jit(do_not_specialize=["L"])
def _forward(keys, query, out, L, D: tl.constexpr, NU: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr):
    n = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, WIDE)[None, :]
    inside = (token[:, None] < L) & (place < 2 * D)
    key, asked = keys + (n * L + token[:, None]) * D, query + n * D + 0 * token[:, None]
    behind = tl.zeros([TOKENS, WIDE], dtype=tl.float32)
    for j in tl.static_range(1, NU + 1):
        behind += _product(key, asked, (place + (2 * D - j)) % (2 * D), inside, D)
    found = tl.sum(_product(key, asked, place, inside, D) * behind, axis=1)
    tl.store(out + n * L + token, found, mask=token < L)


@triton.jit(do_not_specialize=["L"])
def _backward(
    keys, query, slope, d_keys, d_query, L, D: tl.constexpr, NU: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr
):
    """`d_query` has a row for each program: they are added up elsewhere, in one order."""
    n, part = tl.program_id(0), tl.program_id(1)
    token = (part * TOKENS + tl.arange(0, TOKENS))[:, None]
    column = tl.arange(0, WIDE)[None, :]
    inside = (token < L) & (column < D)
    key, asked = keys + (n * L + token) * D, query + n * D + 0 * token
    k = tl.load(key + column, mask=inside, other=0.0)
    q = tl.load(asked + column, mask=inside, other=0.0)
    place = tl.where(k > 0, column, column + D)
    around = tl.zeros([TOKENS, WIDE], dtype=tl.float32)
    for j in tl.static_range(1, NU + 1):
        around += _product(key, asked, (place + (2 * D - j)) % (2 * D), inside, D)
        around += _product(key, asked, (place + j) % (2 * D), inside, D)
    share = around * tl.load(slope + n * L + token, mask=token < L, other=0.0)
    share = tl.where(((k > 0) & (q > 0)) | ((k < 0) & (q < 0)), share, 0.0)
    tl.store(d_keys + (n * L + token) * D + column, share * q, mask=inside)
    one = tl.arange(0, WIDE)
    tl.store(d_query + (n * tl.num_programs(1) + part) * D + one, tl.sum(share * k, axis=0), mask=one < D)


def products(keys: Tensor, query: Tensor, nu: int) -> Tensor:
    """φ(k)·φ(q) [n, L] for keys [n, L, d] and queries [n, 1, d], contiguous."""
    n, length, width = keys.shape
    out = keys.new_empty(n, length)
    wide = triton.next_power_of_2(2 * width)
    _forward[n, triton.cdiv(length, TOKENS)](keys, query, out, length, D=width, NU=nu, TOKENS=TOKENS, WIDE=wide)
    return out


def slopes(keys: Tensor, query: Tensor, slope: Tensor, nu: int) -> tuple[Tensor, Tensor]:
    """The gradients of keys and queries from that of the products."""
    n, length, width = keys.shape
    parts, wide = triton.cdiv(length, TOKENS), triton.next_power_of_2(width)
    d_keys, d_query = torch.empty_like(keys), keys.new_empty(n, parts, width)
    sizes = {"D": width, "NU": nu, "TOKENS": TOKENS, "WIDE": wide}
    _backward[n, parts](keys, query, slope, d_keys, d_query, length, **sizes)
    return d_keys, d_query.sum(1, keepdim=True)
