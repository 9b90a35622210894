"""The parts of a model that treat every token by itself: projections, RMSNorm, MLPs and the loss of the output layer.

Several projections of one input are one product with the weights side by side. Such shortcuts are taken only where
calling a module does nothing but its product; modules with hooks, adapters or parametrizations are called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules import module as torch_module

from rebind.memory.precision import working_dtype
from rebind.ops import add_norm, gated_linear, rms_norm
from rebind.ops.entropy import bytes_of_logit, row_losses
from rebind.precision import as_autocast, autocast_dtype

HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")  # of a module, or of all modules
MAX_JOINT_WEIGHTS = 2**23  # a GPU copies this many weights in about the time of launching the products separately
MAX_BYTES = 2**29  # of the logits in memory at once, with the copies that their loss needs


def project_jointly(x: Tensor, *projections: nn.Linear) -> Tensor:
    """Return every projection of x [..., dim], side by side, as one product where copying the weights pays."""
    if len(projections) < 2:
        return projections[0](x) if projections else x[..., :0]
    if all(map(is_plain_linear, projections)):
        weights = [project.weight for project in projections]
        are_few = x.is_cuda and len(weights) > 2 and sum(map(Tensor.numel, weights)) <= MAX_JOINT_WEIGHTS
        if are_few or x.numel() >= x.shape[-1] ** 2:  # as many tokens as a token is wide
            return functional.linear(x, torch.cat(weights))
    return torch.cat([project(x) for project in projections], dim=-1)


def is_plain_linear(project: nn.Module) -> bool:
    """Whether calling the module does nothing but multiply by its weight."""
    return type(project) is nn.Linear and getattr(project, "bias", None) is None and has_no_hooks(project)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs the `forward` of its class and nothing else."""
    if "forward" in module.__dict__:  # tools that load weights on demand replace it
        return False
    return not any(getattr(module, f"_{name}") or getattr(torch_module, f"_global_{name}") for name in HOOKS)


class RMSNorm(nn.Module):
    """x / rms(x) · w over the last dimension, in the dtype of x; the mean of squares is taken in float32 or better."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def add_and_norm(norm: nn.Module, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + update (or x), and its norm in the dtype that autocast gives to a product."""
    if type(norm) is RMSNorm and has_no_hooks(norm) and (update is None or update.dtype.itemsize <= x.dtype.itemsize):
        return add_norm(x, update, norm.weight, norm.eps, autocast_dtype(x))
    x = x if update is None else x + update
    return x, as_autocast(norm(x))


class SwiGlu(nn.Module):
    """W_d (silu(W_g x) · W_u x)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = as_autocast(x)
        return project_gated(self.gate_proj(x), self.up_proj(x), self.down_proj, x.dtype)


def project_gated(gate: Tensor, x: Tensor, project: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return W (silu(gate) · x) in that dtype."""
    if is_plain_linear(project) and x.dtype == gate.dtype == dtype:
        return gated_linear(gate, x, project.weight)
    return project((functional.silu(gate) * x).to(dtype))


class ReluMlp(nn.Module):
    """W_d relu(W_u x + b) + c, the MLP of the first transformer and of Schlag et al."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.relu(self.up_proj(x)))


MLPS: dict[str, type[SwiGlu | ReluMlp]] = {"swiglu": SwiGlu, "relu": ReluMlp}


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Return Σ −log softmax(W h)[target] over hidden states [..., d] and targets [...], for a head W [words, d].

    The logits of a few tokens at a time are computed, reduced to a loss and gradients, and released: all of them would
    take a gigabyte for 16,384 tokens and 32,000 words in bfloat16, and several more in float32 with their gradient. The
    backward pass only scales these gradients.

    The result has float32 or better; products follow autocast. Targets of −100 are ignored.
    """
    if not torch.is_grad_enabled():  # otherwise needs_input_grad is true even here
        hidden, weight = hidden.detach(), weight.detach()
    total: Tensor = _HeadLoss.apply(hidden, weight, targets, max_bytes)  # type: ignore[no-untyped-call]
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, max_bytes: int) -> Tensor:
        rows, table = (as_autocast(tensor) for tensor in (hidden.reshape(-1, hidden.shape[-1]), weight))
        targets = targets.reshape(-1)
        total = torch.zeros((), dtype=working_dtype(rows), device=rows.device)
        with_gradients = any(ctx.needs_input_grad)
        d_rows = torch.empty_like(rows) if with_gradients else rows
        d_table = torch.zeros_like(weight, dtype=working_dtype(weight)) if with_gradients else weight
        size = max(1, max_bytes // (len(weight) * bytes_of_logit(rows)))
        for first in range(0, len(rows), size):
            piece = slice(first, first + size)
            logits = rows[piece] @ table.mT
            # Not in place: compiled by torch 2.11, a sum that grows in place has no gradient.
            total = total + row_losses(logits, targets[piece], slope=with_gradients).sum()
            if with_gradients:  # row_losses has replaced the logits by their gradient
                d_rows[piece] = logits @ table
                d_table += logits.mT @ rows[piece]
            del logits  # before the next piece is computed
        if with_gradients:
            ctx.save_for_backward(d_rows.view(hidden.shape), d_table)
            ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            (tensor * slope).to(dtype) if needed else None
            for tensor, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
        )
        return *gradients, None, None
