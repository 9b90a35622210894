"""Runs: train one kind of attention from one seed, translate the test set and score it; and the file of all runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.translation.data import PAD, Corpus
from benchmarks.translation.training import Settings, Task, autocast, train
from rebind.bench.measure import machine
from rebind.errors import InputError
from rebind.nn import RebindForSeq2SeqLM
from rebind.storage import write_json

TITLE = "Multi30k, German to English, test_2016_flickr"


@dataclass(frozen=True)
class Run:
    """One trained model."""

    kind: str
    seed: int
    bleu: float
    valid_loss: float  # nats per token without smoothing, of the checkpoint that was scored
    best_step: int  # the step of that checkpoint
    train_seconds: float
    test_seconds: float
    parameters: int
    state: int  # numbers that the decoder stores for a sentence of 16 tokens, after 16 tokens


def run(
    kind: str, seed: int, task: Task, settings: Settings, report: Callable[[int, float | None], None] = lambda *_: None
) -> Run:
    """Train one kind from one seed, and translate the test set."""
    _warm_up(_build(kind, task, settings), task, settings)
    torch.manual_seed(seed)
    model = _build(kind, task, settings)
    begin = time.perf_counter()
    loss, step = train(model, task.train, task.valid, settings, seed, report)
    trained = time.perf_counter()
    score = bleu(translate(model, task.tokenizer, task.test, settings.beams), task.references)
    return Run(
        kind,
        seed,
        bleu=score,
        valid_loss=loss,
        best_step=step,
        train_seconds=trained - begin,
        test_seconds=time.perf_counter() - trained,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        state=model.state_size(16, 16),
    )


def _build(kind: str, task: Task, settings: Settings) -> RebindForSeq2SeqLM:
    model: Any = RebindForSeq2SeqLM(settings.config(kind, task.tokenizer.get_vocab_size()))
    return model.to(task.train.source.device)


def _warm_up(model: RebindForSeq2SeqLM, task: Task, settings: Settings) -> None:
    """Train a model that is not used for one step, so that kernels are compiled before the clock starts."""
    with autocast(task.train.source.device):
        loss = model.train()(**next(task.train.batches(settings.tokens))).loss
    loss.backward()
    loss.item()


@torch.no_grad()
def translate(model: RebindForSeq2SeqLM, tokenizer: Tokenizer, corpus: Corpus, beams: int) -> list[str]:
    """Translate every sentence of a corpus in one batch, by beam search in the dtype of the weights."""
    longest = min(2 * int(corpus.lengths[:, 0].max()) + 8, 128)
    untyped: Any = model.train(False)
    ids = untyped.generate(
        corpus.source,
        attention_mask=(corpus.source != PAD).long(),
        max_new_tokens=longest,
        num_beams=beams,
        do_sample=False,
        early_stopping=beams > 1,
    )
    return [text.strip() for text in tokenizer.decode_batch(ids.tolist(), skip_special_tokens=True)]


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """Return the score of sacreBLEU, cased, with 13a tokens."""
    return float(import_module("sacrebleu").corpus_bleu(hypotheses, [references]).score)


def require_sacrebleu() -> None:
    if find_spec("sacrebleu") is None:
        raise InputError(
            "sacrebleu is not installed", advice="Install it with pip install sacrebleu", code="sacrebleu_missing"
        )


def earlier_runs(out: Path, settings: Settings, digest: str) -> list[Run]:
    """Return the runs in --out, if they have the same settings and data with that digest."""
    if not out.exists():
        return []
    content = json.loads(out.read_text())
    for name, expected in (("settings", asdict(settings)), ("data", digest)):
        if content.get(name) != expected:
            raise InputError(
                f"{out} has runs with other {name} ({content.get(name)})",
                expected=str(expected),
                advice="Remove the file, or choose another {out}",
                settings={"out": None},
                code=f"other_{name}",
            )
    return [Run(**values) for values in content["runs"]]


def save(out: Path, settings: Settings, digest: str, runs: list[Run]) -> None:
    content = {
        "title": TITLE,
        "machine": machine("transformers", "tokenizers", "sacrebleu"),
        "settings": asdict(settings),
        "data": digest,  # sha256 of all sentence pairs
        "runs": [asdict(run) for run in runs],
    }
    write_json(out, content)
