"""x + r and its RMSNorm, which stand before every layer of a model: one pass over memory each way on a GPU.

The sum goes on to the next layer and its norm into this one, so x gets two gradients. Plain torch passes over it to
add, to norm, to narrow the norm for a product, and over all of that back again. Gradients of gradients, and whatever
looks through the operation, get the formula itself.
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

WIDEST = 2**14  # row that the kernels take


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension, in x's dtype: torch's, one kernel on a GPU.

    It asks for a weight of x's dtype, and autocast would convert x to float32 and back around it.
    """
    with without_autocast(x):
        return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def add_norm(
    x: Tensor, read: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + read, and (x + read) / rms(x + read) · weight over the last dimension, in `dtype` or else the sum's.

    Without `read` the first is x. The mean of squares is taken in float32 or better.
    """
    of = x.dtype if read is None else torch.promote_types(x.dtype, read.dtype)
    dtype = of if dtype is None else dtype
    if seen_through() or of != x.dtype or not _has_kernels(x, read, weight, dtype):
        return _plain(x, read, weight, eps, dtype)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, read, weight)):
        total, normed = _AddNorm.apply(x, read, weight, eps, dtype)  # type: ignore[no-untyped-call]
        return total, normed
    total, normed, _ = _kernels().forward(x, read, weight, eps, dtype)
    return total, normed


def _plain(x: Tensor, read: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    total = x if read is None else x + read
    return total, rms_norm(total, weight, eps).to(dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, read: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = _kernels().forward(x, read, weight, eps, dtype)
        ctx.save_for_backward(total, weight, scale)
        ctx.eps, ctx.read = eps, None if read is None else read.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
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
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Of x and of the weight, in operations that have gradients themselves."""
    wide = working_dtype(total, weight)
    x, slope = total.to(wide), d_normed.to(wide)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit, up = x * scale, slope * weight.to(wide)
    d_x = (up - unit * (up * unit).mean(-1, keepdim=True)) * scale
    d_x = d_x if d_total is None else d_x + d_total
    return d_x.to(total.dtype), (slope * unit).reshape(-1, len(weight)).sum(0).to(weight.dtype)


def _kernels() -> Any:
    from rebind.ops.triton import normed

    return normed


def _has_kernels(x: Tensor, read: Tensor | None, weight: Tensor, dtype: torch.dtype) -> bool:
    kinds = x.dtype, x.dtype if read is None else read.dtype, weight.dtype, dtype
    fits = weight.shape == x.shape[-1:] and (read is None or read.shape == x.shape)
    if not (x.is_cuda and x.numel() and fits and x.shape[-1] <= WIDEST and all(kind in ROUNDING for kind in kinds)):
        return False
    if isinstance(triton_backend(), str):
        return False
    there = "normed", x.device, x.shape[-1], read is None, *kinds
    return distrusted(there, lambda: _compare(x, read, weight, dtype), "plain torch") is None


@torch.no_grad()
def _compare(x: Tensor, read: Tensor | None, weight: Tensor, dtype: torch.dtype) -> str | None:
    """Why kernels for such tensors are not to be trusted, or None."""
    width = x.shape[-1]

    def drawn(seed: int, dtype: torch.dtype) -> Tensor:
        return noise((3, width), x, seed).to(dtype)

    rows, back, more = drawn(0, x.dtype), drawn(1, x.dtype), None if read is None else drawn(2, read.dtype)
    slope, scales = drawn(3, dtype), noise((width,), x, 4).to(weight.dtype)
    total = rows if more is None else rows + more

    def found() -> list[Tensor | None]:
        summed, normed, scale = _kernels().forward(rows, more, scales, 1e-6, dtype)
        return [
            summed,
            normed,
            *_kernels().backward(back, slope, total, scale, scales, None if more is None else more.dtype),
        ]

    def truth() -> list[Tensor]:
        wide = total.double()
        d_x, d_weight = _gradients(back.double(), slope.double(), wide, scales.double(), 1e-6)
        return [wide, functional.rms_norm(wide, (width,), scales.double(), 1e-6), d_x, d_x, d_weight]

    kinds = {x.dtype, weight.dtype, dtype} | ({read.dtype} if read is not None else set())
    roughest = max(kinds, key=lambda kind: ROUNDING[kind])
    name = f"the kernels of norms in {', '.join(sorted(str(kind) for kind in kinds))}"
    return difference(name, found, truth, x.new_empty(0, dtype=roughest), "plain torch")
