"""Where the keys of a second moment come from: the model's own samples, a text file, a dataset."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.models.generation import sample


class Corpus(Protocol):
    """Windows of token ids, the same ones in the same order every time."""

    @property
    def digest(self) -> str:
        """Changes when the text does."""

    def windows(self, model: Any, tokenizer: Any, start: Sequence[int], width: int, skip: int) -> Iterator[Tensor]:
        """Batches [rows, width] of ids, `start` in front of every row, from the `skip`-th batch on."""


@dataclass(frozen=True)
class OwnSamples:
    """Text that the model says when nobody asks: needs no data, and has the model's own distribution of keys."""

    seed: int = 0
    rows: int = 64  # sampled side by side

    @property
    def digest(self) -> str:
        return f"own-samples-{self.seed}-{self.rows}"

    @classmethod
    def from_digest(cls, digest: str) -> OwnSamples | None:
        """The samples that a digest names; none where it names another corpus.

        >>> OwnSamples.from_digest("own-samples-0-1024")
        OwnSamples(seed=0, rows=1024)
        """
        found = re.fullmatch(r"own-samples-(-?\d+)-(\d+)", digest)
        return None if found is None else cls(seed=int(found[1]), rows=int(found[2]))

    def windows(self, model: Any, tokenizer: Any, start: Sequence[int], width: int, skip: int) -> Iterator[Tensor]:
        device = model.get_input_embeddings().weight.device
        first = _first_tokens(tokenizer, model)
        batch = skip
        while True:
            chosen = torch.randint(
                len(first), (self.rows,), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + batch)
            )
            begin = first[chosen].unsqueeze(-1).to(device)
            text = sample(model, start, begin, width - len(start), seed=self.seed * 1_000_003 + batch)
            yield torch.cat([torch.tensor([list(start)] * self.rows, dtype=torch.long, device=device), text], dim=-1)
            batch += 1


@dataclass(frozen=True)
class Texts:
    """Documents, packed one after another into windows."""

    documents: Sequence[str]
    name: str
    rows: int = 8

    @classmethod
    def from_file(cls, path: str | Path) -> Texts:
        """A text file; blank lines part its documents."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"corpus {path} is not a file, expected plain text: check the path")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as problem:
            raise InputError(f"corpus {path} is not UTF-8 text ({problem.reason}): convert it first") from None
        documents = [part.strip() for part in text.split("\n\n") if part.strip()]
        if not documents:
            raise InputError(f"corpus {path} holds no text: pass a file with some thousands of words")
        return cls(documents, path.name)

    @classmethod
    def from_dataset(cls, dataset: Iterable[dict[str, Any]], column: str = "text", *, name: str = "dataset") -> Texts:
        """Rows of a Hugging Face dataset (or any dictionaries) with a column of text."""
        documents = []
        for row in dataset:
            if column not in row:
                raise InputError(f"{name} has columns {', '.join(row)}, no {column!r}: name the one with the text")
            if row[column].strip():
                documents.append(row[column])
        if not documents:
            raise InputError(f"{name} holds no text in column {column!r}: pass rows with some thousands of words")
        return cls(documents, name)

    @property
    def digest(self) -> str:
        whole = hashlib.sha256()
        for document in self.documents:
            whole.update(document.encode())
            whole.update(b"\0")
        return f"text-{whole.hexdigest()[:32]}-{self.rows}"

    def windows(self, model: Any, tokenizer: Any, start: Sequence[int], width: int, skip: int) -> Iterator[Tensor]:
        device = model.get_input_embeddings().weight.device
        body = width - len(start)
        pending: list[int] = []
        rows: list[list[int]] = []
        batch = 0
        for document in self.documents:
            pending += [*start, *tokenizer(document, add_special_tokens=False).input_ids]
            while len(pending) >= body:
                rows.append([*start, *pending[:body]])
                pending = pending[body:]
                if len(rows) == self.rows:
                    if batch >= skip:
                        yield torch.tensor(rows, device=device)
                    batch, rows = batch + 1, []
        if rows and batch >= skip:
            yield torch.tensor(rows, device=device)
        if batch == 0 and not rows and len(pending) > len(start):  # one short document
            yield torch.tensor([[*start, *pending]], device=device)


def _first_tokens(tokenizer: Any, model: Any) -> Tensor:
    """Tokens a text may begin with: words with a capital, as the tokenizer has them."""
    words = (
        "The",
        "A",
        "In",
        "It",
        "He",
        "She",
        "They",
        "We",
        "I",
        "You",
        "This",
        "That",
        "There",
        "When",
        "What",
        "How",
    )
    ids = [tokenizer(word, add_special_tokens=False).input_ids for word in words]
    size = model.get_input_embeddings().weight.shape[0]
    usable = sorted({row[0] for row in ids if row and row[0] < size})
    return torch.tensor(usable or [0])
