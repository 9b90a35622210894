"""A short causal convolution, each channel by itself, with silu: what a token's neighbours were.

    out_t = silu(Σ_s w_s seen_{t + s})      seen = the window of `size` − 1 rows before the first token, then x

Plain torch copies window and tokens together, and to another layout for `conv1d`. On a GPU two kernels read them where
they are, once forward and once backward. Gradients of gradients are those of the formula, by plain autograd.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import unknown_name
from rebind.memory.precision import working_dtype
from rebind.ops.dispatch import many_at_once, triton_backend
from rebind.ops.trust import difference, distrusted, noise
from rebind.precision import as_autocast

NAMES = ("triton", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels take
LARGEST = 8  # size that the kernels take


def short_convolution(x: Tensor, weight: Tensor, window: Tensor, *, backend: str = "auto") -> Tensor:
    """silu of a depthwise causal convolution over the last `size` tokens, summed in float32 or better.

    Args:
        x: Tokens [B, T, C]. Under autocast they are taken in its dtype.
        weight: [C, size], the oldest token's weight first.
        window: The size − 1 tokens before x, [B, size − 1, C].
        backend: "triton", "torch", or "auto": kernels for CUDA tensors that they take.

    Returns:
        The output [B, T, C] in the dtype that x was taken in.
    """
    (out,) = convolved(x, weight, window, x.shape[2:], backend=backend)
    return out


def convolved(
    x: Tensor, weight: Tensor, window: Tensor, parts: Sequence[int], *, backend: str = "auto"
) -> tuple[Tensor, ...]:
    """`short_convolution` in parts of so many channels; kernels write each by itself, and nothing is copied."""
    _check(x, weight, window)
    if backend not in ("auto", *NAMES):
        raise unknown_name("backend", backend, ("auto", *NAMES))
    if sum(parts) != x.shape[2]:
        raise ShapeError(f"parts are {list(parts)} channels, expected {x.shape[2]} together as x has: correct them")
    x, parts = as_autocast(x), list(parts)
    if backend == "torch" or (backend == "auto" and not x.is_cuda):
        return _parted(_plain(x, weight, window), parts)
    why = _why_not_triton(x, weight, window)
    if why is not None and backend == "triton":
        raise InputError(f"backend 'triton' cannot run this: {why}; use backend='auto' to have one chosen")
    if why is not None:
        return _parted(_plain(x, weight, window), parts)
    if torch.compiler.is_compiling():
        return _parted(torch.ops.rebind.short_convolution(x, weight, window), parts)
    if not _trusted(x, weight, parts):
        return _parted(_plain(x, weight, window), parts)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or window.requires_grad):
        return tuple(_Fused.apply(x, weight, window, parts))  # type: ignore[no-untyped-call]
    made: tuple[Tensor, ...] = _kernels().forward(x, weight, window, parts)
    return made


def _parted(out: Tensor, parts: list[int]) -> tuple[Tensor, ...]:
    """Views; a whole stays itself, and may be changed in place."""
    return out.split(parts, dim=-1) if len(parts) > 1 else (out,)


def _check(x: Tensor, weight: Tensor, window: Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight), ("window", window)):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}, expected a tensor: convert it with torch.as_tensor")
        if not tensor.is_floating_point():
            raise InputError(f"{name} has dtype {tensor.dtype}, expected a real floating-point dtype: convert it")
        if tensor.device != x.device:
            raise InputError(f"{name} is on {tensor.device}, expected {x.device} as x: move it with .to(x.device)")
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[1] < 1 or x.shape[2] != weight.shape[0]:
        raise ShapeError(
            f"x is {list(x.shape)} and weight {list(weight.shape)}, expected [B, T, C] and [C, size]: each channel has "
            f"its own weights"
        )
    expected = (x.shape[0], weight.shape[1] - 1, x.shape[2])
    if tuple(window.shape) != expected:
        raise ShapeError(
            f"window is {list(window.shape)}, expected the tokens that the first one still sees, {list(expected)}: "
            f"before the first pass zeros"
        )


# Plain torch


def _plain(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    weight, window = weight.to(x.dtype), window.to(x.dtype)
    if not x.shape[1]:  # `conv1d` wants a token; nothing, but made of all three
        return x * weight.sum(1) + window.sum(1, keepdim=True)
    seen = torch.cat([window, x], dim=1)
    return functional.silu(functional.conv1d(seen.mT, weight.unsqueeze(1), groups=len(weight)).mT)


def _plain_gradients(d_out: Tensor, x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and window, in operations that have gradients themselves."""
    wide = working_dtype(x, weight, window)
    size, length = weight.shape[1], x.shape[1]
    seen = torch.cat([window.to(wide), x.to(wide)], dim=1)
    shifted = [seen[:, s : s + length] for s in range(size)]
    weights = weight.to(wide).unbind(1)
    pre = torch.stack([w * part for w, part in zip(weights, shifted, strict=True)]).sum(0)
    share = pre.sigmoid()
    slope = d_out.to(wide) * share * (1 + pre * (1 - share))  # silu(p) = p σ(p)
    back = [functional.pad(w * slope, (0, 0, s, size - 1 - s)) for s, w in enumerate(weights)]
    d_window, dx = torch.stack(back).sum(0).split([size - 1, length], dim=1)
    d_weight = torch.stack([(slope * part).sum((0, 1)) for part in shifted], dim=1)
    return dx.to(x.dtype), d_weight.to(weight.dtype), d_window.to(window.dtype)


# Kernels


def _why_not_triton(x: Tensor, weight: Tensor, window: Tensor) -> str | None:
    if not all(tensor.dtype in DTYPES for tensor in (x, weight, window)):
        return f"its kernels compute in float32 and these inputs are {x.dtype}, {weight.dtype} and {window.dtype}"
    if weight.shape[1] > LARGEST:
        return f"size={weight.shape[1]}, its kernels take up to {LARGEST}"
    if not x.numel():
        return "there is nothing to compute"
    if torch.compiler.is_compiling():  # the operator asks when it runs
        return None
    backend = triton_backend() if x.is_cuda or _interpreted() else "kernels want a CUDA device"
    return backend if isinstance(backend, str) else None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _kernels() -> Any:
    from rebind.ops.triton import convolve

    return convolve


class _Fused(torch.autograd.Function):
    """The kernels, eagerly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, window: Tensor, parts: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, window)
        made: tuple[Tensor, ...] = _kernels().forward(x, weight, window, parts)
        return made

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or many_at_once(*d_outs):  # a graph is asked for: gradients of these gradients
            return *_plain_gradients(torch.cat(d_outs, dim=-1), *ctx.saved_tensors), None
        return *_kernels().backward(d_outs, *ctx.saved_tensors), None


# The registered operators, for torch.compile


def _runs(x: Tensor, weight: Tensor, window: Tensor) -> bool:
    return _why_not_triton(x, weight, window) is None and _trusted(x, weight, x.shape[2:])


@torch.library.custom_op(
    "rebind::short_convolution", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor window) -> Tensor"
)
def _convolve(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    if _runs(x, weight, window):
        (out,) = _kernels().forward(x, weight, window)
        return out
    return _plain(x, weight, window).contiguous()


@_convolve.register_fake
def _(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "rebind::short_convolution_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor x, Tensor weight, Tensor window) -> (Tensor, Tensor, Tensor)",
)
def _convolve_backward(d_out: Tensor, x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if _runs(x, weight, window):
        return _kernels().backward([d_out], x, weight, window)
    dx, d_weight, d_window = (grad.contiguous() for grad in _plain_gradients(d_out, x, weight, window))
    return dx, d_weight, d_window


@_convolve_backward.register_fake
def _(d_out: Tensor, x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), window.new_empty(window.shape)


def _set_up(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.rebind.short_convolution_backward(d_out, *ctx.saved_tensors)


_convolve.register_autograd(_differentiate, setup_context=_set_up)


# The self-check


def _trusted(x: Tensor, weight: Tensor, parts: Sequence[int]) -> bool:
    """Whether the kernels are right about a tiny problem of this kind."""
    kind = ("convolution", x.device, x.dtype, weight.dtype, *weight.shape, tuple(parts))
    return not x.is_cuda or distrusted(kind, lambda: _compare(x, weight, parts), "plain torch") is None


@torch.no_grad()
def _compare(x: Tensor, weight: Tensor, parts: Sequence[int]) -> str | None:
    """Why kernels for such tensors are not to be trusted, or None."""
    channels, size = weight.shape
    shapes = ((2, 21, channels), (2, 21, channels), (channels, size), (2, size - 1, channels))
    kinds = (x.dtype, x.dtype, weight.dtype, x.dtype)
    d_out, *tiny = (
        noise(shape, x, seed).to(dtype) for seed, (shape, dtype) in enumerate(zip(shapes, kinds, strict=True))
    )
    wide, slopes = [tensor.double() for tensor in tiny], d_out.split(list(parts), dim=-1)
    return difference(
        f"the kernels of the short convolution over {size} tokens of {channels} channels in {x.dtype}",
        lambda: [torch.cat(_kernels().forward(*tiny, parts), -1), *_kernels().backward(slopes, *tiny)],
        lambda: [_plain(*wide), *_plain_gradients(d_out.double(), *wide)],
        x,
        "plain torch",
    )
