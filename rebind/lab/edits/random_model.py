"""A random language model small enough to edit in seconds, with a tokenizer of the words in the facts.

It knows nothing; but its layers are memories like those of any other model, and it can learn to prefer one word to
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rebind.edit.guard import CANARY_PROMPTS
from rebind.edit.moments import Texts
from rebind.evals import Record

END, UNKNOWN = "<end>", "<unknown>"


def sentences_of(records: Sequence[Record]) -> list[str]:
    """Return every prompt of the records, with the old and the new target."""
    return [
        f"{prompt} {answer}"
        for record in records
        for prompt in (record.fact.text, *(question.prompt for question in record.neighbors))
        for answer in (record.fact.old, record.fact.target)
    ]


def random_model(records: Sequence[Record], seed: int = 0) -> tuple[Any, Any, Texts]:
    """Return a model, its tokenizer, which has a token for every word of the records, and a corpus of their text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sentences = sentences_of(records)
    tokenizer = _word_tokenizer([*sentences, *CANARY_PROMPTS])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    create: Any = LlamaForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = create(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False), tokenizer, Texts(sentences, "random model", rows=32)


def _word_tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=[END, UNKNOWN], show_progress=False))
    create: Any = PreTrainedTokenizerFast
    return create(tokenizer_object=backend, bos_token=END, eos_token=END, pad_token=END, unk_token=UNKNOWN)
