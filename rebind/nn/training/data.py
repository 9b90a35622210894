"""From text to batches. A text is tokenized once and cached as a memory-mapped array.

A batch is a function of the step, so the step is all that a run needs to know to continue where it stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rebind.errors import InputError
from rebind.nn.training.config import DataConfig
from rebind.storage import create_folder

HUB = "hf:"
PIECE = 1 << 16  # characters of a file that are tokenized together, up to the end of their line
PIECES_PER_CALL = 64  # of the tokenizer
TOKENS = "tokens.bin"  # of a text in the cache
END_OF_TEXT = "<|end|>"
TRAINED_TOKENIZERS = ("bpe", "characters")
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # of a repository of the Hub
FINGERPRINT_TEXT = (  # words, case, accents, numbers, spaces, scripts, signs
    "The quick brown fox, 1234567890 times: naïve café's ÉCOLE!\n\n\tdef f(x): return x**2  # 日本語 🙂 Привет\r\n"
    "  don't STOP internationalization; unbelievable, thoroughly (re)tokenized text…"
)

TokenArray = np.ndarray[Any, Any]  # [n]


@dataclass(frozen=True)
class TextSource:
    """A text that can be read more than once, and a digest of its content."""

    name: str
    digest: str
    rows: Any = None  # of a dataset of the Hub

    @classmethod
    def open(cls, name: str) -> TextSource:
        """Open a UTF-8 file, or a dataset of the Hub as "hf:name:split"."""
        if name.startswith(HUB):
            return cls._open_dataset(name)
        try:
            with Path(name).open("rb") as file:
                return cls(name, hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as problem:
            raise InputError(
                f"{name} cannot be read: {problem.strerror}",
                expected="a text file, or hf:name:split for a dataset of the Hub",
                code="unreadable_text",
            ) from None

    @classmethod
    def _open_dataset(cls, name: str) -> TextSource:
        try:
            import datasets  # type: ignore[import-not-found, unused-ignore]  # needed for datasets of the Hub alone

            repository, _, split = name.removeprefix(HUB).partition(":")
            rows = datasets.load_dataset(repository, split=split or "train")
            if "text" not in rows.column_names:
                raise LookupError(f"it has no column text, but {', '.join(rows.column_names)}")
        except Exception as problem:  # not installed, missing, gated, offline: each has an exception of its own
            reason = str(problem).strip().partition("\n")[0]
            raise InputError(
                f"Dataset {name} cannot be loaded: {reason}",
                expected="a name such as hf:roneneldan/TinyStories:train, and the package datasets installed",
                advice="Check the name and the connection, or use a text file",
                code="dataset_not_loaded",
            ) from None
        return cls(name, f"{name}@{rows._fingerprint}", rows)

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield pieces of text, and whether a document ends with each; a file is one document."""
        if self.rows is not None:
            yield from ((row["text"], True) for row in self.rows)
            return
        try:
            with Path(self.name).open(encoding="utf-8", newline="") as file:
                while piece := file.read(PIECE):
                    yield piece + file.readline(), False
        except UnicodeDecodeError as problem:
            raise InputError(f"{self.name} is not UTF-8: {problem}", advice="Convert it", code="not_utf8") from None
        yield "", True


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """The tokens to train on and those to validate on."""

    train: TokenArray
    validation: TokenArray
    tokenizer: Any
    digest: str  # of the texts and the tokenizer


def prepare_text(config: DataConfig, cache: Path) -> TokenizedText:
    """Tokenize the text of a config, or find its tokens in the cache."""
    source = TextSource.open(config.source)
    tokenizer = _tokenizer(config, source, cache)
    train = _tokens(source, tokenizer, cache)
    if config.validation is None:
        split = max(len(train) - max(int(len(train) * config.validation_fraction), 2), 0)
        train, validation, digest = train[:split], train[split:], source.digest
    else:
        other = TextSource.open(config.validation)
        validation, digest = _tokens(other, tokenizer, cache), source.digest + other.digest
        if len(validation) < 2:
            raise InputError(f"{other.name} has {len(validation)} tokens", expected="2 or more", code="text_too_short")
    return TokenizedText(train, validation, tokenizer, _digest(digest, tokenizer_fingerprint(tokenizer)))


def _tokenizer(config: DataConfig, source: TextSource, cache: Path) -> Any:
    """Train the tokenizer of a config on its text, find it in the cache, or load it."""
    if config.tokenizer not in TRAINED_TOKENIZERS:
        return load_tokenizer(config.tokenizer)
    vocabulary = config.vocabulary if config.tokenizer == "bpe" else 0
    folder = cache / f"tokenizer-{_digest(source.digest, config.tokenizer, vocabulary)}"

    def fill(folder: Path) -> None:
        texts = (text for text, _ in source.pieces())
        _train_tokenizer(config.tokenizer, texts, vocabulary).save_pretrained(folder)

    create_folder(folder, fill, sealed=True)
    return load_tokenizer(str(folder))


def _train_tokenizer(kind: str, texts: Iterable[str], vocabulary: int) -> Any:
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
            folder = Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES))
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # missing, offline, gated, no tokenizer: each has an exception of its own
        if "trust_remote_code" in str(problem):
            raise InputError(
                f"Tokenizer {name!r} needs code of its own, and rebind runs no code from model folders",
                expected="a tokenizer.json, or a tokenizer whose code is in transformers",
                advice="Choose another tokenizer",
                code="needs_code",
            ) from None
        reason = str(problem).strip().partition("\n")[0]
        raise InputError(
            f"Tokenizer {name!r} cannot be loaded: {reason}",
            expected=f"{', '.join(TRAINED_TOKENIZERS)}, a folder or a Hub id",
            advice="Check the name and the connection",
            code="tokenizer_not_loaded",
        ) from None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a digest of what ids mean and how text is split, which saving and loading do not change."""
    vocabulary, probe = sorted(tokenizer.get_vocab().items()), _encode(tokenizer, [FINGERPRINT_TEXT])
    return _digest(vocabulary, probe, tokenizer.eos_token_id)


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without the tokens that some tokenizers add around one."""
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _tokens(source: TextSource, tokenizer: Any, cache: Path) -> TokenArray:
    """Return the ids of all documents, each followed by the end of text if the tokenizer has one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = "" if backend is None else backend.to_str()  # also those that the fingerprint may not notice
    folder = cache / f"tokens-{_digest(source.digest, tokenizer_fingerprint(tokenizer), rules)}"
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")

    def fill(folder: Path) -> None:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        pieces = source.pieces()
        with (folder / TOKENS).open("wb") as file:
            while group := list(islice(pieces, PIECES_PER_CALL)):
                encoded = _encode(tokenizer, [text for text, _ in group])
                for ids, (_, ends) in zip(encoded, group, strict=True):
                    file.write(np.asarray(ids + end if ends else ids, dtype=dtype).tobytes())

    create_folder(folder, fill, sealed=True)  # of a file that was cut off, nobody would miss the rest
    return np.memmap(folder / TOKENS, dtype=dtype, mode="r")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The tokens of some segments, and the token that follows each."""

    inputs: Tensor  # [rows, length]
    targets: Tensor  # [rows, length]
    starts: bool  # whether states start empty here


class SegmentBatches:
    """Batches of segments in an order that depends on the seed; `batch(step)` works for any step.

    Shuffled, every epoch is a permutation of all segments. In lanes, row i of every batch continues row i of the batch
    before, as carried states need it: the text is split into as many stretches as a batch has rows.
    """

    def __init__(self, tokens: TokenArray, length: int, rows: int, *, seed: int = 0, lanes: bool = False) -> None:
        self.tokens, self.length, self.rows, self.seed, self.lanes = tokens, length, rows, seed, lanes
        self.count = max(len(tokens) - 1, 0) // length  # the last token of a segment needs a target, too
        if self.count < (needed := rows if lanes else 1):
            expected = f"at least {needed * length + 1:,}, for {needed} segments of {length}"
            problem = f"The text has {len(tokens):,} tokens to train on"
            raise InputError(problem, expected=expected, advice="Use a longer text", code="text_too_short")
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    @property
    def steps_per_epoch(self) -> float:
        return self.count // self.rows if self.lanes else self.count / self.rows

    def batch(self, step: int) -> TokenBatch:
        """Return the batch of a step, for all processes together."""
        length, lane = self.length, self.count // self.rows
        if self.lanes:
            segments = [row * lane + step % lane for row in range(self.rows)]
        else:
            segments = [self._shuffled(step * self.rows + row) for row in range(self.rows)]
        cuts = [self.tokens[index * length : (index + 1) * length + 1].astype(np.int64) for index in segments]
        tokens = torch.from_numpy(np.stack(cuts))
        return TokenBatch(tokens[:, :-1], tokens[:, 1:], starts=not self.lanes or step % lane == 0)

    def _shuffled(self, index: int) -> int:
        epoch, position = divmod(index, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator)
        return int(self._order[position])
