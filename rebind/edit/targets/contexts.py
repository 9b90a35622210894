"""Contexts: text put before the prompt of a fact, so that the edit holds whatever comes before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rebind.edit.facts.fact import Fact
from rebind.edit.targets.objective import FactPrompts
from rebind.models.language_model import LanguageModel

TOP_K = 5


@dataclass(frozen=True)
class ContextSettings:
    """How contexts are sampled; the defaults are those of MEMIT's code."""

    first_words: tuple[str, ...] = ("The", "Therefore", "Because", "I", "You")  # one context begins with each
    tokens: int = 10  # per context


def sample_contexts(model: LanguageModel, settings: ContextSettings, seed: int) -> tuple[str, ...]:
    """Sample contexts from the model as it stands."""
    contexts = []
    for index, word in enumerate(settings.first_words):
        first = torch.tensor([model.tokenizer(word, add_special_tokens=False).input_ids]).to(model.device)
        ids = model.sample(first, max(settings.tokens, first.shape[-1]), seed=seed + index, top_k=TOP_K)
        contexts.append(str(model.tokenizer.decode(ids[0], skip_special_tokens=True)).strip() + ". ")
    return tuple(contexts)


def prompts_in_contexts(model: LanguageModel, facts: Sequence[Fact], contexts: Sequence[str]) -> list[FactPrompts]:
    """Encode the prompt of every fact alone and behind every context."""
    prompts = [fact.as_prompt() for fact in facts]
    bare = model.encode(prompts)
    targets = [prompt.target for prompt in bare]
    encoded = [bare, *(model.encode(prompts, context=context, targets=targets) for context in contexts)]
    return [FactPrompts(rows) for rows in zip(*encoded, strict=True)]
