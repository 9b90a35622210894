"""`rebind.lab.squash` in one kernel each way.

An entry of the memory depends on no other, so a program takes some rows through all keys in registers. Forward it
leaves every state behind where a gradient is wanted; backward it reads them once, from the last to the first.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 2048  # of a program


@triton.jit
def _tanh(x):
    """To the last digits also near 0, where 1 − 2/(1 + e^{2x}) would lose them."""
    s = x * x
    near = s * (-0.3333333333333333 + s * (0.13333333333333333 + s * (-0.05396825396825397 + s * 0.0218694885361552)))
    near = x + x * near  # tanh x = x − x³/3 + 2x⁵/15 − 17x⁷/315 + 62x⁹/2835 …
    return tl.where(tl.abs(x) < 0.3, near, 1 - 2 / (1 + tl.exp(2 * x)))


@triton.jit(do_not_specialize=["stride", "L", "S"])
def _write(
    phi,
    values,
    out,
    states,
    stride,
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
    state = states + place
    for t in range(L):
        value = tl.load(values + n * L + t)
        key = tl.load(phi + (n * L + t) * D + column, mask=column < D, other=0.0)
        memory = _tanh(memory + tl.where(row == value, key, 0.0))
        if KEEP:
            tl.store(state, memory, mask=inside)
            state += stride
    tl.store(out + place, memory, mask=inside)


@triton.jit(do_not_specialize=["stride", "L", "S"])
def _unwrite(slope, values, d_phi, last, stride, L, S, D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    n = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDE)
    inside = (row < S) & (column[None, :] < D)
    place = (n * S + row) * D + column[None, :]
    d_memory = tl.load(slope + place, mask=inside, other=0.0)
    state = last + place
    for back in range(L):
        t = L - 1 - back
        memory = tl.load(state, mask=inside, other=0.0)
        d_memory = d_memory * (1 - memory * memory)
        value = tl.load(values + n * L + t)
        d_key = tl.sum(tl.where(row == value, d_memory, 0.0), axis=0)
        here = (value >= first) & (value < first + ROWS)  # one program has the row that was written
        tl.store(d_phi + (n * L + t) * D + column, d_key, mask=(column < D) & here)
        state -= stride


def write(phi_k: Tensor, values: Tensor, size: int, keep: bool) -> tuple[Tensor, Tensor]:
    """As `squash.write`, of contiguous tensors."""
    n, length, width = phi_k.shape
    out = phi_k.new_empty(n, size, width)
    states = phi_k.new_empty(length if keep else 0, n, size, width)
    grid, constants = _shape(n, size, width)
    _write[grid](phi_k, values, out, states, out.numel(), length, size, D=width, KEEP=keep, **constants)
    return out, states


def unwrite(slope: Tensor, values: Tensor, states: Tensor) -> Tensor:
    """As `squash.unwrite`, of contiguous tensors."""
    length, n, size, width = states.shape
    d_phi = slope.new_empty(n, length, width)
    grid, constants = _shape(n, size, width)
    _unwrite[grid](slope, values, d_phi, states[-1], slope.numel(), length, size, D=width, **constants)
    return d_phi


def _shape(n: int, size: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    wide = triton.next_power_of_2(width)
    rows = max(1, min(ENTRIES // wide, triton.next_power_of_2(size)))
    return (n, triton.cdiv(size, rows)), {"ROWS": rows, "WIDE": wide}
