"""x + r and its RMSNorm, and the gradients of both: each row is read and written once."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.triton.calls import aligned, call
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
def _gain(weight, gain, WEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return what every row is multiplied by [1, BLOCK]: its weight, or one number."""
    w = tl.full([1, BLOCK], 1.0, tl.float32) * gain
    if WEIGHT:
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
    READ: tl.constexpr,
    WEIGHT: tl.constexpr,
    GROUPED: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per block of rows."""
    row, at, of_x, inside = _places(tl.program_id(0), rows, together, steps, GROUPED, STEP, WIDTH, BLOCK, ROWS)
    s = tl.load(x + of_x, mask=inside, other=0.0)
    if READ:
        s = (s.to(tl.float32) + tl.load(read + at, mask=inside, other=0.0).to(tl.float32)).to(s.dtype)
        tl.store(total + at, s, mask=inside)
    wide = s.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    tl.store(scales + row, scale, mask=row < rows)
    out = wide * scale[:, None] * _gain(weight, gain, WEIGHT, WIDTH, BLOCK)
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "together", "steps"])
def _backward(
    d_total,
    d_normed,
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
    TOTAL: tl.constexpr,
    READ: tl.constexpr,
    WEIGHT: tl.constexpr,
    GROUPED: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Every program processes blocks of rows in turn with the others, and stores its part of the weight's gradient."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    w = _gain(weight, gain, WEIGHT, WIDTH, BLOCK)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), programs):
        row, at, of_x, inside = _places(block, rows, together, steps, GROUPED, STEP, WIDTH, BLOCK, ROWS)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(total + of_x, mask=inside, other=0.0).to(tl.float32) * scale
        slope = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            d_weight += slope * unit
        up = slope * w
        down = (up - unit * (tl.sum(up * unit, 1) / WIDTH)[:, None]) * scale
        if TOTAL:
            down += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, down.to(d_x.dtype.element_ty), mask=inside)
        if READ:
            tl.store(d_read + at, down.to(d_read.dtype.element_ty), mask=inside)
    if WEIGHT:
        column = tl.arange(0, BLOCK)
        tl.store(d_weights + program.to(tl.int64) * WIDTH + column, tl.sum(d_weight, 0), mask=column < WIDTH)


def forward(
    x: Tensor, read: Tensor | None, weight: Tensor | float, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + read or x, its norm in `dtype`, and what each row was multiplied by."""
    x = x.contiguous() if read is not None else _in_groups(x)
    more = x if read is None else read.contiguous()
    total = x if read is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    learned, gain = _split_weight(weight, normed)
    tensors = x, more, learned, total, normed, scales
    rows, at_once = rows_of(x)
    _launch(
        _forward,
        -(-rows // at_once),
        x,
        tensors,
        (float(eps), gain),
        READ=read is not None,
        WEIGHT=isinstance(weight, Tensor),
    )
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
    back = d_normed if d_total is None else d_total.contiguous()
    d_x = torch.empty_like(total, memory_format=torch.contiguous_format)
    own_dtype = read is not None and read != total.dtype
    d_read = torch.empty_like(d_x, dtype=read) if own_dtype else d_x
    learned, gain = _split_weight(weight, d_x)
    rows, at_once = rows_of(total)
    programs, d_weights = -(-rows // at_once), d_x
    if isinstance(weight, Tensor):
        programs = min(programs, PROGRAMS * multiprocessors(total.device))
        d_weights = total.new_empty(programs, total.shape[-1], dtype=torch.float32)
    tensors = back, d_normed, total, scales, learned, d_x, d_read, d_weights
    _launch(
        _backward,
        programs,
        total,
        tensors,
        (gain,),
        TOTAL=d_total is not None,
        READ=own_dtype,
        WEIGHT=isinstance(weight, Tensor),
    )
    d_weight = d_weights.sum(0).to(weight.dtype) if isinstance(weight, Tensor) else None
    return d_x, None if read is None else d_read, d_weight


def _launch(
    kernel: Any,
    programs: int,
    x: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    **constants: int,
) -> None:
    width, (rows, at_once) = x.shape[-1], rows_of(x)
    block = triton.next_power_of_2(width)
    together, stride = (1, 0) if x.is_contiguous() else (x.shape[-2], x.stride(-3))
    step = math.gcd(stride, 16)
    with torch.cuda.device_of(x):
        call(
            kernel,
            (programs,),
            (x.device, *(tensor.dtype for tensor in tensors), aligned(*tensors)),
            (*tensors, rows, together, stride // step, *numbers),
            warps=min(16, max(1, block * at_once // 256)),
            **constants,
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


def _split_weight(weight: Tensor | float, unused: Tensor) -> tuple[Tensor, float]:
    """Return a weight as a tensor and a number, of which a kernel uses one."""
    return (weight.contiguous(), 1.0) if isinstance(weight, Tensor) else (unused, float(weight))
