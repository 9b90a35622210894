"""The tokens of one fact; `LanguageModel.encode` replaces this module."""

from __future__ import annotations

from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.models.prompts import EncodedPrompt, encode_prompts


def encode(fact: Fact, tokenizer: Any, start: tuple[int, ...], *, limit: int | None = None) -> EncodedPrompt:
    return encode_prompts([fact.as_prompt()], tokenizer, start, limit=limit)[0]
