"""The text that old keys are computed from: samples from the model itself, or documents."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.models.language_model import LanguageModel

PRONOUNS = ("It", "He", "She", "They", "We", "I", "You", "This", "That", "There")
FIRST_WORDS = ("The", "A", "In", *PRONOUNS, "When", "What", "How")  # a text may begin with them


class Corpus(Protocol):
    """A text as windows of token ids, the same windows in the same order every time."""

    @property
    def rows(self) -> int:
        """The number of windows in a batch."""

    @property
    def digest(self) -> str:
        """A string that changes when the text changes."""

    def windows(self, model: LanguageModel, width: int, batches: Iterable[int]) -> Iterator[Tensor]:
        """Yield token ids [rows, width] of each of `batches`, in ascending order; rows begin with the start tokens.

        All batches have the same number of rows, except for the last one of a text.
        """


@dataclass(frozen=True)
class OwnSamples:
    """Text sampled from the model: it needs no data, and has the distribution of keys of the model."""

    seed: int = 0
    rows: int = 64  # sampled in one batch

    @property
    def digest(self) -> str:
        return f"own-samples-{self.seed}-{self.rows}"

    @classmethod
    def from_digest(cls, digest: str) -> OwnSamples | None:
        """Return the samples with this digest; None if it belongs to another kind of corpus.

        >>> OwnSamples.from_digest("own-samples-0-1024")
        OwnSamples(seed=0, rows=1024)
        """
        match = re.fullmatch(r"own-samples-(-?\d+)-(\d+)", digest)
        return None if match is None else cls(seed=int(match[1]), rows=int(match[2]))

    def windows(self, model: LanguageModel, width: int, batches: Iterable[int]) -> Iterator[Tensor]:
        first_tokens = _first_tokens(model)
        start = torch.tensor(model.start, dtype=torch.long, device=model.device).expand(self.rows, -1)
        for batch in batches:
            seed = self.seed * 1_000_003 + batch
            indices = torch.randint(len(first_tokens), (self.rows,), generator=torch.Generator().manual_seed(seed))
            first = first_tokens[indices].unsqueeze(-1).to(model.device)
            yield torch.cat([start, model.sample(first, width - len(model.start), seed=seed)], dim=-1)


def _first_tokens(model: LanguageModel) -> Tensor:
    rows = [model.tokenizer(word, add_special_tokens=False).input_ids for word in FIRST_WORDS]
    vocabulary = model.model.get_input_embeddings().weight.shape[0]
    return torch.tensor(sorted({row[0] for row in rows if row and row[0] < vocabulary}) or [0])


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(
            f"{path} cannot be read ({problem})", expected="a plain text file in UTF-8", code="unreadable_corpus"
        ) from None


@dataclass(frozen=True)
class Texts:
    """Documents, packed one after another into windows."""

    documents: Sequence[str]
    name: str
    rows: int = 8

    @classmethod
    def from_file(cls, path: str | Path) -> Texts:
        """Read a text file; blank lines separate its documents."""
        return cls._of(read_text(path).split("\n\n"), Path(path).name)

    @classmethod
    def from_dataset(
        cls, dataset: Iterable[Mapping[str, str]], column: str = "text", *, name: str = "dataset"
    ) -> Texts:
        """Read one column of a Hugging Face dataset, or of any rows; each row is a document."""
        return cls._of([row[column] for row in dataset], name)

    @classmethod
    def _of(cls, parts: Iterable[str], name: str) -> Texts:
        documents = [document for part in parts if (document := part.strip())]
        if not documents:
            raise InputError(f"Corpus {name} has no text", expected="some thousands of words", code="empty_corpus")
        return cls(documents, name)

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.encode())
            digest.update(b"\0")
        return f"text-{digest.hexdigest()[:32]}-{self.rows}"

    def windows(self, model: LanguageModel, width: int, batches: Iterable[int]) -> Iterator[Tensor]:
        rows, position = self._rows(model, width), 0
        for batch in batches:
            first = (batch - position) * self.rows
            if not (window_ids := list(itertools.islice(rows, first, first + self.rows))):
                return
            yield torch.tensor(window_ids, device=model.device)
            position = batch + 1

    def _rows(self, model: LanguageModel, width: int) -> Iterator[list[int]]:
        start, body = model.start, width - len(model.start)
        pending: list[int] = []
        is_short = True  # whether all documents together do not fill a window
        for document in self.documents:
            pending += [*start, *model.tokenizer(document, add_special_tokens=False).input_ids]
            while len(pending) >= body:
                yield [*start, *pending[:body]]
                pending, is_short = pending[body:], False
        if is_short and len(pending) > len(start):
            yield [*start, *pending]
