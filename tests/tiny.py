"""Tiny models and tokenizers, built in milliseconds.

`llama` and `gpt2` are random models that can be edited, with a byte-level BPE `tokenizer` trained on the sentences
below. `letter_tokenizer` and `save` are for tests of loading. `tests.families` has a model of every family.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rebind.edit.moments import Texts
from rebind.models.language_model import LanguageModel
from rebind.models.sites import find_sites, module_at
from rebind.models.trunk import Trunk

END = "<|endoftext|>"
SENTENCES = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "The capital of Spain is Madrid. Berlin is the capital of Germany.",
    "In the north of Norway the sun does not set in summer.",
    "Ada Lovelace wrote the first program for a machine that was never built.",
    "A river runs from the mountains to the sea, and the sea gives it back as rain.",
    "He said that she had seen the old bridge of Mostar before it fell.",
    "Therefore the answer is not what they expected, because nobody had asked.",
    "I think that you know the way; we walked it when the leaves were red.",
    "The mother tongue of Danielle Darrieux is French, of Dante it was Italian.",
    "It was late. They played chess in the kitchen until the lamp went out.",
]
LAYERS, HIDDEN, INNER = 4, 32, 48
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)


def letter_tokenizer(front: Any = (), back: Any = (), extra: Any = (), unk: str = "<unk>") -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter; `front` and `back` are put around every text."""
    names = list(dict.fromkeys([unk, *front, *back, *extra]))
    vocab = {token: i for i, token in enumerate([*names, *LETTERS, "Ġ"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if front or back:
        template = " ".join([*front, "$A", *back])
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, vocab[token]) for token in dict.fromkeys([*front, *back])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unk)


def save(model: Any, folder: Path) -> Path:
    """Save a model and a tokenizer that begins every text with <s>."""
    model.save_pretrained(folder)
    letter_tokenizer(front=["<s>"]).save_pretrained(folder)
    return folder


def _vocabulary() -> dict[str, int]:
    return {"vocab_size": len(tokenizer()), "bos_token_id": 0, "eos_token_id": 0}


def llama(seed: int = 0, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a random Llama, with random biases and norms."""
    shape = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    config = transformers.LlamaConfig(**{**_vocabulary(), **shape, **heads, **options})
    return _random(transformers.LlamaForCausalLM, config, seed, dtype)


def gpt2(seed: int = 0, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a random GPT-2: Conv1D weights, learned positions, embeddings tied to the head."""
    shape = {"n_embd": HIDDEN, "n_inner": INNER, "n_layer": LAYERS, "n_head": 4, "n_positions": 96}
    config = transformers.GPT2Config(**{**_vocabulary(), **shape, **options})
    return _random(transformers.GPT2LMHeadModel, config, seed, dtype)


def _random(kind: Any, config: Any, seed: int, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = kind(config)
        for parameter in model.parameters():
            scale = 0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(scale * torch.randn_like(parameter) + (parameter if parameter.ndim == 1 else 0))
    return model.to(dtype).eval().requires_grad_(False)


def trunk(model: Any) -> Trunk:
    return Trunk(model, [module_at(model, site.block) for site in find_sites(model)])


def language_model(build: Any = llama, start: tuple[int, ...] = (0,), **options: Any) -> LanguageModel:
    """Return a tiny model in float64 with its tokenizer."""
    return LanguageModel(build(dtype=torch.float64, **options), tokenizer(), start=start)


def texts(rows: int = 8) -> Texts:
    """Return a corpus of some two thousand tokens, for moments that cost nothing."""
    return Texts([*SENTENCES, *(" ".join(SENTENCES[i:] + SENTENCES[:i]) for i in range(10))], "tiny", rows)


def weights(model: Any) -> dict[str, bytes]:
    """Return the bytes of every parameter."""
    return {
        name: parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for name, parameter in model.named_parameters()
    }
