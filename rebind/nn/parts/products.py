"""Several products of one input, with as few operations as they need.

A layer projects each token many times: to queries, keys, values and gates. Products of one input are one product with
their weights side by side, and under autocast one conversion of the input serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooked

OF_ALL_MODULES = (  # torch's hooks that every module's call runs
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
LARGEST = 2**23  # weights that a GPU copies in about the time that launching the products apart takes


def joined(x: Tensor, *projections: nn.Linear) -> Tensor:
    """Every projection of x [..., dim], side by side.

    As one product where copying the weights costs less than it saves. Projections that are more than a matrix (with
    hooks, adapters, parametrizations, a bias) are called one by one.
    """
    if len(projections) == 1:
        out: Tensor = projections[0](x)
        return out
    if all(map(is_plain, projections)):
        weights = [project.weight for project in projections]
        if _worth_joining(x, weights):
            return functional.linear(x, torch.cat(weights))
    return torch.cat([project(x) for project in projections], dim=-1)


def _worth_joining(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether copying the weights is less than copying what comes out, or than launching every product."""
    dim = x.shape[-1]
    if x.numel() >= dim * dim:  # as many tokens as a token is wide
        return True
    return x.is_cuda and len(weights) > 2 and sum(weight.numel() for weight in weights) <= LARGEST


def is_plain(project: nn.Module) -> bool:
    """Whether calling the module is multiplying by its weight, and nobody is told."""
    return type(project) is nn.Linear and getattr(project, "bias", None) is None and is_untouched(project)


def is_untouched(module: nn.Module) -> bool:
    """Whether calling the module is its own forward and nothing else: no hooks, and none put in its place."""
    return (
        "forward" not in module.__dict__  # as tools put one there that moves the weight in first
        and not any(getattr(hooked, name) for name in OF_ALL_MODULES)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )
