"""The routed experts of a layer as one memory.

A router sends each token to a few experts and weighs what they answer. With the down projections D₁ … D_E, the inner
activations a_e of a token and its routing weights w_e (0 for experts that it does not reach), the layer computes

    Σ_e w_e D_e a_e = [D₁ … D_E] · (w₁a₁, …, w_E a_E),

so the experts together are one memory [d_v, E·inner], read with a sparse key. The second moment of such keys is
block-diagonal here, with one block per expert. Biases of the down projections do not matter for a write.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class RoutedKeys:
    """The keys of tokens; each key has one part per expert that its token reaches."""

    parts: Tensor  # [..., k, inner]: weighted inner activations
    experts: Tensor  # [..., k]: the expert that each part belongs to
    count: int  # of experts

    def __getitem__(self, tokens: Any) -> Tensor:
        """Return the keys of the indexed tokens as vectors, [..., E·inner]."""
        parts, experts = self.parts[tokens], self.experts[tokens]
        keys = parts.new_zeros(*parts.shape[:-2], self.count, parts.shape[-1])
        return keys.scatter_add(-2, experts.unsqueeze(-1).expand_as(parts), parts).flatten(-2)

    def map(self, function: Callable[[Tensor], Tensor]) -> RoutedKeys:
        """Apply a function that rearranges tokens to both the parts and the experts."""
        return RoutedKeys(function(self.parts), function(self.experts), self.count)

    def second_moment(self, tokens: Tensor) -> Tensor:
        """Return Σ kkᵀ over the tokens in a mask, one block per expert, [E, inner, inner] float64."""
        parts = self.parts[tokens]
        parts = parts.to(torch.promote_types(parts.dtype, torch.float32)).flatten(0, 1)
        experts = self.experts[tokens].flatten()
        by_expert = (parts[experts == expert] for expert in range(self.count))
        return torch.stack([(rows.mT @ rows).double() for rows in by_expert])


def find_experts(block: nn.Module, d_v: int) -> tuple[str, nn.Module] | None:
    """Return the path and the module of the routed experts in a block whose values have `d_v` entries, or None."""
    for path, module in block.named_modules():
        if is_experts(module) and experts_shape(module)[0] == d_v:
            return path, module
    return None


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the weights and the methods of fused experts in transformers."""
    weight = getattr(module, "down_proj", None)
    return isinstance(weight, Tensor) and weight.ndim == 3 and not getattr(module, "has_post_expert_norm", True)


def experts_shape(module: Any) -> tuple[int, int]:
    """Return [d_v, d_k] of the memory."""
    count, rows, columns = module.down_proj.shape
    return (columns, count * rows) if module.is_transposed else (rows, count * columns)


def experts_memory(module: Any, weight: Tensor) -> Tensor:
    """Return the stacked down projections `weight` as one memory [d_v, E·inner]."""
    return (weight.permute(2, 0, 1) if module.is_transposed else weight.permute(1, 0, 2)).flatten(1)


def as_down_projections(module: Any, memory: Tensor) -> Tensor:
    """Return a memory [d_v, E·inner] in the layout of the stacked down projections."""
    blocks = memory.unflatten(1, (module.down_proj.shape[0], -1))
    return blocks.permute(1, 2, 0) if module.is_transposed else blocks.permute(1, 0, 2)


def routed_keys(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RoutedKeys:
    """Return the keys that a call of the experts with these arguments reads, [tokens, k] parts."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden, experts, weights = (arguments[name] for name in names[:3])
    hidden = hidden.flatten(0, -2)
    up = module.gate_up_proj if module.has_gate else module.up_proj
    bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias) if module.has_bias else None
    count, inner = up.shape[0], module.down_proj.shape[1 if module.is_transposed else 2]
    parts = hidden.new_empty(*experts.shape, inner)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        inner_states = hidden[token] @ (up[expert] if module.is_transposed else up[expert].mT)
        inner_states = inner_states if bias is None else inner_states + bias[expert]
        parts[token, slot] = module._apply_gate(inner_states) if module.has_gate else module.act_fn(inner_states)
    return RoutedKeys(parts * weights.unsqueeze(-1).to(parts), experts, count)
