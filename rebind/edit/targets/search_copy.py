"""A model made quick at short sequences: what a search runs on, hundreds of times, in a few tokens a row.

Attention kernels are made for long sequences: at five queries and thirty keys a row they leave most of a GPU idle, and
took a third of a search. Here attention is two plain products, with the query heads that share a key head stacked into
one. Norms that are RMSNorm by another name become torch's one fused kernel.
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
LONGEST = 256  # keys: beyond, scores in memory cost more than a kernel that never stores them


def hurry(model: Any) -> None:
    """Change how a model computes, not what, up to rounding. For a copy: it does not go back."""
    if model.config._attn_implementation == "sdpa":  # others compute something that plain products do not
        AttentionInterface.register(NAME, short_attention)
        AttentionMaskInterface.register(NAME, short_mask)
        model.set_attn_implementation(NAME)
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float) and _is_rms_norm(module, eps):
            module.forward = _Fused(module, eps)


def short_mask(*places: Any, dtype: torch.dtype = torch.float32, **others: Any) -> Tensor | None:
    """0 where a query sees a key and the lowest number where it does not, [rows, 1, T, S]; made on the device alone."""
    seen = sdpa_mask(*places, **{**others, "allow_is_causal_skip": False})
    return None if seen is None else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


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
    """softmax(q kᵀ + mask) v for queries [rows, H, T, d] and fewer keys' heads [rows, Hk, S, d]: [rows, T, H, d]."""
    if attention_mask is None or dropout or key.shape[2] > LONGEST or others.get("position_bias") is not None:
        seen = None if attention_mask is None else attention_mask == 0
        told = sdpa_attention_forward(module, query, key, value, seen, dropout=dropout, scaling=scaling, **others)
        return told[0], None
    rows, heads, tokens, width = query.shape
    shared = heads // key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    scores = (query * scale).reshape(rows, key.shape[1], shared * tokens, width) @ key.mT
    scores = scores.unflatten(2, (shared, tokens)) + attention_mask[:, :, None, :, : key.shape[2]]
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(value.dtype)
    read = weights.flatten(2, 3) @ value
    return read.reshape(rows, heads, tokens, value.shape[-1]).transpose(1, 2).contiguous(), None


class _Fused:
    """torch's RMSNorm with a module's weight; the module's own where x has another dtype, which no kernel takes."""

    def __init__(self, module: Any, eps: float) -> None:
        self.weight, self.eps, self.own = module.weight, eps, module.forward

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return self.own(x)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@torch.no_grad()
def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Whether a module answers as x · weight / √(mean x² + eps), to rounding: asked, not believed by its name."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or len(list(module.parameters())) != 1:
        return False
    x = torch.linspace(-3, 2, 2 * len(weight), device=weight.device, dtype=weight.dtype).view(2, -1)
    try:
        answer = module(x)
    except (RuntimeError, TypeError):
        return False
    expected = _Fused(module, eps)(x)
    return answer.shape == x.shape and torch.allclose(answer, expected, rtol=8 * torch.finfo(x.dtype).eps, atol=0)
