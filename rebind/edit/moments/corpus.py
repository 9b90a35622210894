"""The text that old keys are computed from: samples from the model itself, a text file, or a dataset."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.models.language_model import LanguageModel

PRONOUNS = ("It", "He", "She", "They", "We", "I", "You", "This", "That", "There")
FIRST_WORDS = ("The", "A", "In", *PRONOUNS, "When", "What", "How")  # a text may begin with them


class Corpus(Protocol):
    """Windows of token ids: the same ones in the same order every time."""

    @property
    def digest(self) -> str:
        """A name that changes when the text changes."""

    def windows(self, model: LanguageModel, width: int, skip: int) -> Iterator[Tensor]:
        """Yield batches of ids [rows, width], each row beginning with the start tokens, from batch `skip` on."""


@dataclass(frozen=True)
class OwnSamples:
    """Text that the model writes by itself: needs no data, and has the model's own distribution of keys."""

    seed: int = 0
    rows: int = 64  # sampled side by side

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

    def windows(self, model: LanguageModel, width: int, skip: int) -> Iterator[Tensor]:
        first_tokens = _first_tokens(model)
        start = torch.tensor(model.start, dtype=torch.long, device=model.device).expand(self.rows, -1)
        batch = skip
        while True:
            seed = self.seed * 1_000_003 + batch
            chosen = torch.randint(len(first_tokens), (self.rows,), generator=torch.Generator().manual_seed(seed))
            first = first_tokens[chosen].unsqueeze(-1).to(model.device)
            yield torch.cat([start, model.sample(first, width - len(model.start), seed=seed)], dim=-1)
            batch += 1


def _first_tokens(model: LanguageModel) -> Tensor:
    rows = [model.tokenizer(word, add_special_tokens=False).input_ids for word in FIRST_WORDS]
    vocabulary = model.model.get_input_embeddings().weight.shape[0]
    return torch.tensor(sorted({row[0] for row in rows if row and row[0] < vocabulary}) or [0])


@dataclass(frozen=True)
class Texts:
    """Documents, packed one after another into windows."""

    documents: Sequence[str]
    name: str
    rows: int = 8

    @classmethod
    def from_file(cls, path: str | Path) -> Texts:
        """Read a text file; blank lines separate its documents."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"Corpus {path} is not a file", expected="a plain text file", code="corpus_not_found")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as problem:
            raise InputError(
                f"Corpus {path} is not UTF-8 text ({problem.reason})", advice="Convert it first", code="corpus_not_utf8"
            ) from None
        return cls._require_text([part.strip() for part in text.split("\n\n")], path.name)

    @classmethod
    def from_dataset(
        cls, dataset: Iterable[Mapping[str, Any]], column: str = "text", *, name: str = "dataset"
    ) -> Texts:
        """Read a column of a Hugging Face dataset, or of any dictionaries."""
        try:
            return cls._require_text([row[column] for row in dataset], name)
        except KeyError:
            raise InputError(f"Corpus {name} has no column {column!r}", code="unknown_column") from None

    @classmethod
    def _require_text(cls, documents: Sequence[str], name: str) -> Texts:
        if not (kept := [document for document in documents if document.strip()]):
            raise InputError(f"Corpus {name} holds no text", expected="some thousands of words", code="empty_corpus")
        return cls(kept, name)

    @property
    def digest(self) -> str:
        whole = hashlib.sha256()
        for document in self.documents:
            whole.update(document.encode())
            whole.update(b"\0")
        return f"text-{whole.hexdigest()[:32]}-{self.rows}"

    def windows(self, model: LanguageModel, width: int, skip: int) -> Iterator[Tensor]:
        rows = self._rows(model, width)
        for batch in itertools.count():
            part = list(itertools.islice(rows, self.rows))
            if not part:
                return
            if batch >= skip:
                yield torch.tensor(part, device=model.device)

    def _rows(self, model: LanguageModel, width: int) -> Iterator[list[int]]:
        start, body = model.start, width - len(model.start)
        pending: list[int] = []
        is_short = True  # all documents together fill no window
        for document in self.documents:
            pending += [*start, *model.tokenizer(document, add_special_tokens=False).input_ids]
            while len(pending) >= body:
                yield [*start, *pending[:body]]
                pending, is_short = pending[body:], False
        if is_short and len(pending) > len(start):
            yield [*start, *pending]
