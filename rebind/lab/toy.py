"""A random language model small enough to edit in seconds, with a tokenizer whose tokens are the facts' words.

It knows nothing; but its layers are memories like any other's, and it can be made to prefer one word to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rebind.edit.drift import CANARIES
from rebind.edit.moments.corpus import Texts
from rebind.evals.records import Record

END, UNKNOWN = "<end>", "<unknown>"
WIDTH, INNER, DEPTH = 64, 128, 3


@dataclass(frozen=True, eq=False)
class Toy:
    model: Any
    tokenizer: Any
    corpus: Texts


def toy(records: Sequence[Record], seed: int = 0) -> Toy:
    """A model whose words are those of the records."""
    sentences = []
    for record in records:
        prompts = (record.fact.text, *(one.prompt for one in record.neighbours))
        sentences += [f"{prompt} {answer}" for prompt in prompts for answer in (record.fact.old, record.fact.target)]
    tokenizer = _tokenizer([*sentences, *CANARIES])
    return Toy(_random(len(tokenizer), seed), tokenizer, Texts(sentences, "toy", rows=32))


def _tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=[END, UNKNOWN], show_progress=False))
    names = {"bos_token": END, "eos_token": END, "pad_token": END, "unk_token": UNKNOWN}
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=backend, **names)


def _random(vocabulary: int, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        made: Any = LlamaForCausalLM
        model = made(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)
