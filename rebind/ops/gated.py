"""W (silu(g) · u), the gated product of MLPs and of reads, which saves only g and u for the backward pass.

Autograd would also save silu(g) and silu(g) · u, in large models a sixth of all the memory of training. Here they are
computed again, on a GPU by one kernel in each direction, so that this takes no more time. Gradients of gradients, and
whatever follows single operations (compilers, torch.func, forward differentiation, tracing), get the formula itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.ops.kernels import compare_results, draw, is_followed, load_kernels, usable
from rebind.precision import without_autocast


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """Return (silu(gate) · up) Wᵀ for gate and up [..., width] of one dtype and a weight [out, width].

    Under autocast the weight is converted to the dtype of the others.
    """
    alike = gate.dtype == up.dtype and gate.shape == up.shape
    learned = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    if not alike or is_followed() or not (learned or _has_kernels(gate)):
        return functional.linear(functional.silu(gate) * up, weight)
    narrow = torch.is_autocast_enabled(gate.device.type)
    with without_autocast(gate):
        if learned:
            out: Tensor = _GatedLinear.apply(gate, up, weight, narrow)  # type: ignore[no-untyped-call]
            return out
        return functional.linear(_product(gate, up), weight.to(gate.dtype) if narrow else weight)


@torch.no_grad()
def compare_kernels(gate: Tensor) -> str | None:
    """Compare the kernels for such tensors with plain torch; return what is wrong with them, or None."""
    slope, g, u = (draw((3, 70), gate, seed).to(gate.dtype) for seed in range(3))

    def truth() -> list[Tensor]:
        wide, passed = slope.double(), functional.silu(g.double())
        product = passed * u.double()
        return [product, torch.ops.aten.silu_backward(wide * u.double(), g.double()), wide * passed, product]

    name = f"The kernels of gated products in {gate.dtype}"
    return compare_results(
        name, lambda: [load_kernels().gated.forward(g, u), *load_kernels().gated.backward(slope, g, u)], truth, gate
    )


def _product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, without gradients."""
    product: Tensor = load_kernels().gated.forward(gate, up) if _has_kernels(gate) else functional.silu(gate).mul_(up)
    return product


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, narrow: bool) -> Tensor:
        ctx.save_for_backward(gate, up, weight)  # the weight as it is: the parameter exists anyway
        return functional.linear(_product(gate, up), weight.to(gate.dtype) if narrow else weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        slope = slope.to(gate.dtype)
        d_product = slope @ weight.to(gate.dtype)
        if torch.is_grad_enabled() or is_followed(slope):  # the caller may want gradients of these gradients
            share = gate.sigmoid()
            d_gate = d_product * up * share * (1 + gate * (1 - share))
            d_up, product = d_product * (gate * share), gate * share * up
        elif _has_kernels(gate):
            d_gate, d_up, product = load_kernels().gated.backward(d_product, gate, up)
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


def _has_kernels(gate: Tensor) -> bool:
    return usable(gate, ("gated",), lambda: compare_kernels(gate))
