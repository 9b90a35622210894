"""`rebind.lab.reading.corrected` in one kernel each way: a program takes a query through the keys, one after another.

    x_j = k_j·r,   r ← r − ε_j x_j k_j                                          from the last key to the first
    y_j = s_j − ε_j k_j·p,   p ← p + y_j k_j                                    from the first to the last
    dk_j = y_j r_j − ε_j x_j p_j,   dε_j = −x_j k_j·p_j,   dq = p

Backward finds r_j again on the way, by r_j = r_{j−1} + ε_j x_j k_j. Keys are read once each way, and nothing else is as
large: with many stacks side by side, memory is what they wait for.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AHEAD = 4  # keys that are loaded while one is worked on


@triton.jit(do_not_specialize=["L"])
def _sweep(keys, query, erase, found, rest, L, D: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr):
    n = tl.program_id(0)
    column = tl.arange(0, WIDE)
    inside = column < D
    r = tl.load(query + n * D + column, mask=inside, other=0.0)
    for back in tl.range(0, L, num_stages=STAGES):
        token = n * L + L - 1 - back
        key = tl.load(keys + token * D + column, mask=inside, other=0.0)
        x = tl.sum(r * key)
        tl.store(found + token, x)
        r -= tl.load(erase + token) * x * key
    tl.store(rest + n * D + column, r, mask=inside)


@triton.jit(do_not_specialize=["L"])
def _unsweep(
    keys,
    erase,
    found,
    rest,
    slope,
    d_keys,
    d_query,
    d_erase,
    L,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0)
    column = tl.arange(0, WIDE)
    inside = column < D
    r = tl.load(rest + n * D + column, mask=inside, other=0.0)
    p = tl.zeros([WIDE], dtype=tl.float32)
    for at in tl.range(0, L, num_stages=STAGES):
        token = n * L + at
        key = tl.load(keys + token * D + column, mask=inside, other=0.0)
        rate, x = tl.load(erase + token), tl.load(found + token)
        r += rate * x * key
        seen = tl.sum(key * p)
        y = tl.load(slope + token) - rate * seen
        tl.store(d_keys + token * D + column, y * r - rate * x * p, mask=inside)
        tl.store(d_erase + token, -x * seen)
        p += y * key
    tl.store(d_query + n * D + column, p, mask=inside)


def sweep(keys: Tensor, query: Tensor, erase: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, L] of keys [n, L, D], queries [n, 1, D] and ε [n, L], all contiguous, and what is left of the queries."""
    found, rest = torch.empty_like(erase), torch.empty_like(query)
    _sweep[(len(keys),)](keys, query, erase, found, rest, keys.shape[1], **_constants(keys))
    return found, rest


def unsweep(keys: Tensor, erase: Tensor, found: Tensor, rest: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of keys, queries and ε from that of x."""
    d_keys, d_query, d_erase = torch.empty_like(keys), torch.empty_like(rest), torch.empty_like(erase)
    made = (d_keys, d_query, d_erase)
    _unsweep[(len(keys),)](keys, erase, found, rest, slope, *made, keys.shape[1], **_constants(keys))
    return made


def _constants(keys: Tensor) -> dict[str, int]:
    width = keys.shape[2]
    return {"D": width, "WIDE": triton.next_power_of_2(width), "STAGES": AHEAD, "num_warps": 1}
