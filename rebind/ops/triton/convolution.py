"""The short convolution, one kernel each way.

    pre_t = Σ_s w_s x_{t − (S − 1) + s}          out = silu(pre)
    d_pre = d_out silu'(pre)
    d_x_t = Σ_s w_s d_pre_{t + (S − 1) − s}      d_w_s = Σ_t d_pre_t x_{t − (S − 1) + s}

S is the size; the S − 1 tokens before the first are the window's. A program walks along a run of tokens with a block of
channels and holds what the next token still needs, the last S − 1 rows, in registers: every row is read once. The
backward walk goes the same way, S − 1 tokens past its run: d_x_t is complete after token t + S − 1. It computes pre
again rather than read it, and stores one sum of the weights' gradient per run; these are then added up in order, so
that the result is always the same.

The output may be in parts, each a tensor of its own (q and k, then v), which saves copies. A kernel then runs once for
every part, on WIDTH channels from FIRST on.

Tuples grow while loops over constants are unrolled; the compiler supports `+` for that, and no unpacking.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.triton.calls import launch

AHEAD = 8  # rows that are loaded ahead; also the largest size
CHANNELS = 128  # per program, which is one warp: 4 per thread
LONGEST, SHORTEST = 128, 16  # tokens per run
PROGRAMS = 4096  # enough to fill a large device; runs are shortened to have as many


@triton.jit
def _before(x, window, row, first, T, channel, inside, C: tl.constexpr, S: tl.constexpr):
    """Load the S − 1 rows before token `first`, as a tuple of [channels] in float32."""
    last_rows = ()
    for s in tl.static_range(S - 1):
        token = first - (S - 1) + s
        early = tl.load(window + (row * (S - 1) + first + s) * C + channel, mask=inside & (token < 0), other=0.0)
        late = tl.load(x + (row * T + token) * C + channel, mask=inside & (token >= 0), other=0.0)
        last_rows = last_rows + (early.to(tl.float32) + late.to(tl.float32),)
    return last_rows


@triton.jit
def _taps(weight, channel, inside, S: tl.constexpr):
    """Load the weights of the S tokens, the oldest first, as a tuple of [channels] in float32."""
    taps = ()
    for s in tl.static_range(S):
        taps = taps + (tl.load(weight + channel * S + s, mask=inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _place(T, run, WIDTH: tl.constexpr, BC: tl.constexpr):
    """Return this program's row of the batch, run of tokens, and channels of the part."""
    BLOCKS: tl.constexpr = (WIDTH + BC - 1) // BC
    program = tl.program_id(0)
    place = program // BLOCKS
    parts = tl.cdiv(T, run)
    channel = program % BLOCKS * BC + tl.arange(0, BC)
    return (place // parts).to(tl.int64), place % parts * run, place.to(tl.int64), channel


@triton.jit(do_not_specialize=["T", "run"])
def _forward(
    x,
    weight,
    window,
    out,
    T,
    run,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    BC: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row, start, _, column = _place(T, run, WIDTH, BC)
    channel, inside = FIRST + column, column < WIDTH
    stop = tl.minimum(start + run, T)
    weights = _taps(weight, channel, inside, S)
    last_rows = _before(x, window, row, start, T, channel, inside, C, S)
    for first in range(start, stop, AHEAD):
        rows = ()
        for j in tl.static_range(AHEAD):  # all loads before the first store
            at = (row * T + first + j) * C + channel
            rows = rows + (tl.load(x + at, mask=inside & (first + j < stop), other=0.0),)
        for j in tl.static_range(AHEAD):
            window_rows = last_rows + (rows[j].to(tl.float32),)
            pre = weights[0] * window_rows[0]
            for s in tl.static_range(1, S):
                pre += weights[s] * window_rows[s]
            at = (row * T + first + j) * WIDTH + column
            result = (pre * tl.sigmoid(pre)).to(out.dtype.element_ty)
            tl.store(out + at, result, mask=inside & (first + j < stop))
            last_rows = window_rows[1:]


@triton.jit(do_not_specialize=["T", "run"])
def _backward(
    d_out,
    x,
    weight,
    window,
    dx,
    d_weights,
    d_window,
    T,
    run,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    BC: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """`d_weights` is [runs, S, C], `d_window` [B, S − 1, C]."""
    row, start, place, column = _place(T, run, WIDTH, BC)
    channel, inside = FIRST + column, column < WIDTH
    stop = tl.minimum(start + run, T)
    last = tl.minimum(stop + S - 1, T)  # tokens past the run, whose gradients reach back into it
    weights, sums, slopes = _taps(weight, channel, inside, S), (), ()
    for _ in tl.static_range(S):
        sums = sums + (tl.zeros([BC], tl.float32),)
    for _ in tl.static_range(S - 1):
        slopes = slopes + (tl.zeros([BC], tl.float32),)
    last_rows = _before(x, window, row, start, T, channel, inside, C, S)
    for first in range(start, stop + S - 1, AHEAD):
        rows, d_out_rows = (), ()
        for j in tl.static_range(AHEAD):  # all loads before the first store
            token = row * T + first + j
            there = inside & (first + j < last)
            rows = rows + (tl.load(x + token * C + channel, mask=there, other=0.0),)
            d_out_rows = d_out_rows + (tl.load(d_out + token * WIDTH + column, mask=there, other=0.0),)
        for j in tl.static_range(AHEAD):
            window_rows = last_rows + (rows[j].to(tl.float32),)
            pre = weights[0] * window_rows[0]
            for s in tl.static_range(1, S):
                pre += weights[s] * window_rows[s]
            share = tl.sigmoid(pre)
            slope = d_out_rows[j].to(tl.float32) * share * (1 + pre * (1 - share))
            slopes = slopes + (slope,)  # those of the last S tokens
            d_row = weights[0] * slope
            for s in tl.static_range(1, S):
                d_row += weights[s] * slopes[S - 1 - s]
            token = first + j - (S - 1)
            ours = inside & (token >= start) & (token < stop)
            tl.store(dx + (row * T + token) * C + channel, d_row.to(dx.dtype.element_ty), mask=ours)
            if j < S - 1:  # noqa: SIM102 (the compiler's branch, and in it the program's)
                if first == 0:
                    at = (row * (S - 1) + j) * C + channel
                    tl.store(d_window + at, d_row.to(d_window.dtype.element_ty), mask=inside)
            counted = tl.where(first + j < stop, slope, 0.0)
            more = ()
            for s in tl.static_range(S):
                more = more + (sums[s] + counted * window_rows[s],)
            sums = more
            slopes = slopes[1:]
            last_rows = window_rows[1:]
    for s in tl.static_range(S):
        tl.store(d_weights + (place * S + s) * C + channel, sums[s], mask=inside)


def forward(x: Tensor, weight: Tensor, window: Tensor, parts: Sequence[int] = ()) -> tuple[Tensor, ...]:
    """Return the output [B, T, C] in x's dtype, as one tensor or in parts of so many channels."""
    tensors = [tensor.contiguous() for tensor in (x, weight, window)]
    outputs = [x.new_empty(*x.shape[:2], width) for width in parts or x.shape[2:]]
    for first, out in _with_first_channel(outputs):
        _launch(_forward, _run(x), x, weight, first, out.shape[2], (*tensors, out))
    return tuple(outputs)


def backward(d_outs: Sequence[Tensor], x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and window, each in its own dtype, from those of the parts."""
    x, weight, window = (tensor.contiguous() for tensor in (x, weight, window))
    run = _run(x)
    dx, d_window = torch.empty_like(x), torch.empty_like(window)
    runs = x.shape[0] * -(-x.shape[1] // run)
    d_weights = x.new_empty(runs, *reversed(weight.shape), dtype=torch.float32)
    for first, d_out in _with_first_channel([d_out.contiguous() for d_out in d_outs]):
        tensors = d_out, x, weight, window, dx, d_weights, d_window
        _launch(_backward, run, x, weight, first, d_out.shape[2], tensors)
    return dx, torch.empty_like(weight).copy_(d_weights.sum(0).mT), d_window


def _with_first_channel(parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Return each part with its first channel."""
    firsts = accumulate((part.shape[2] for part in parts), initial=0)
    return zip(firsts, parts, strict=False)


def _run(x: Tensor) -> int:
    """Return the tokens per run: many, since rows at its ends are read twice, unless that leaves the device idle."""
    rows, length, channels = x.shape
    share = rows * length * -(-channels // CHANNELS) // PROGRAMS
    return min(max(triton.next_power_of_2(share + 1) // 2, SHORTEST), LONGEST)


def _launch(
    kernel: Any, run: int, x: Tensor, weight: Tensor, first: int, width: int, tensors: tuple[Tensor, ...]
) -> None:
    """Run a kernel on `width` channels from `first` on."""
    rows, length, channels = x.shape
    wide = min(CHANNELS, triton.next_power_of_2(width))
    grid = (rows * -(-length // run) * -(-width // wide),)
    sizes = {"C": channels, "FIRST": first, "WIDTH": width, "S": weight.shape[1], "BC": wide, "AHEAD": AHEAD}
    launch(kernel, grid, tensors, (length, run), warps=1, **sizes)
