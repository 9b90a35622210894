"""The parts of a model that treat every token by itself: projections, RMSNorm and MLPs.

Several projections of one input are one product with the weights side by side. Such shortcuts are taken only where
calling a module does nothing but its product; modules with hooks, adapters or parametrizations are called.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from rebind.ops import add_norm, gated_linear, rms_norm
from rebind.precision import as_autocast, autocast_dtype

HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")  # of a module, or of all modules
MAX_JOINT_WEIGHTS = 2**23  # a GPU copies this many weights in about the time of launching the products separately


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
