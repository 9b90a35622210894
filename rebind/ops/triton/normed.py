"""x + r with its RMSNorm, and the gradients of both: each row is read and written once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.triton.calls import aligned, call
from rebind.ops.triton.tiles import multiprocessors

AT_ONCE = 8  # programs a multiprocessor that go through the rows and add up the weight's gradient


@triton.jit
def _forward(
    x,
    read,
    weight,
    total,
    normed,
    scales,
    eps,
    READ: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * WIDTH + column
    s = tl.load(x + at, mask=inside, other=0.0)
    if READ:
        s = (s.to(tl.float32) + tl.load(read + at, mask=inside, other=0.0).to(tl.float32)).to(s.dtype)
        tl.store(total + at, s, mask=inside)
    wide = s.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(scales + row, scale)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (wide * scale * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
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
    TOTAL: tl.constexpr,
    READ: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program takes each so manieth row, and leaves its part of the weight's gradient."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    width = tl.full([], WIDTH, tl.int64)
    for row in range(program, rows, programs):
        at = row * width + column
        scale = tl.load(scales + row)
        unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * scale
        slope = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32)
        d_weight += slope * unit
        up = slope * w
        down = (up - unit * (tl.sum(up * unit, 0) / WIDTH)) * scale
        if TOTAL:
            down += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, down.to(d_x.dtype.element_ty), mask=inside)
        if READ:
            tl.store(d_read + at, down.to(d_read.dtype.element_ty), mask=inside)
    tl.store(d_weights + program * width + column, d_weight, mask=inside)


def forward(
    x: Tensor, read: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + read or x, its norm in `dtype`, and what each row was multiplied by."""
    width = x.shape[-1]
    x = x.contiguous()
    more = x if read is None else read.contiguous()
    total = x if read is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    tensors = x, more, weight.contiguous(), total, normed, scales
    _launch(_forward, x.numel() // width, width, tensors, (eps,), READ=read is not None)
    return total, normed, scales


def backward(
    d_total: Tensor | None,
    d_normed: Tensor,
    total: Tensor,
    scales: Tensor,
    weight: Tensor,
    read: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of x, of what was added to it, of dtype `read`, and of the weight."""
    width = total.shape[-1]
    rows = total.numel() // width
    d_normed = d_normed.contiguous()
    back = d_normed if d_total is None else d_total.contiguous()
    d_x = torch.empty_like(total, memory_format=torch.contiguous_format)
    apart = read is not None and read != total.dtype
    d_read = torch.empty_like(d_x, dtype=read) if apart else d_x
    programs = min(rows, AT_ONCE * multiprocessors(total.device))
    d_weights = total.new_empty(programs, width, dtype=torch.float32)
    tensors = back, d_normed, total.contiguous(), scales, weight.contiguous(), d_x, d_read, d_weights
    _launch(_backward, programs, width, tensors, (rows,), TOTAL=d_total is not None, READ=apart)
    return d_x, None if read is None else d_read, d_weights.sum(0).to(weight.dtype)


def _launch(
    kernel: Any, programs: int, width: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], **constants: bool
) -> None:
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(tensors[0]):
        call(
            kernel,
            (programs,),
            (tensors[0].device, *(tensor.dtype for tensor in tensors), aligned(*tensors)),
            (*tensors, *numbers),
            warps=min(16, max(1, block // 256)),
            **constants,
            WIDTH=width,
            BLOCK=block,
        )
