"""The copy of the model that target search runs on.

On a GPU the search uses a bfloat16 copy with a faster attention for short sequences; targets do not need float32
precision. Attention kernels are made for long sequences: with five queries and thirty keys per row they leave most of
a GPU idle, and took a third of a search. Here attention is two plain products, with the query heads that share a key
head stacked into one. Modules that compute an RMSNorm use torch's fused kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rebind_short"
MAX_KEYS = 256  # with more keys, storing the scores costs more than a kernel that never stores them


def speed_up(model: Any) -> None:
    """Change how a model computes, but not what, up to rounding. This cannot be reverted: use it on a copy."""
    if model.config._attn_implementation == "sdpa":  # other implementations are not two plain products
        AttentionInterface.register(NAME, short_attention)
        AttentionMaskInterface.register(NAME, short_mask)
        model.set_attn_implementation(NAME)
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float) and _is_rms_norm(module, eps):
            module.forward = FusedRMSNorm(module, eps)


def short_mask(*places: Any, dtype: torch.dtype = torch.float32, **others: Any) -> Tensor | None:
    """Return 0 where a query sees a key and the lowest number elsewhere, [rows, 1, T, S], made on the device."""
    visible = sdpa_mask(*places, **{**others, "allow_is_causal_skip": False})
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def short_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute softmax(q kᵀ + mask) v of queries [rows, H, T, d] and keys [rows, H_k, S, d]: [rows, T, H, d]."""
    if attention_mask is None or dropout or key.shape[2] > MAX_KEYS or others.get("position_bias") is not None:
        visible = None if attention_mask is None else attention_mask == 0
        out = sdpa_attention_forward(module, query, key, value, visible, dropout=dropout, scaling=scaling, **others)
        return out[0], None
    rows, heads, tokens, width = query.shape
    shared = heads // key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    scores = (query * scale).reshape(rows, key.shape[1], shared * tokens, width) @ key.mT
    scores = scores.unflatten(2, (shared, tokens)) + attention_mask[:, :, None, :, : key.shape[2]]
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(value.dtype)
    read = weights.flatten(2, 3) @ value
    return read.reshape(rows, heads, tokens, value.shape[-1]).transpose(1, 2).contiguous(), None


class FusedRMSNorm:
    """torch's RMSNorm with the weight of a module. Inputs of another dtype have no kernel: the module computes them."""

    def __init__(self, module: Any, eps: float) -> None:
        self.weight, self.eps, self.original = module.weight, eps, module.forward

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return self.original(x)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@torch.no_grad()
def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Return whether a module computes x · weight / √(mean x² + eps), to rounding, by running it."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or len(list(module.parameters())) != 1:
        return False
    x = torch.linspace(-3, 2, 2 * len(weight), device=weight.device, dtype=weight.dtype).view(2, -1)
    try:
        answer = module(x)
    except (RuntimeError, TypeError):
        return False
    expected = FusedRMSNorm(module, eps)(x)
    return answer.shape == x.shape and torch.allclose(answer, expected, rtol=8 * torch.finfo(x.dtype).eps, atol=0)
