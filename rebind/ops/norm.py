"""RMSNorm, and x + r followed by it, as every layer of a model begins: one pass over memory each way on a GPU.

The sum goes on to the next layer and its norm into this one, so x has two gradients. Plain torch passes over x to add,
to normalize, to convert the norm for a product, and over all of that again backward; and it is slow with rows as
narrow as a head. On a CPU a norm in float32 is a function with its own backward pass, several times as fast as that of
torch. Gradients of gradients, and whatever follows single operations, get the formula itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.memory.precision import working_dtype
from rebind.ops.gradients import gradients_of
from rebind.ops.kernels import TOLERANCE, available, compare_results, draw, is_followed, load_kernels, usable
from rebind.precision import without_autocast

WIDEST, MOST_ROWS = 2**14, 2**30  # the largest width and number of rows that the kernels take
BLOCK = 2**16  # numbers that a CPU norms and gates at a time: a quarter of a megabyte of float32


def rms_norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    """Return x / rms(x) · weight over the last dimension, in x's dtype, computed in float32 or better."""
    return add_norm(x, None, weight, eps)[1]


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · weight · silu(gate) for rows x and gate [n, width] of one dtype.

    In float32 on a CPU it has its own backward pass; elsewhere it is the formula.
    """
    same = x.shape == gate.shape and x.dtype == gate.dtype and x.ndim == 2
    if not same or x.device.type != "cpu" or not _is_full(x, weight) or is_followed(x):
        return _gated_norm_in_torch(x, gate, weight, eps)
    out: Tensor = _GatedNormOnCpu.apply(x, gate, weight, eps)  # type: ignore[no-untyped-call]
    return out


def add_norm(
    x: Tensor, read: Tensor | None, weight: Tensor | float, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + read, and (x + read) / rms(x + read) · weight over the last dimension.

    The norm has `dtype`, by default that of the sum. Without `read` the sum is x. The mean of squares is computed in
    float32 or better. A weight that is a number is not learned.
    """
    of_sum = x.dtype if read is None else torch.promote_types(x.dtype, read.dtype)
    dtype = of_sum if dtype is None else dtype
    if is_followed() or of_sum != x.dtype or not takes_kernels(x, read, weight, dtype):
        if x.device.type == "cpu" and of_sum == dtype and _is_full(x, weight) and not is_followed(x):
            total = x if read is None else x + read
            normed: Tensor = _NormOnCpu.apply(total, weight, eps)  # type: ignore[no-untyped-call]
            return total, normed
        return _add_norm_in_torch(x, read, weight, eps, dtype)
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in (x, read, weight)):
        total, normed = _AddNorm.apply(x, read, weight, eps, dtype)  # type: ignore[no-untyped-call]
        return total, normed
    total, normed, _ = load_kernels().norm.forward(x, read, weight, eps, dtype)
    return total, normed


def takes_kernels(x: Tensor, read: Tensor | None, weight: Tensor | float, dtype: torch.dtype) -> bool:
    """Return whether kernels run for these tensors."""
    if not available(x):
        return False
    width = x.shape[-1]
    fits = (read is None or read.shape == x.shape) and (not isinstance(weight, Tensor) or weight.shape == x.shape[-1:])
    dtypes = *(one.dtype for one in (read, weight) if isinstance(one, Tensor)), dtype
    if not (fits and width <= WIDEST and x.numel() // width <= MOST_ROWS and all(one in TOLERANCE for one in dtypes)):
        return False
    in_groups = read is None and load_kernels().norm.is_grouped(x)
    kind = ("norm", width, read is None, isinstance(weight, Tensor), in_groups, *dtypes)
    return usable(x, kind, lambda: compare_kernels(x, read, weight, dtype, in_groups))


@torch.no_grad()
def compare_kernels(
    x: Tensor, read: Tensor | None, weight: Tensor | float, dtype: torch.dtype, in_groups: bool
) -> str | None:
    """Compare the kernels for such tensors with plain torch; return what is wrong with them, or None.

    `in_groups`: rows in evenly spaced groups with gaps between them.
    """
    width = x.shape[-1]
    count = 2 * max(1, 1024 // width) + 3  # more rows than programs take at once

    def rows(seed: int, dtype: torch.dtype, wider: int = 2) -> Tensor:
        return draw((count, wider * width), x, seed).to(dtype)[:, -2 * width :].unflatten(-1, (2, width))

    first, back, slope = rows(0, x.dtype, wider=3 if in_groups else 2), rows(1, x.dtype), rows(3, dtype)
    second, of_second = (None, None) if read is None else (rows(2, read.dtype), read.dtype)
    factors = draw((width,), x, 4).to(weight.dtype) if isinstance(weight, Tensor) else weight
    total = first if second is None else first + second

    def kernels() -> list[Tensor | None]:
        summed, normed, scale = load_kernels().norm.forward(first, second, factors, 1e-6, dtype)
        both, one = (
            load_kernels().norm.backward(d_total, slope, total, scale, factors, of_second) for d_total in (back, None)
        )  # a norm alone has one gradient
        return [summed, normed, *both, *one]

    def truth() -> list[Tensor | None]:
        wide, wide_factors = total.double(), factors.double() if isinstance(factors, Tensor) else factors
        d_x, d_weight = _gradients_in_torch(back.double(), slope.double(), wide, wide_factors, 1e-6)
        alone = d_x - back.double()
        results = _add_norm_in_torch(wide, None, wide_factors, 1e-6, wide.dtype)
        return [*results, d_x, d_x, d_weight, alone, alone, d_weight]

    dtypes = {one.dtype for one in (x, read, weight) if isinstance(one, Tensor)} | {dtype}
    roughest = max(dtypes, key=lambda one: TOLERANCE[one])
    name = f"The kernels of norms in {', '.join(sorted(map(str, dtypes)))}"
    return compare_results(name, kernels, truth, x.new_empty(0, dtype=roughest))


def _add_norm_in_torch(
    x: Tensor, read: Tensor | None, weight: Tensor | float, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Use torch's RMSNorm, which needs a weight of x's dtype. Autocast would convert x to float32 and back."""
    total = x if read is None else x + read
    width = total.shape[-1:]
    with without_autocast(total):
        factors = weight.to(total.dtype) if isinstance(weight, Tensor) else total.new_full(width, weight)
        return total, functional.rms_norm(total, width, factors, eps).to(dtype)


def _gradients_in_torch(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, weight: Tensor | float, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of a weight that is a tensor, in operations that have gradients themselves."""
    wide = working_dtype(*(one for one in (total, weight) if isinstance(one, Tensor)))
    x, slope = total.to(wide), d_normed.to(wide)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit, up = x * scale, slope * (weight.to(wide) if isinstance(weight, Tensor) else weight)
    d_x = (up - unit * (up * unit).mean(-1, keepdim=True)) * scale
    d_x = (d_x if d_total is None else d_x + d_total).to(total.dtype)
    if not isinstance(weight, Tensor):
        return d_x, None
    return d_x, (slope * unit).reshape(-1, len(weight)).sum(0).to(weight.dtype)


def _is_full(x: Tensor, weight: Tensor | float) -> bool:
    """Return whether all of it is in float32 or all in float64."""
    dtypes = {x.dtype, weight.dtype if isinstance(weight, Tensor) else x.dtype}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and x.numel() > 0


class _NormOnCpu(torch.autograd.Function):
    """x · r · weight with r = 1 / √(mean(x²) + ε)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        learned, ctx.gain = (weight, None) if isinstance(weight, Tensor) else (None, weight)
        ctx.save_for_backward(x, learned, scale)
        ctx.eps = eps
        return (x * scale).mul_(learned) if learned is not None else x * (scale * weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, learned, scale = ctx.saved_tensors
        if torch.is_grad_enabled() or is_followed(slope):
            weight = ctx.gain if learned is None else learned
            return *_gradients_in_torch(None, slope, x, weight, ctx.eps), None
        up = slope if learned is None else slope * learned
        along = torch.linalg.vecdot(x, up).unsqueeze(-1) * scale.square() / x.shape[-1]
        d_x = torch.addcmul(up, x, along, value=-1).mul_(scale if ctx.gain is None else scale * ctx.gain)
        if learned is None or not ctx.needs_input_grad[1]:
            return d_x, None, None
        return d_x, (slope * x).reshape(-1, len(learned)).mT @ scale.reshape(-1), None


class _GatedNormOnCpu(torch.autograd.Function):
    """x · r · weight · silu(gate), a block of rows that fits the cache at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gate, weight, scale)
        ctx.eps = eps
        out = torch.empty_like(x)
        for o, row, g, r in _blocks(out, x, gate, scale):
            torch.ops.aten.silu.out(g, out=o).mul_(row).mul_(r).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled() or is_followed(slope):  # the caller wants gradients of these gradients

            def formula(x: Tensor, gate: Tensor, weight: Tensor) -> list[Tensor]:
                return [_gated_norm_in_torch(x, gate, weight, ctx.eps)]

            return *gradients_of(formula, (x, gate, weight), (slope,)), None
        d_x, d_gate, d_weight = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(weight)
        for d, row, g, r, into, d_g in _blocks(slope, x, gate, scale, d_x, d_gate):
            unit = row * r
            up = d * functional.silu(g)
            torch.ops.aten.silu_backward.grad_input((d * unit).mul_(weight), g, grad_input=d_g)
            d_weight += torch.mul(up, unit, out=into).sum(0)
            up *= weight
            along = torch.mul(up, unit, out=into).mean(-1, keepdim=True)
            torch.addcmul(up, unit, along, value=-1, out=into).mul_(r)
        return d_x, d_gate, d_weight, None


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors [n, width] in blocks of rows; the second has the width that counts."""
    rows = max(1, BLOCK // tensors[1].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _gated_norm_in_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps) * functional.silu(gate)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, read: Tensor | None, weight: Tensor | float, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = load_kernels().norm.forward(x, read, weight, eps, dtype)
        learned, ctx.gain = (weight, None) if isinstance(weight, Tensor) else (None, weight)
        ctx.save_for_backward(total, learned, scale)
        ctx.eps, ctx.read = eps, None if read is None else read.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, learned, scale = ctx.saved_tensors
        weight = learned if ctx.gain is None else ctx.gain
        if d_normed is None:
            d_x, d_weight = d_total, None
        elif torch.is_grad_enabled() or is_followed(d_total, d_normed):
            d_x, d_weight = _gradients_in_torch(d_total, d_normed, total, weight, ctx.eps)
        else:
            d_x, d_read, d_weight = load_kernels().norm.backward(d_total, d_normed, total, scale, weight, ctx.read)
            return d_x, d_read, d_weight, None, None
        d_read = None if d_x is None or ctx.read is None else d_x.to(ctx.read)
        return d_x, d_read, d_weight, None, None
