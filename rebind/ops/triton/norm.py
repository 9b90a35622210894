"""x + r and its RMSNorm, and the gradients of both: each row is read and written once."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.triton.calls import launch
from rebind.ops.triton.tiles import multiprocessors

PROGRAMS = 8  # per multiprocessor, which go through the rows and add up the weight's gradient
ELEMENTS = 1024  # that a program processes at once, if rows are narrow


@triton.jit
def _places(
    block,
    rows,
    together,
    steps,
    GROUPED: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return a block's rows [ROWS], the places of their elements [ROWS, BLOCK], contiguous and in x, and a mask.

    If x is GROUPED, so many rows lie `together`, and groups are `steps` times STEP apart.
    """
    row = tl.full([], ROWS, tl.int64) * block + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    start = row * WIDTH
    if GROUPED:
        group = row.to(tl.int32) // together
        start = group.to(tl.int64) * steps * STEP + (row - group * together) * WIDTH
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    return row, row[:, None] * WIDTH + column[None, :], start[:, None] + column[None, :], inside


@triton.jit
def _gain(weight, gain, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return what every row is multiplied by [1, BLOCK]: its weight, or one number."""
    w = tl.full([1, BLOCK], 1.0, tl.float32) * gain
    if weight is not None:
        column = tl.arange(0, BLOCK)
        w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    return w


@triton.jit(do_not_specialize=["rows", "together", "steps"])
def _forward(
    x,
    read,
    weight,
    total,
    normed,
    scales,
    rows,
    together,
    steps,
    eps,
    gain,
    GROUPED: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per block of rows."""
    row, at, of_x, inside = _places(tl.program_id(0), rows, together, steps, GROUPED, STEP, WIDTH, BLOCK, ROWS)
    s = tl.load(x + of_x, mask=inside, other=0.0)
    if read is not None:
        s = (s.to(tl.float32) + tl.load(read + at, mask=inside, other=0.0).to(tl.float32)).to(s.dtype)
        tl.store(total + at, s, mask=inside)
    wide = s.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    tl.store(scales + row, scale, mask=row < rows)
    out = wide * scale[:, None] * _gain(weight, gain, WIDTH, BLOCK)
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "together", "steps"])
def _backward(
    d_normed,
    d_total,
    total,
    scales,
    weight,
    d_x,
    d_read,
    d_weights,
    rows,
    together,
    steps,
    gain,
    GROUPED: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Every program processes blocks of rows in turn with the others, and stores its part of the weight's gradient."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    w = _gain(weight, gain, WIDTH, BLOCK)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), programs):
        row, at, of_x, inside = _places(block, rows, together, steps, GROUPED, STEP, WIDTH, BLOCK, ROWS)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(total + of_x, mask=inside, other=0.0).to(tl.float32) * scale
        slope = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            d_weight += slope * unit
        up = slope * w
        down = (up - unit * (tl.sum(up * unit, 1) / WIDTH)[:, None]) * scale
        if d_total is not None:
            down += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, down.to(d_x.dtype.element_ty), mask=inside)
        if d_read is not None:
            tl.store(d_read + at, down.to(d_read.dtype.element_ty), mask=inside)
    if weight is not None:
        column = tl.arange(0, BLOCK)
        tl.store(d_weights + program.to(tl.int64) * WIDTH + column, tl.sum(d_weight, 0), mask=column < WIDTH)


def forward(
    x: Tensor, read: Tensor | None, weight: Tensor | float, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + read or x, its norm in `dtype`, and what each row was multiplied by."""
    if read is None:
        x = total = _in_groups(x)
    else:
        x, read = x.contiguous(), read.contiguous()
        total = torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    learned, gain = _split_weight(weight)
    rows, at_once = rows_of(x)
    _launch(_forward, -(-rows // at_once), x, (x, read, learned, total, normed, scales), (float(eps), gain))
    return total, normed, scales


def backward(
    d_total: Tensor | None,
    d_normed: Tensor,
    total: Tensor,
    scales: Tensor,
    weight: Tensor | float,
    read: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, of what was added to it (of dtype `read`), and of a weight that is a tensor."""
    total, d_normed = _in_groups(total), d_normed.contiguous()
    d_total = None if d_total is None else d_total.contiguous()
    d_x = torch.empty_like(total, memory_format=torch.contiguous_format)
    d_read = None if read in (None, total.dtype) else torch.empty_like(d_x, dtype=read)  # else it is d_x
    learned, gain = _split_weight(weight)
    rows, at_once = rows_of(total)
    programs, d_weights = -(-rows // at_once), None
    if learned is not None:
        programs = min(programs, PROGRAMS * multiprocessors(total.device))
        d_weights = total.new_empty(programs, total.shape[-1], dtype=torch.float32)
    _launch(_backward, programs, total, (d_normed, d_total, total, scales, learned, d_x, d_read, d_weights), (gain,))
    d_weight = None if learned is None or d_weights is None else d_weights.sum(0).to(learned.dtype)
    return d_x, d_x if read == total.dtype else d_read, d_weight


def _launch(
    kernel: Any, programs: int, x: Tensor, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]
) -> None:
    width, (rows, at_once) = x.shape[-1], rows_of(x)
    block = triton.next_power_of_2(width)
    together, stride = (1, 0) if x.is_contiguous() else (x.shape[-2], x.stride(-3))
    step = math.gcd(stride, 16)
    launch(
        kernel,
        (programs,),
        tensors,
        (rows, together, stride // step, *numbers),
        warps=min(16, max(1, block * at_once // 256)),
        GROUPED=not x.is_contiguous(),
        STEP=step,
        WIDTH=width,
        BLOCK=block,
        ROWS=at_once,
    )


def rows_of(x: Tensor) -> tuple[int, int]:
    """Return how many rows there are, and how many a program processes at once."""
    width = x.shape[-1]
    return x.numel() // width, max(1, ELEMENTS // triton.next_power_of_2(width))


def is_grouped(x: Tensor) -> bool:
    """Return whether rows [..., rows, width] are contiguous in evenly spaced groups, as heads of a wider token are."""
    if x.is_contiguous() or x.ndim < 3:
        return False
    together = x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] and x.stride(-3) < 2**31
    return together and all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.ndim - 3))


def _in_groups(x: Tensor) -> Tensor:
    return x if is_grouped(x) else x.contiguous()


def _split_weight(weight: Tensor | float) -> tuple[Tensor | None, float]:
    """Return a weight as a tensor or None, and as a number that is used if it is None."""
    return (weight.contiguous(), 1.0) if isinstance(weight, Tensor) else (None, float(weight))
