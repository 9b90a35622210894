"""What a model says after a prompt: its most likely next tokens, and its continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from rebind.models.language_model import LanguageModel

Answer: TypeAlias = dict[str, Any]  # {top: [{token, probability}, ...], says}


def next_tokens(model: LanguageModel, prompts: Sequence[str], top: int) -> list[Answer]:
    """Return the most likely next tokens of each prompt; `says` is the first of them."""
    if not prompts:
        return []
    log_probs = model.next_token_log_probs(prompts)
    best = log_probs.topk(min(top, log_probs.shape[-1]))
    answers = []
    for ids, shares in zip(best.indices.tolist(), best.values.exp().tolist(), strict=True):
        tokens = [str(model.tokenizer.decode([id])) for id in ids]
        choices = [{"token": token, "probability": share} for token, share in zip(tokens, shares, strict=True)]
        answers.append({"top": choices, "says": tokens[0]})
    return answers


def ask(model: LanguageModel, prompts: Sequence[str], tokens: int, top: int) -> list[Answer]:
    """Return the most likely next tokens and the continuation of each prompt."""
    texts = model.generate(prompts, tokens)
    return [answer | {"says": text} for answer, text in zip(next_tokens(model, prompts, top), texts, strict=True)]
