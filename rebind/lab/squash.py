"""Fast weights under a tanh: W ← tanh(W + v φ(k)ᵀ), key after key, with its gradient. No product unrolls this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rebind.lab.reading import has_kernels

Write = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, tuple[Tensor, ...]]]
Unwrite = Callable[..., Tensor]


def squashed(phi_k: Tensor, values: Tensor, size: int) -> Tensor:
    """The memory [..., S, D] that W ← tanh(W + v φ(k)ᵀ) leaves, for φ(k) [..., L, D] and one-hot values [..., L]."""
    lead, (length, width) = phi_k.shape[:-2], phi_k.shape[-2:]
    flat = phi_k.reshape(-1, length, width), values.reshape(-1, length)
    memory: Tensor = _Squashed.apply(*flat, size)  # type: ignore[no-untyped-call]
    return memory.reshape(*lead, size, width)


class _Squashed(torch.autograd.Function):
    """Where a gradient is wanted, what it takes is kept: every state, or what kernels make do with."""

    @staticmethod
    def forward(ctx: Any, phi_k: Tensor, values: Tensor, size: int) -> Tensor:
        phi_k, values = phi_k.contiguous(), values.contiguous()
        memory, kept = _ways(phi_k)[0](phi_k, values, size, ctx.needs_input_grad[0])
        ctx.save_for_backward(values, *kept)
        return memory

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _ways(slope)[1](slope.contiguous(), *ctx.saved_tensors), None, None


def _ways(x: Tensor) -> tuple[Write, Unwrite]:
    """Two kernels on a GPU; elsewhere some operations a key."""
    if has_kernels(x):
        from rebind.lab import squash_kernels

        return squash_kernels.write, squash_kernels.unwrite
    return write, unwrite


def write(phi_k: Tensor, values: Tensor, size: int, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The memory [n, S, D] that keys [n, L, D] leave in rows `values` [n, L], and if kept every state [L, n, S, D]."""
    n, length, width = phi_k.shape
    states = phi_k.new_empty(length if keep else 1, n, size, width)
    hot = (values.unsqueeze(-1) == torch.arange(size, device=values.device)).to(phi_k)  # [n, L, S]
    memory = phi_k.new_zeros(n, size, width)
    for t in range(length):
        then = states[t % len(states)]
        torch.addcmul(memory, hot[:, t].unsqueeze(-1), phi_k[:, t : t + 1], out=then)
        memory = then.tanh_()
    return memory.clone(), (states,) if keep else ()


def unwrite(slope: Tensor, values: Tensor, states: Tensor) -> Tensor:
    """The gradient of the keys [n, L, D] from that of the memory."""
    slope, rows = slope.clone(), values.unsqueeze(-1).expand(-1, -1, slope.shape[-1])
    d_keys = slope.new_empty(rows.shape)
    for t in reversed(range(len(states))):
        torch.ops.aten.tanh_backward.grad_input(slope, states[t], grad_input=slope)
        torch.gather(slope, 1, rows[:, t : t + 1], out=d_keys[:, t : t + 1])
    return d_keys
