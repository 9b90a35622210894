"""`rebind.lab.squash` in one kernel each way.

An entry of the memory depends on no other, so a program takes some rows through all keys in registers. What a key wrote
into a row reaches the end through every tanh that follows: its slope is the memory's times Π (1 − W²) over these. A row
is written a few times in a sequence, so this product is kept from write to write, one number a key and not one a state.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 2048  # of a program that writes
COLUMNS = 64  # of one that goes back


@triton.jit
def _tanh(x):
    """To the last digits also near 0, where 1 − 2/(1 + e^{2x}) would lose them."""
    s = x * x
    near = s * (-0.3333333333333333 + s * (0.13333333333333333 + s * (-0.05396825396825397 + s * 0.0218694885361552)))
    near = x + x * near  # tanh x = x − x³/3 + 2x⁵/15 − 17x⁷/315 + 62x⁹/2835 …
    return tl.where(tl.abs(x) < 0.3, near, 1 - 2 / (1 + tl.exp(2 * x)))


@triton.jit(do_not_specialize=["L", "S"])
def _write(
    phi,
    values,
    out,
    between,
    after,
    L,
    S,
    D: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    n = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    inside = (row < S) & (column < D)
    place = (n * S + row) * D + column
    memory = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    passed = memory + 1.0  # Π (1 − W²) since the row was written
    for t in range(L):
        here = row == tl.load(values + n * L + t)
        key = tl.load(phi + (n * L + t) * D + column, mask=column < D, other=0.0)
        if KEEP:
            tl.store(between + (n * L + t) * D + column + 0 * row, passed, mask=here & inside)
            passed = tl.where(here, 1.0, passed)
        memory = _tanh(memory + tl.where(here, key, 0.0))
        if KEEP:
            passed *= 1 - memory * memory
    tl.store(out + place, memory, mask=inside)
    if KEEP:
        tl.store(after + place, passed, mask=inside)


@triton.jit(do_not_specialize=["L", "S"])
def _unwrite(slope, values, between, d_phi, L, S, D: tl.constexpr, WIDE: tl.constexpr):
    """From the last key to the first; `slope` is at first that of what was written last into each row."""
    n = tl.program_id(0)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < D
    for back in range(L):
        t = L - 1 - back
        row = slope + (n * S + tl.load(values + n * L + t)) * D + column
        place = (n * L + t) * D + column
        d_key = tl.load(row, mask=inside, other=0.0)
        tl.store(d_phi + place, d_key, mask=inside)
        tl.store(row, d_key * tl.load(between + place, mask=inside, other=0.0), mask=inside)
        tl.debug_barrier()  # the row may be the next one's


def write(phi_k: Tensor, values: Tensor, size: int, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As `squash.write`, of contiguous tensors."""
    n, length, width = phi_k.shape
    out = phi_k.new_empty(n, size, width)
    between, after = (torch.empty_like(phi_k), torch.empty_like(out)) if keep else (phi_k, out)
    wide = triton.next_power_of_2(width)
    rows = max(1, min(ENTRIES // wide, triton.next_power_of_2(size)))
    grid = (n, triton.cdiv(size, rows))
    _write[grid](phi_k, values, out, between, after, length, size, D=width, KEEP=keep, ROWS=rows, WIDE=wide)
    return out, (between, after) if keep else ()


def unwrite(slope: Tensor, values: Tensor, between: Tensor, after: Tensor) -> Tensor:
    """As `squash.unwrite`, of contiguous tensors."""
    n, length, width = between.shape
    d_phi, last = torch.empty_like(between), slope * after
    wide = min(COLUMNS, triton.next_power_of_2(width))
    grid = (n, triton.cdiv(width, wide))
    _unwrite[grid](last, values, between, d_phi, length, slope.shape[1], D=width, WIDE=wide, num_warps=1)
    return d_phi
