"""Tokenizers: trained on the corpus, or given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rebind.errors import InputError

END = "<|end|>"
TRAINED = ("bpe", "characters")
HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # that a tokenizer may be made of
PROBE = (  # of words, case, accents, numbers, spaces, scripts, signs
    "The quick brown fox, 1234567890 times: naïve café's ÉCOLE!\n\n\tdef f(x): return x**2  # 日本語 🙂 Привет\r\n"
    "  don't STOP internationalization; unbelievable, thoroughly (re)tokenized text…"
)
TOGETHER = 64  # pieces of text that are encoded at once


def bpe(texts: Iterable[str], vocabulary: int) -> Any:
    """Byte-level BPE: any text can be written in it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return _wrapped(inner)


def characters(texts: Iterable[str]) -> Any:
    """One token a character of the corpus; others read as the end of a text."""
    found = sorted({letter for text in texts for letter in text})
    inner = Tokenizer(models.WordLevel({END: 0} | {letter: 1 + i for i, letter in enumerate(found)}, unk_token=END))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return _wrapped(inner)


def given(name: str) -> Any:
    """The tokenizer in a folder or on the Hub.

    Of the Hub its files are asked for once: transformers would ask for each in turn, and offline again and again.
    """
    try:
        folder = Path(name).expanduser()
        return read_tokenizer(folder if folder.is_dir() else Path(snapshot_download(name, allow_patterns=HUB_FILES)))
    except Exception as problem:  # missing, offline, not a tokenizer: each with an exception of its own
        line = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise InputError(
            f"tokenizer {name!r} cannot be had ({line}), expected {', '.join(TRAINED)}, a folder or a Hub id: check it"
        ) from None


def read_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def fingerprint(tokenizer: Any) -> str:
    """A digest of what ids mean and how a text comes to its own, which saving and loading does not change."""
    told = (sorted(tokenizer.get_vocab().items()), _ids(tokenizer, [PROBE]), tokenizer.eos_token_id)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def exact(tokenizer: Any) -> str:
    """A digest of everything about a tokenizer, for a cache that must never be wrong and may well be filled again."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = fingerprint(tokenizer) + ("" if backend is None else backend.to_str())
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def encode(tokenizer: Any, pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[int], bool]]:
    """The ids of each piece of text, without the tokens that some tokenizers put around one; its flag goes along."""
    rest = iter(pieces)
    while waiting := list(islice(rest, TOGETHER)):
        ids = _ids(tokenizer, [text for text, _ in waiting])
        yield from zip(ids, (flag for _, flag in waiting), strict=True)


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _wrapped(inner: Tokenizer) -> Any:
    make: Any = PreTrainedTokenizerFast  # untyped
    return make(tokenizer_object=inner, eos_token=END, clean_up_tokenization_spaces=False)
