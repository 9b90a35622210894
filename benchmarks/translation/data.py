"""Sentence pairs of Multi30k: read from files, turned into tokens of one vocabulary, batched by length."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from rebind.errors import InputError
from rebind.storage import write_file

SPECIAL = ("<pad>", "<s>", "</s>")
PAD, START, END = range(3)
SPLITS = ("train", "val", "test_2016_flickr")
LANGUAGES = ("de", "en")
ROUND = 8  # lengths of batches are multiples of this: few shapes, and good ones for tensor cores

Pair = tuple[str, str]


def read_pairs(folder: Path, split: str) -> list[Pair]:
    """Return the sentence pairs of a split from SPLIT.de and SPLIT.en, plain or .gz, without pairs that lack a side."""
    sides = [_lines(folder, f"{split}.{language}") for language in LANGUAGES]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{split} has {len(sides[0])} German and {len(sides[1])} English lines",
            expected="equal numbers, as in the files of one release",
            code="uneven_sides",
        )
    return [(one, other) for one, other in zip(*sides, strict=True) if one and other]


def read_splits(folder: Path) -> dict[str, list[Pair]]:
    """Return the pairs of every split."""
    return {split: read_pairs(folder, split) for split in SPLITS}


def digest_of(pairs: Mapping[str, Sequence[Pair]]) -> str:
    """Return a digest of all pairs and their order, which differs between releases of the data."""
    return hashlib.sha256(repr([(split, list(pairs[split])) for split in SPLITS]).encode()).hexdigest()


def _lines(folder: Path, name: str) -> list[str]:
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            return [line.strip() for line in data.decode().rstrip("\n").split("\n")]
    raise InputError(
        f"{folder} has neither {name}.gz nor {name}",
        expected=f"the raw files of Multi30k: {', '.join(SPLITS)}, each as .de and .en",
        advice="Choose another {data}",
        settings={"data": None},
        code="no_data",
    )


def shared_tokenizer(pairs: Sequence[Pair], vocabulary: int, folder: Path) -> Tokenizer:
    """Return a byte-level BPE of both languages, trained on these pairs or read from the file of an earlier run."""
    digest = hashlib.sha256(repr((vocabulary, list(pairs))).encode()).hexdigest()[:16]
    path = folder / f"tokenizer-{digest}.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((side for pair in pairs for side in pair), trainer)
    write_file(path, tokenizer.to_str().encode())
    return tokenizer


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of pairs, padded, on the device; lengths on the CPU, where batches are planned."""

    source: Tensor  # [N, S]
    target: Tensor  # [N, T], with the end token
    lengths: Tensor  # [N, 2] on the CPU

    @classmethod
    def of(cls, tokenizer: Tokenizer, pairs: Sequence[Pair], device: torch.device, longest: int | None) -> Corpus:
        sides = [tokenizer.encode_batch_fast([pair[side] for pair in pairs]) for side in range(2)]
        ids = [([*one.ids, END], [*other.ids, END]) for one, other in zip(*sides, strict=True)]
        ids = [pair for pair in ids if longest is None or max(map(len, pair)) <= longest]
        if not ids:
            raise InputError(
                f"No pair has at most {longest} tokens per side",
                advice="Choose a larger {longest}",
                settings={"longest": None},
                code="pairs_too_long",
            )
        source, target = (_padded([pair[side] for pair in ids]).to(device) for side in range(2))
        return cls(source, target, torch.tensor([[len(one), len(other)] for one, other in ids]))

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, tokens: int, generator: torch.Generator | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield batches of at most `tokens`, with pairs of similar lengths together, at random with a generator.

        Only the order of the rows is sent to the device, once, so that nothing waits for it.
        """
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        widths = _rounded(self.lengths)[order]
        order, widths = (x[torch.argsort(widths @ torch.tensor([1, 1_000]), stable=True)] for x in (order, widths))
        cuts = _cuts(widths.tolist(), tokens)
        spans = list(pairwise(cuts))
        if generator is not None:
            spans = [spans[place] for place in torch.randperm(len(spans), generator=generator).tolist()]
        rows = order.to(self.source.device)
        for begin, end in spans:
            wide, long = widths[begin:end].amax(0).tolist()
            source, target = self.source[rows[begin:end], :wide], self.target[rows[begin:end], :long]
            labels = target.masked_fill(target == PAD, -100)
            yield {"input_ids": source, "attention_mask": source != PAD, "labels": labels}


def _cuts(widths: list[list[int]], tokens: int) -> list[int]:
    """Return where batches begin, and the end; each has as many rows as fit when padded to the widest of them."""
    cuts, wide, long = [0], 0, 0
    for place, (source, target) in enumerate(widths):
        wide, long = max(wide, source), max(long, target)
        if (place + 1 - cuts[-1]) * (wide + long) > tokens and place > cuts[-1]:
            cuts.append(place)
            wide, long = source, target
    return [*cuts, len(widths)]


def _rounded(lengths: Tensor) -> Tensor:
    return (lengths + ROUND - 1) // ROUND * ROUND


def _padded(rows: list[list[int]]) -> Tensor:
    width = int(_rounded(torch.tensor(max(map(len, rows)))))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
