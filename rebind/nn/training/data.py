"""From text to batches: read once, tokenized once, kept as a memory-mapped array under a digest of all that made it.

A batch is a function of the step: nothing but a number has to be remembered to go on where a run was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.files import write_folder_atomically
from rebind.nn.training import tokenizers
from rebind.nn.training.config import DataConfig

HUB = "hf:"
PIECE = 1 << 16  # characters that are encoded together, to the end of their line
FORMAT = 1  # of what is kept; a new one when tokens would come out differently


# Text


@dataclass(frozen=True)
class Source:
    """Texts that can be read more than once, and a digest of what they say."""

    name: str
    digest: str
    rows: Any = None  # of a dataset of the Hub

    @classmethod
    def of(cls, name: str) -> Source:
        if name.startswith(HUB):
            return _hub(name)
        try:
            with Path(name).open("rb") as file:
                return cls(name, hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as problem:
            raise InputError(
                f"corpus {name} cannot be read ({problem.strerror}), expected a text file or hf:name:split: check it"
            ) from None

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Text after text, and whether a document ends with it; a file is one document."""
        if self.rows is None:
            yield from ((piece, False) for piece in self._file())
            yield "", True
        else:
            yield from ((row["text"], True) for row in self.rows)

    def texts(self) -> Iterator[str]:
        return (text for text, _ in self.pieces())

    def _file(self) -> Iterator[str]:
        try:
            with Path(self.name).open(encoding="utf-8", newline="") as file:
                while piece := file.read(PIECE):
                    yield piece + file.readline()
        except UnicodeDecodeError as problem:
            raise InputError(f"corpus {self.name} is not UTF-8 text ({problem}): convert it") from None


def _hub(name: str) -> Source:
    repository, _, split = name.removeprefix(HUB).partition(":")
    if not repository:
        raise InputError(f"dataset is {name!r}, expected a name as in 'hf:roneneldan/TinyStories:train': name one")
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]  # not one of ours: only for those who use it
    except ImportError:
        raise InputError(
            f"{name} is a dataset of the Hub, which needs the package datasets: pip install datasets, or pass a file"
        ) from None
    try:
        rows = datasets.load_dataset(repository, split=split or "train")
    except Exception as problem:  # missing, gated, offline: each with an exception of its own
        line = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise InputError(
            f"dataset {repository!r}, split {split or 'train'!r}, cannot be had ({line}): check the name and the "
            f"split (hf:name:split), connect, or pass a file"
        ) from None
    if "text" not in rows.column_names:
        raise InputError(
            f"dataset {name} has the columns {', '.join(rows.column_names)}, expected one named text: make a file"
        )
    return Source(name, f"{name}@{rows._fingerprint}", rows)


# Tokens


@dataclass(frozen=True, eq=False)
class Corpus:
    """What is trained on and what is held, in a tokenizer's ids."""

    train: np.ndarray[Any, Any]  # [n], memory-mapped
    held: np.ndarray[Any, Any]
    tokenizer: Any
    digest: str  # of the texts and the tokenizer
    tokenizer_digest: str


def prepare(config: DataConfig, cache: Path) -> Corpus:
    """The corpus of a config, tokenized now or found in the cache."""
    source = Source.of(config.source)
    tokenizer = _tokenizer(config, source, cache)
    mark = tokenizers.fingerprint(tokenizer)
    train = _tokens(source, tokenizer, cache)
    if config.validation is None:
        cut = len(train) - max(int(len(train) * config.held), 2)
        train, held, digest = train[: max(cut, 0)], train[max(cut, 0) :], source.digest
    else:
        other = Source.of(config.validation)
        held, digest = _tokens(other, tokenizer, cache), source.digest + other.digest
    return Corpus(train, held, tokenizer, _digest(digest, mark), mark)


def _tokenizer(config: DataConfig, source: Source, cache: Path) -> Any:
    if config.tokenizer not in tokenizers.TRAINED:
        return tokenizers.given(config.tokenizer)
    size = config.vocabulary if config.tokenizer == "bpe" else 0
    folder = cache / f"tokenizer-{_digest(source.digest, config.tokenizer, size)}"

    def fill(folder: Path) -> None:
        _require_text(source)
        texts = source.texts()
        made = tokenizers.bpe(texts, size) if config.tokenizer == "bpe" else tokenizers.characters(texts)
        made.save_pretrained(folder)

    write_folder_atomically(folder, fill)
    return tokenizers.read_tokenizer(folder)


def _tokens(source: Source, tokenizer: Any, cache: Path) -> np.ndarray[Any, Any]:
    """The ids of all documents, each followed by the tokenizer's end, if it has one."""
    mark = tokenizers.exact(tokenizer)
    folder = cache / f"tokens-{_digest(source.digest, mark)}"
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")

    def fill(folder: Path) -> None:
        _require_text(source)
        count, end = 0, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        with (folder / "tokens.bin").open("wb") as file:
            for ids, ends in tokenizers.encode(tokenizer, source.pieces()):
                whole = np.asarray(ids + end if ends else ids, dtype=dtype)
                count += len(whole)
                file.write(whole.tobytes())
        told = {"source": source.name, "tokens": count, "dtype": dtype.str, "tokenizer": mark}
        (folder / "tokens.json").write_text(json.dumps(told, indent=1), encoding="utf-8")

    write_folder_atomically(folder, fill)
    return np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")


def _require_text(source: Source) -> None:
    if not any(text.strip() for text in source.texts()):
        raise InputError(f"corpus {source.name} is empty, expected text: check the file")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr((FORMAT, *parts)).encode()).hexdigest()[:16]


# Batches


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens, what follows each, and whether memories begin anew here."""

    inputs: Tensor  # [rows, length]
    targets: Tensor  # [rows, length]
    begins: bool


class Segments:
    """Batches of segments in an order that the seed decides; `batch(step)` can be asked for any step.

    Shuffled, every epoch is a permutation of all segments. In lanes, row i of all batches reads one stretch of the
    corpus from its beginning to its end, segment after segment, as carried memories need.
    """

    def __init__(
        self, tokens: np.ndarray[Any, Any], length: int, rows: int, *, seed: int = 0, lanes: bool = False
    ) -> None:
        self.tokens, self.length, self.rows, self.seed, self.lanes = tokens, length, rows, seed, lanes
        self.count = max(len(tokens) - 1, 0) // length  # segments, each seeing one token of the next as a target
        needed = rows if lanes else 1
        if self.count < needed:
            segments = "one segment" if needed == 1 else f"{needed} segments"
            raise InputError(
                f"the corpus has {len(tokens):,} tokens to train on, expected at least {needed * length + 1:,} for "
                f"{segments} of {length}: give more text, or a smaller length{' or batch' if lanes else ''}"
            )
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    @property
    def steps_an_epoch(self) -> float:
        return self.count // self.rows if self.lanes else self.count / self.rows

    def batch(self, step: int) -> Batch:
        """The batch of a step, all its rows."""
        if self.lanes:
            lane = self.count // self.rows
            chosen = [row * lane + step % lane for row in range(self.rows)]
            return self._cut(chosen, begins=step % lane == 0)
        first = step * self.rows
        return self._cut([self._segment(first + row) for row in range(self.rows)], begins=True)

    def _segment(self, index: int) -> int:
        epoch, place = divmod(index, self.count)
        if epoch != self._epoch:
            drawn = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=drawn)
        return int(self._order[place])

    def _cut(self, chosen: list[int], *, begins: bool) -> Batch:
        cuts = [self.tokens[i * self.length : (i + 1) * self.length + 1].astype(np.int64) for i in chosen]
        whole = torch.from_numpy(np.stack(cuts))
        return Batch(whole[:, :-1], whole[:, 1:], begins)
