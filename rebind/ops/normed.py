"""RMSNorm, with x + r before it as every layer of a model begins: one pass over memory each way on a GPU.

The sum goes on to the next layer and its norm into this one, so x gets two gradients. Plain torch passes over it to
add, to norm, to narrow the norm for a product, and over all of that back again; and it is slow with rows as narrow as
a head's. Gradients of gradients, and whatever looks through the operation, get the formula itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.memory.precision import working_dtype
from rebind.ops.dispatch import many_at_once, seen_through, triton_backend
from rebind.ops.trust import ROUNDING, difference, distrusted, noise
from rebind.precision import without_autocast

WIDEST, MOST = 2**14, 2**30  # row that the kernels take, and rows


def rms_norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension, in x's dtype; the mean of squares is taken in float32 or better."""
    return add_norm(x, None, weight, eps)[1]


def add_norm(
    x: Tensor, read: Tensor | None, weight: Tensor | float, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + read, and (x + read) / rms(x + read) · weight over the last dimension, in `dtype` or else the sum's.

    Without `read` the first is x. The mean of squares is taken in float32 or better. A weight that is a number is not
    learned.
    """
    of = x.dtype if read is None else torch.promote_types(x.dtype, read.dtype)
    dtype = of if dtype is None else dtype
    if seen_through() or of != x.dtype or not _has_kernels(x, read, weight, dtype):
        return _plain(x, read, weight, eps, dtype)
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in (x, read, weight)):
        total, normed = _AddNorm.apply(x, read, weight, eps, dtype)  # type: ignore[no-untyped-call]
        return total, normed
    total, normed, _ = _kernels().forward(x, read, weight, eps, dtype)
    return total, normed


def _plain(
    x: Tensor, read: Tensor | None, weight: Tensor | float, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """By torch's RMSNorm, which asks for a weight of x's dtype. Autocast would convert x to float32 and back."""
    total = x if read is None else x + read
    width = total.shape[-1:]
    with without_autocast(total):
        factors = weight.to(total.dtype) if isinstance(weight, Tensor) else total.new_full(width, weight)
        return total, functional.rms_norm(total, width, factors, eps).to(dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, read: Tensor | None, weight: Tensor | float, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = _kernels().forward(x, read, weight, eps, dtype)
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
        elif torch.is_grad_enabled() or seen_through() or many_at_once(d_total, d_normed):
            d_x, d_weight = _gradients(d_total, d_normed, total, weight, ctx.eps)
        else:
            d_x, d_read, d_weight = _kernels().backward(d_total, d_normed, total, scale, weight, ctx.read)
            return d_x, d_read, d_weight, None, None
        d_read = None if d_x is None or ctx.read is None else d_x.to(ctx.read)
        return d_x, d_read, d_weight, None, None


def _gradients(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, weight: Tensor | float, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Of x and of a weight that is a tensor, in operations that have gradients themselves."""
    wide = working_dtype(*(one for one in (total, weight) if isinstance(one, Tensor)))
    x, slope = total.to(wide), d_normed.to(wide)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit, up = x * scale, slope * (weight.to(wide) if isinstance(weight, Tensor) else weight)
    d_x = (up - unit * (up * unit).mean(-1, keepdim=True)) * scale
    d_x = (d_x if d_total is None else d_x + d_total).to(total.dtype)
    if not isinstance(weight, Tensor):
        return d_x, None
    return d_x, (slope * unit).reshape(-1, len(weight)).sum(0).to(weight.dtype)


def _kernels() -> Any:
    from rebind.ops.triton import normed

    return normed


def _has_kernels(x: Tensor, read: Tensor | None, weight: Tensor | float, dtype: torch.dtype) -> bool:
    width = x.shape[-1]
    kinds = *(one.dtype for one in (x, read, weight) if isinstance(one, Tensor)), dtype
    fits = (read is None or read.shape == x.shape) and (not isinstance(weight, Tensor) or weight.shape == x.shape[-1:])
    if not (x.is_cuda and x.numel() and fits and width <= WIDEST and x.numel() // width <= MOST):
        return False
    if not all(kind in ROUNDING for kind in kinds) or isinstance(triton_backend(), str):
        return False
    apart = read is None and _kernels().grouped(x)
    there = "normed", x.device, width, read is None, isinstance(weight, Tensor), apart, *kinds
    return distrusted(there, lambda: _compare(x, read, weight, dtype, apart), "plain torch") is None


@torch.no_grad()
def _compare(x: Tensor, read: Tensor | None, weight: Tensor | float, dtype: torch.dtype, apart: bool) -> str | None:
    """Why kernels for such tensors are not to be trusted, or None; `apart`: rows in groups with gaps between."""
    width = x.shape[-1]
    count = 2 * max(1, 1024 // width) + 3  # more than programs take at once

    def drawn(seed: int, dtype: torch.dtype, wider: int = 2) -> Tensor:
        return noise((count, wider * width), x, seed).to(dtype)[:, -2 * width :].unflatten(-1, (2, width))

    rows, back, slope = drawn(0, x.dtype, wider=3 if apart else 2), drawn(1, x.dtype), drawn(3, dtype)
    more, of_more = (None, None) if read is None else (drawn(2, read.dtype), read.dtype)
    factors = noise((width,), x, 4).to(weight.dtype) if isinstance(weight, Tensor) else weight
    total = rows if more is None else rows + more

    def found() -> list[Tensor | None]:
        summed, normed, scale = _kernels().forward(rows, more, factors, 1e-6, dtype)
        both, one = (
            _kernels().backward(d_total, slope, total, scale, factors, of_more) for d_total in (back, None)
        )  # a norm alone has one gradient
        return [summed, normed, *both, *one]

    def truth() -> list[Tensor | None]:
        wide, wider = total.double(), factors.double() if isinstance(factors, Tensor) else factors
        d_x, d_weight = _gradients(back.double(), slope.double(), wide, wider, 1e-6)
        alone = d_x - back.double()
        return [*_plain(wide, None, wider, 1e-6, wide.dtype), d_x, d_x, d_weight, alone, alone, d_weight]

    kinds = {one.dtype for one in (x, read, weight) if isinstance(one, Tensor)} | {dtype}
    roughest = max(kinds, key=lambda kind: ROUNDING[kind])
    name = f"the kernels of norms in {', '.join(sorted(str(kind) for kind in kinds))}"
    return difference(name, found, truth, x.new_empty(0, dtype=roughest), "plain torch")
