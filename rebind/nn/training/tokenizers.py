"""Tokenizers: trained on a text, or loaded from a folder or the Hub."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, snapshot_download
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rebind.errors import InputError

END_OF_TEXT = "<|end|>"
TRAINED = ("bpe", "characters")
HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # all that a tokenizer can consist of
HUB_SECONDS = 2.0  # to answer, before the Hub counts as unreachable
PROBE = (  # words, case, accents, numbers, spaces, scripts, signs
    "The quick brown fox, 1234567890 times: naïve café's ÉCOLE!\n\n\tdef f(x): return x**2  # 日本語 🙂 Привет\r\n"
    "  don't STOP internationalization; unbelievable, thoroughly (re)tokenized text…"
)


def train_tokenizer(kind: str, texts: Iterable[str], vocabulary: int) -> Any:
    """Train byte-level BPE with at most `vocabulary` tokens, or make every character of the texts a token."""
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
    else:
        tokens = [END_OF_TEXT, *sorted({character for text in texts for character in text})]
        ids = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=END_OF_TEXT))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    wrap: Any = PreTrainedTokenizerFast  # untyped
    return wrap(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder, from the Hub, or from the cache of the Hub where that cannot be reached."""
    try:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=not _hub_answers()))
        return read_tokenizer(folder)
    except Exception as problem:  # missing, offline, gated, no tokenizer: each has an exception of its own
        reason = str(problem).strip().partition("\n")[0]
        raise InputError(
            f"Tokenizer {name!r} cannot be loaded: {reason}",
            expected=f"{', '.join(TRAINED)}, a folder or a Hub id",
            advice="Check the name and the connection",
            code="tokenizer_not_loaded",
        ) from None


def read_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without the tokens that some tokenizers add around one."""
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def fingerprint(tokenizer: Any) -> str:
    """Return a digest of what ids mean and how text is split, which saving and loading do not change."""
    content = (sorted(tokenizer.get_vocab().items()), encode_texts(tokenizer, [PROBE]), tokenizer.eos_token_id)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _hub_answers() -> bool:
    """Return whether the Hub answers. It is asked in a thread, because looking up its address has no time limit."""
    answers = []

    def ask() -> None:
        with suppress(Exception):
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return bool(answers)
