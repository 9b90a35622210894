"""W (silu(g) · u), the gated product of MLPs and of reads, which keeps g and u and nothing that is as wide.

Autograd would keep silu(g) and silu(g) · u too, in large models a sixth of all that training holds. Here they are
computed again; on a GPU by kernels, one each way, so that this takes no more time. Gradients of gradients, and whatever
looks through the operation (compilers, torch.func, forward differentiation, tracing), get the formula itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.ops.dispatch import many_at_once, seen_through, triton_backend
from rebind.ops.trust import difference, distrusted, noise
from rebind.precision import without_autocast

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels take


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) · up) Wᵀ for gate and up [..., width] of one dtype and a weight [out, width].

    Under autocast the weight is taken in the others' dtype.
    """
    alike = gate.dtype == up.dtype and gate.shape == up.shape
    learned = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    if not alike or seen_through() or not (learned or _has_kernels(gate)):
        return functional.linear(functional.silu(gate) * up, weight)
    narrows = torch.is_autocast_enabled(gate.device.type)
    with without_autocast(gate):
        if learned:
            out: Tensor = _GatedLinear.apply(gate, up, weight, narrows)  # type: ignore[no-untyped-call]
            return out
        return functional.linear(_product(gate, up), weight.to(gate.dtype) if narrows else weight)


def _product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of which no gradient is taken."""
    product: Tensor = _kernels().forward(gate, up) if _has_kernels(gate) else functional.silu(gate).mul_(up)
    return product


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, narrows: bool) -> Tensor:
        ctx.save_for_backward(gate, up, weight)  # not as narrow as it is used: the parameter is there anyway
        return functional.linear(_product(gate, up), weight.to(gate.dtype) if narrows else weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        slope = slope.to(gate.dtype)
        d_product = slope @ weight.to(gate.dtype)
        if torch.is_grad_enabled() or seen_through() or many_at_once(slope):  # or gradients of these gradients
            share = gate.sigmoid()
            d_gate = d_product * up * share * (1 + gate * (1 - share))
            d_up, product = d_product * (gate * share), gate * share * up
        elif _has_kernels(gate):
            d_gate, d_up, product = _kernels().backward(d_product, gate, up)
        else:
            passed = functional.silu(gate)
            d_gate = torch.ops.aten.silu_backward(d_product * up, gate)
            d_up, product = d_product.mul_(passed), passed.mul_(up)
        d_weight = None
        if ctx.needs_input_grad[2]:
            out, width = weight.shape
            tokens = gate.numel() // width if width else 0
            d_weight = (slope.reshape(tokens, out).mT @ product.reshape(tokens, width)).to(weight.dtype)
        return d_gate, d_up, d_weight, None


def _kernels() -> Any:
    from rebind.ops.triton import gated

    return gated


def _has_kernels(gate: Tensor) -> bool:
    if not (gate.is_cuda and gate.dtype in DTYPES and gate.numel()) or isinstance(triton_backend(), str):
        return False
    return distrusted(("gated", gate.device, gate.dtype), lambda: _compare(gate), "plain torch") is None


@torch.no_grad()
def _compare(gate: Tensor) -> str | None:
    """Why kernels for such tensors are not to be trusted, or None."""
    slope, g, u = (noise((3, 70), gate, seed).to(gate.dtype) for seed in range(3))

    def truth() -> list[Tensor]:
        wide, passed = slope.double(), functional.silu(g.double())
        product = passed * u.double()
        return [product, torch.ops.aten.silu_backward(wide * u.double(), g.double()), wide * passed, product]

    return difference(
        f"the kernels of gated products in {gate.dtype}",
        lambda: [_kernels().forward(g, u), *_kernels().backward(slope, g, u)],
        truth,
        gate,
        "plain torch",
    )
