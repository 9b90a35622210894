"""Text from the model itself: contexts that vary a prompt, and a corpus when none is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rebind.models.trunk import cache_of


@torch.no_grad()
def sample(
    model: Any,
    start: Sequence[int],
    first: Tensor,
    length: int,
    *,
    seed: int,
    top_k: int | None = None,
    temperature: float = 1.0,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Continue each row of `first` [rows, tokens] to `length` tokens by sampling: [rows, length].

    `start` is put before every row and is not returned. Same seed, same device, same text.
    """
    device = first.device
    generator = torch.Generator(device).manual_seed(seed)
    prefix = torch.tensor(list(start), dtype=torch.long, device=device).expand(len(first), -1)
    ids, cache = torch.cat([prefix, first], dim=-1), None
    rows = first
    while rows.shape[-1] < length:
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, **_last_only(model))
        cache = cache_of(out)
        logits = out.logits[:, -1].to(device, torch.float32) / temperature
        if top_k is not None:
            least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        noise = torch.empty_like(logits).exponential_(generator=generator).log()  # Gumbel's trick
        ids = (logits - noise).argmax(-1, keepdim=True)
        rows = torch.cat([rows, ids], dim=-1)
        if on_step is not None:
            on_step(rows.shape[-1])
    return rows[:, :length]


def _last_only(model: Any) -> dict[str, int]:
    """Ask for the last token's logits alone, of models that can be asked."""
    accepts = inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}
