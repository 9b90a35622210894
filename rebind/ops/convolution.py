"""A short causal convolution of each channel, followed by silu.

    out_t = silu(Σ_s w_s x̂_{t + s})      x̂ = the window of `size` − 1 tokens before the first one, then x

Plain torch copies window and tokens into one tensor, and into another layout for `conv1d`. On a GPU two kernels read
them where they are, one forward and one backward. On a CPU shifted copies are multiplied and added, a block of tokens
that fits the cache at a time: about ten times as fast as `conv1d` forward, and seven times with the backward pass.
Gradients of gradients are those of the formula, by plain autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import require_tensors, unknown_name
from rebind.memory.precision import working_dtype
from rebind.ops.inputs import require_device
from rebind.ops.kernels import TOLERANCE, compare_results, draw, find_fault, interpreted, is_followed, load_kernels
from rebind.precision import as_autocast

BACKENDS = ("auto", "triton", "torch")
LARGEST = 8  # largest size that the kernels take
BLOCK = 2**18  # numbers that a CPU convolves at a time: a megabyte of float32


def short_convolution(x: Tensor, weight: Tensor, window: Tensor, *, backend: str = "auto") -> Tensor:
    """Return silu of a depthwise causal convolution over the last `size` tokens, summed in float32 or better.

    Args:
        x: Tokens [B, T, C]. Under autocast they are converted to its dtype.
        weight: [C, size], the oldest token's weight first.
        window: The size − 1 tokens before x, [B, size − 1, C].
        backend: "triton", "torch", or "auto": kernels for CUDA tensors that they take.

    Returns:
        The output [B, T, C] in the dtype of x, or of autocast.
    """
    (out,) = split_convolution(x, weight, window, x.shape[2:], backend=backend)
    return out


def split_convolution(
    x: Tensor, weight: Tensor, window: Tensor, parts: Sequence[int], *, backend: str = "auto"
) -> tuple[Tensor, ...]:
    """Return `short_convolution` split into parts of so many channels; kernels write each part without a copy."""
    _check(x, weight, window)
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if sum(parts) != x.shape[2]:
        raise ShapeError(
            f"The parts have {list(parts)} channels", expected=f"{x.shape[2]} in total, as x has", code="wrong_parts"
        )
    x, parts = as_autocast(x), list(parts)
    in_torch = backend == "torch" or (backend == "auto" and not x.is_cuda)
    reason = None if in_torch else _why_not_triton(x, weight, window, parts)
    if reason is not None and backend == "triton":
        raise InputError(
            f"Backend 'triton' cannot run this convolution: {reason}",
            advice="Use {backend} to have one chosen",
            settings={"backend": "auto"},
            code="backend_refuses",
        )
    if in_torch or reason is not None:
        run = _ConvolutionOnCpu.apply if _in_blocks(x, weight, window) else _convolve_in_torch
        return _split(run(x, weight, window), parts)
    if torch.compiler.is_compiling():
        return _split(torch.ops.rebind.short_convolution(x, weight, window), parts)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or window.requires_grad):
        return tuple(_ShortConvolution.apply(x, weight, window, parts))  # type: ignore[no-untyped-call]
    out: tuple[Tensor, ...] = load_kernels().convolution.forward(x, weight, window, parts)
    return out


def compare_kernels(x: Tensor, weight: Tensor, parts: Sequence[int]) -> str | None:
    """Compare the kernels for such tensors with plain torch; return what is wrong with them, or None."""
    channels, size = weight.shape
    shapes = ((2, 21, channels), (2, 21, channels), (channels, size), (2, size - 1, channels))
    dtypes = (x.dtype, x.dtype, weight.dtype, x.dtype)
    d_out, *tiny = (
        draw(shape, x, seed).to(dtype) for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )
    wide, slopes = [tensor.double() for tensor in tiny], d_out.split(list(parts), dim=-1)
    with torch.no_grad():
        return compare_results(
            f"The kernels of the short convolution over {size} tokens of {channels} channels in {x.dtype}",
            lambda: [
                torch.cat(load_kernels().convolution.forward(*tiny, parts), -1),
                *load_kernels().convolution.backward(slopes, *tiny),
            ],
            lambda: [_convolve_in_torch(*wide), *_gradients_in_torch(d_out.double(), *wide)],
            x,
        )


def _split(out: Tensor, parts: list[int]) -> tuple[Tensor, ...]:
    """Return views; a single part is the tensor itself, which may be changed in place."""
    return out.split(parts, dim=-1) if len(parts) > 1 else (out,)


def _check(x: Tensor, weight: Tensor, window: Tensor) -> None:
    require_tensors(0, x=x, weight=weight, window=window)
    require_device("weight", weight, x)
    require_device("window", window, x)
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[1] < 1 or x.shape[2] != weight.shape[0]:
        raise ShapeError(
            f"The shape of x is {list(x.shape)} and of the weight {list(weight.shape)}",
            expected="[B, T, C] and [C, size]",
            code="weight_does_not_match",
        )
    expected = [x.shape[0], weight.shape[1] - 1, x.shape[2]]
    if list(window.shape) != expected:
        raise ShapeError(
            f"The window has shape {list(window.shape)}",
            expected=f"the tokens that the first one still sees, {expected}",
            advice="Pass zeros before the first token",
            code="window_does_not_match",
        )


# Plain torch


def _convolve_in_torch(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    weight, window = weight.to(x.dtype), window.to(x.dtype)
    if not x.shape[1]:  # `conv1d` needs a token; an empty result that depends on all three
        return x * weight.sum(1) + window.sum(1, keepdim=True)
    tokens = torch.cat([window, x], dim=1)
    return functional.silu(functional.conv1d(tokens.mT, weight.unsqueeze(1), groups=len(weight)).mT)


def _gradients_in_torch(d_out: Tensor, x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and window, in operations that have gradients themselves."""
    wide = working_dtype(x, weight, window)
    size, length = weight.shape[1], x.shape[1]
    tokens = torch.cat([window.to(wide), x.to(wide)], dim=1)
    shifted = [tokens[:, s : s + length] for s in range(size)]
    weights = weight.to(wide).unbind(1)
    pre = torch.stack([w * part for w, part in zip(weights, shifted, strict=True)]).sum(0)
    share = pre.sigmoid()
    slope = d_out.to(wide) * share * (1 + pre * (1 - share))  # silu(p) = p σ(p)
    back = [functional.pad(w * slope, (0, 0, s, size - 1 - s)) for s, w in enumerate(weights)]
    d_window, dx = torch.stack(back).sum(0).split([size - 1, length], dim=1)
    d_weight = torch.stack([(slope * part).sum((0, 1)) for part in shifted], dim=1)
    return dx.to(x.dtype), d_weight.to(weight.dtype), d_window.to(window.dtype)


# Blocks, on a CPU


def _in_blocks(x: Tensor, weight: Tensor, window: Tensor) -> bool:
    """Return whether to convolve block by block: half precision would round every sum on the way."""
    full = x.dtype == weight.dtype == window.dtype and x.dtype in (torch.float32, torch.float64)
    return full and x.device.type == "cpu" and x.numel() > 0 and not is_followed(x)


def _blocks(x: Tensor, window: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the tokens x [B, T, C], and these tokens with those that the first of them still sees."""
    before, length = window.shape[1], x.shape[1]
    size = max(16, BLOCK // max(1, len(x) * x.shape[2]))
    for first in range(0, length, size):
        end = min(first + size, length)
        if first >= before:
            yield slice(first, end), x[:, first - before : end]
        else:
            yield slice(first, end), torch.cat([window, x[:, :end]], dim=1)[:, first:]


def _sum_shifted(tokens: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Write Σ_s w_s · tokens[s + t] into `out` [B, n, C], for weights [size, C]."""
    length = out.shape[1]
    torch.mul(tokens[:, :length], weights[0], out=out)
    for s in range(1, len(weights)):
        out.addcmul_(tokens[:, s : s + length], weights[s])
    return out


class _ConvolutionOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, window)
        out, weights = torch.empty(x.shape, dtype=x.dtype), weight.mT.contiguous()
        for block, tokens in _blocks(x, window):
            functional.silu(_sum_shifted(tokens, weights, out[:, block]), inplace=True)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, window = ctx.saved_tensors
        if torch.is_grad_enabled() or is_followed(d_out):  # the caller wants gradients of these gradients
            return _gradients_in_torch(d_out, x, weight, window)
        weights, before = weight.mT.contiguous(), window.shape[1]
        d_tokens = x.new_zeros(len(x), before + x.shape[1], x.shape[2])
        d_weights = torch.zeros_like(weights)
        for block, tokens in _blocks(x, window):
            length = block.stop - block.start
            total = _sum_shifted(tokens, weights, torch.empty_like(tokens[:, :length]))
            slope = torch.ops.aten.silu_backward(d_out[:, block], total)
            for s, one in enumerate(weights):
                d_tokens[:, block.start + s : block.stop + s].addcmul_(slope, one)
                d_weights[s] += torch.mul(slope, tokens[:, s : s + length], out=total).sum((0, 1))
        return d_tokens[:, before:], d_weights.mT, d_tokens[:, :before]


# Kernels


def _why_not_triton(x: Tensor, weight: Tensor, window: Tensor, parts: Sequence[int]) -> str | None:
    dtypes = [tensor.dtype for tensor in (x, weight, window)]
    if any(dtype not in TOLERANCE for dtype in dtypes):  # torch.compile does not compare sets
        return f"its kernels compute in float32, and these inputs are {', '.join(map(str, dtypes))}"
    if weight.shape[1] > LARGEST:
        return f"the size is {weight.shape[1]}, and its kernels take up to {LARGEST}"
    if not x.numel():
        return "there is nothing to compute"
    if torch.compiler.is_compiling():  # the operator decides when it runs
        return None
    kernels = load_kernels() if x.is_cuda or interpreted() else "its kernels need a CUDA device"
    if isinstance(kernels, str):
        return kernels
    if not x.is_cuda:
        return None
    kind = ("convolution", x.device, x.dtype, weight.dtype, *weight.shape, tuple(parts))
    return find_fault(kind, lambda: compare_kernels(x, weight, parts), "plain torch")


class _ShortConvolution(torch.autograd.Function):
    """The kernels, called eagerly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, window: Tensor, parts: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, window)
        out: tuple[Tensor, ...] = load_kernels().convolution.forward(x, weight, window, parts)
        return out

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or is_followed(*d_outs):  # the caller wants gradients of these gradients
            return *_gradients_in_torch(torch.cat(d_outs, dim=-1), *ctx.saved_tensors), None
        return *load_kernels().convolution.backward(d_outs, *ctx.saved_tensors), None


# The registered operators, for torch.compile


@torch.library.custom_op(
    "rebind::short_convolution", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor window) -> Tensor"
)
def _convolve(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    if _why_not_triton(x, weight, window, x.shape[2:]) is None:
        (out,) = load_kernels().convolution.forward(x, weight, window)
        return out
    return _convolve_in_torch(x, weight, window).contiguous()


@_convolve.register_fake
def _(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "rebind::short_convolution_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor x, Tensor weight, Tensor window) -> (Tensor, Tensor, Tensor)",
)
def _convolve_backward(d_out: Tensor, x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if _why_not_triton(x, weight, window, x.shape[2:]) is None:
        return load_kernels().convolution.backward([d_out], x, weight, window)
    dx, d_weight, d_window = (grad.contiguous() for grad in _gradients_in_torch(d_out, x, weight, window))
    return dx, d_weight, d_window


@_convolve_backward.register_fake
def _(d_out: Tensor, x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), window.new_empty(window.shape)


def _set_up(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.rebind.short_convolution_backward(d_out, *ctx.saved_tensors)


_convolve.register_autograd(_differentiate, setup_context=_set_up)
