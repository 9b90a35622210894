"""silu(g) · u, and its gradients with the product itself, element by element, in one kernel each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.triton.calls import launch

BLOCK = 1024  # elements per program


@triton.jit
def _places(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's row, its columns, and which of them exist."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    return (program // blocks).to(tl.int64), column, column < WIDTH


@triton.jit
def _forward(gate, up, out, GATE: tl.constexpr, UP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """GATE and UP are the strides of their rows."""
    row, column, inside = _places(WIDTH, BLOCK)
    g = tl.load(gate + row * GATE + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * UP + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    slope,
    gate,
    up,
    d_gate,
    d_up,
    out,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = _places(WIDTH, BLOCK)
    at = row * WIDTH + column
    s = tl.load(slope + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * GATE + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * UP + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    passed = g * share
    kind = out.dtype.element_ty
    tl.store(d_gate + at, (s * u * share * (1 + g * (1 - share))).to(kind), mask=inside)
    tl.store(d_up + at, (s * passed).to(kind), mask=inside)
    tl.store(out + at, (passed * u).to(kind), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up [..., width], contiguous."""
    gate, up = _in_rows(gate), _in_rows(up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch(_forward, gate, up, (gate, up, out))
    return out


def backward(slope: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up from that of their product, and the product."""
    slope, gate, up = slope.contiguous(), _in_rows(gate), _in_rows(up)
    d_gate, d_up, product = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(3))
    _launch(_backward, gate, up, (slope, gate, up, d_gate, d_up, product))
    return d_gate, d_up, product


def _launch(kernel: Any, gate: Tensor, up: Tensor, tensors: tuple[Tensor, ...]) -> None:
    width = gate.shape[-1]
    grid = (gate.numel() // width * -(-width // BLOCK),)
    launch(kernel, grid, tensors, warps=4, GATE=_row_stride(gate), UP=_row_stride(up), WIDTH=width, BLOCK=BLOCK)


def _in_rows(x: Tensor) -> Tensor:
    """Return x with its rows evenly spaced, as a part of a wider tensor has them; a copy if they are not."""
    last = x.stride(-1) == 1 or x.shape[-1] == 1
    even = all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.ndim - 2))
    return x if last and even else x.contiguous()


def _row_stride(x: Tensor) -> int:
    return x.stride(-2) if x.ndim > 1 else x.shape[-1]
