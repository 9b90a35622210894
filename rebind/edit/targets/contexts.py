"""Beginnings of sentences to put before a fact's prompt: it should hold whatever stands before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rebind.models.generation import sample
from rebind.models.load import Loaded


def sample_contexts(
    loaded: Loaded, begin: Sequence[str], tokens: int, device: torch.device, seed: int
) -> tuple[str, ...]:
    """One context of so many tokens for each beginning, sampled from the model as it stands."""
    tokenizer, rows = loaded.tokenizer, []
    for index, word in enumerate(begin):
        first = torch.tensor([tokenizer(word, add_special_tokens=False).input_ids]).to(device)
        length = max(tokens, first.shape[-1])
        text = sample(loaded.model, loaded.start, first, length, seed=seed + index, top_k=5)
        rows.append(str(tokenizer.decode(text[0], skip_special_tokens=True)).strip() + ". ")
    return tuple(rows)
