"""W (silu(g) · u), the gated product of MLPs and of reads, which keeps g and u and nothing that is as wide.

Autograd would keep silu(g) and silu(g) · u too, in large models a sixth of all that training holds. Here they are
computed again; on a GPU by kernels, one each way, so that this takes no more time. Gradients of gradients are those of
the formula, by plain autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.ops.dispatch import triton_backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels take


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) · up) Wᵀ for gate and up [..., width] of one dtype and a weight [out, width], taken in theirs."""
    weight = weight.to(gate.dtype)
    kept = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad or weight.requires_grad)
    if torch.compiler.is_compiling() or not (kept or _has_kernels(gate)):  # a compiler makes kernels of its own
        return functional.linear(functional.silu(gate) * up, weight)
    if kept:
        out: Tensor = _GatedLinear.apply(gate, up, weight)  # type: ignore[no-untyped-call]
        return out
    return functional.linear(_kernels().forward(gate, up), weight)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        product = _kernels().forward(gate, up) if _has_kernels(gate) else functional.silu(gate).mul_(up)
        return functional.linear(product, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        d_product = slope @ weight
        if torch.is_grad_enabled():  # the caller asked for a graph: gradients of these gradients
            share = gate.sigmoid()
            d_gate = d_product * up * share * (1 + gate * (1 - share))
            d_up, product = d_product * (gate * share), gate * share * up
        elif _has_kernels(gate):
            d_gate, d_up, product = _kernels().backward(d_product, gate, up)
        else:
            passed = functional.silu(gate)
            d_gate = torch.ops.aten.silu_backward(d_product * up, gate)
            d_up, product = d_product.mul_(passed), passed.mul_(up)
        d_weight = slope.flatten(0, -2).mT @ product.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return d_gate, d_up, d_weight


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in DTYPES and x.numel() > 0 and not isinstance(triton_backend(), str)


def _kernels() -> Any:
    from rebind.ops.triton import gated

    return gated
