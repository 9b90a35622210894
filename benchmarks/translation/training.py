"""Training of a translation model: its settings, its data, and the checkpoint with the best validation loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.translation.data import END, PAD, SPLITS, START, Corpus, Pair, shared_tokenizer
from rebind.errors import InputError
from rebind.nn import RebindForSeq2SeqLM, RebindSeq2SeqConfig
from rebind.nn.training import OptimizerConfig

CHECKS = 10  # how often the validation loss is measured in a run, the last step included


@dataclass(frozen=True)
class Settings:
    """Everything that a result depends on besides kind and seed."""

    steps: int = 1_600
    tokens: int = 16_384  # per batch: source and target, padding included
    rate: float = 1e-3
    warmup: int = 200  # steps, followed by a cosine down to 0
    vocabulary: int = 8_000
    hidden: int = 256
    layers: int = 3  # of the encoder, and of the decoder
    heads: int = 4
    ff: int = 1_024
    dropout: float = 0.3
    smoothing: float = 0.1
    favor: int = 128  # m: features 256 wide for heads of 64, the smallest of Schlag et al.
    nu: int = 2  # ν: the same width
    beams: int = 5
    longest: int = 96  # tokens of a training sentence; longer pairs are left out

    def config(self, kind: str, vocabulary: int) -> RebindSeq2SeqConfig:
        return RebindSeq2SeqConfig(
            vocab_size=vocabulary, attention=kind, hidden_size=self.hidden, encoder_layers=self.layers,
            decoder_layers=self.layers, num_attention_heads=self.heads, intermediate_size=self.ff,
            dropout=self.dropout, label_smoothing=self.smoothing, favor_features=self.favor, dpfp_nu=self.nu,
            pad_token_id=PAD, bos_token_id=START, eos_token_id=END, decoder_start_token_id=START,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Task:
    """The data of a run."""

    tokenizer: Tokenizer
    train: Corpus
    valid: Corpus
    test: Corpus
    references: list[str]

    @classmethod
    def of(cls, pairs: Mapping[str, Sequence[Pair]], settings: Settings, cache: Path, device: torch.device) -> Task:
        tokenizer = shared_tokenizer(pairs["train"], settings.vocabulary, cache)
        train, valid, test = (
            Corpus.of(tokenizer, pairs[split], device, settings.longest if split == "train" else None)
            for split in SPLITS
        )
        return cls(tokenizer, train, valid, test, [reference for _, reference in pairs[SPLITS[2]]])


def train(
    model: RebindForSeq2SeqLM,
    corpus: Corpus,
    valid: Corpus,
    settings: Settings,
    seed: int,
    report: Callable[[int, float | None], None],
) -> tuple[float, int]:
    """Train, and leave the model at its best checkpoint; return the validation loss of that, and its step."""
    device = corpus.source.device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, settings))
    checks = {max(1, round(settings.steps * part / CHECKS)) for part in range(1, CHECKS + 1)}
    best, best_step, best_weights = float("inf"), 0, {}
    model.train()
    for step, batch in enumerate(_endless(corpus, settings.tokens, seed), 1):
        with autocast(device):
            loss = model(**batch).loss
        with torch.autograd.set_multithreading_enabled(
            False
        ):  # operators in Python are slower in autograd's own thread
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step in checks and (now := valid_loss(model, valid, settings.tokens)) < best:
            best, best_step = now, step
            best_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        report(step, best if step in checks else None)
        if step == settings.steps:
            break
    if not best_weights:
        raise InputError(
            "The validation loss was never finite",
            advice="Choose a smaller {rate}",
            settings={"rate": settings.rate / 10},
            code="training_diverged",
        )
    model.load_state_dict(best_weights)
    return best, best_step


def _endless(corpus: Corpus, tokens: int, seed: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from corpus.batches(tokens, generator)


def rate(step: int, settings: Settings) -> float:
    """Return the learning rate as a fraction of the highest: a linear warm-up, then a cosine."""
    warmup = min(settings.warmup, settings.steps // 4)
    return OptimizerConfig(learning_rate=1.0, warmup=warmup, final_fraction=0.0).learning_rate_at(step, settings.steps)


@torch.no_grad()
def valid_loss(model: RebindForSeq2SeqLM, corpus: Corpus, tokens: int) -> float:
    """Return the mean cross-entropy per target token."""
    model.train(False)
    device = corpus.source.device
    total = torch.zeros((), device=device, dtype=torch.float64)
    with autocast(device):
        for batch in corpus.batches(tokens):
            total += model(**batch, num_items_in_batch=1).loss
    model.train()
    return float(total) / int(corpus.lengths[:, 1].sum())


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
