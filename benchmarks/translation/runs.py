"""One kind of attention from one seed: trained, asked for the test set, scored; and the file that such runs are in."""

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
from rebind.bench.machine import machine
from rebind.errors import InputError
from rebind.files import write_atomically
from rebind.nn import RebindForSeq2SeqLM

TITLE = "Multi30k, German to English, test_2016_flickr"


@dataclass(frozen=True)
class Run:
    """One model, trained and asked."""

    kind: str
    seed: int
    bleu: float
    valid_loss: float  # nats a token, no smoothing: of the checkpoint that was asked
    best_step: int  # where that checkpoint was taken
    train_seconds: float
    test_seconds: float
    parameters: int
    state: int  # numbers that the decoder keeps for a sentence of 16 tokens, after 16 tokens


def run(
    kind: str, seed: int, task: Task, settings: Settings, told: Callable[[int, float | None], None] = lambda *_: None
) -> Run:
    """Train one kind from one seed, and translate the test set."""
    _warm(_model(kind, task, settings), task, settings)
    torch.manual_seed(seed)
    model = _model(kind, task, settings)
    begin = time.perf_counter()
    loss, step = train(model, task.train, task.valid, settings, seed, told)
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


def _model(kind: str, task: Task, settings: Settings) -> RebindForSeq2SeqLM:
    made: Any = RebindForSeq2SeqLM(settings.config(kind, task.tokenizer.get_vocab_size()))
    return made.to(task.train.source.device)


def _warm(model: RebindForSeq2SeqLM, task: Task, settings: Settings) -> None:
    """One step of a model that is thrown away: kernels are compiled before the clock starts."""
    with autocast(task.train.source.device):
        loss = model.train()(**next(task.train.batches(settings.tokens))).loss
    loss.backward()
    loss.item()


@torch.no_grad()
def translate(model: RebindForSeq2SeqLM, tokenizer: Tokenizer, corpus: Corpus, beams: int) -> list[str]:
    """Every sentence of a corpus, all at once, by beam search in the weights' own dtype."""
    longest = min(2 * int(corpus.lengths[:, 0].max()) + 8, 128)
    made: Any = model.train(False)
    ids = made.generate(
        corpus.source,
        attention_mask=(corpus.source != PAD).long(),
        max_new_tokens=longest,
        num_beams=beams,
        do_sample=False,
        early_stopping=beams > 1,
    )
    return [text.strip() for text in tokenizer.decode_batch(ids.tolist(), skip_special_tokens=True)]


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """sacreBLEU: cased, 13a tokens."""
    return float(import_module("sacrebleu").corpus_bleu(hypotheses, [references]).score)


def require_sacrebleu() -> None:
    if find_spec("sacrebleu") is None:
        raise InputError("sacrebleu is not installed, expected it for the score: pip install sacrebleu")


def kept_runs(out: Path, settings: Settings, digest: str) -> list[Run]:
    """What --out holds already, if it was made with the same settings, on data of that digest."""
    if not out.exists():
        return []
    held = json.loads(out.read_text())
    if held.get("settings") != asdict(settings):
        raise InputError(
            f"{out} holds runs of other settings, expected {asdict(settings)}: choose another --out, or remove it"
        )
    if "data" not in held:
        raise InputError(
            f"{out} does not say what data its runs are of, expected a digest: choose another --out, or remove it; if "
            f'it was made from these files, add "data": "{digest}" beside its settings'
        )
    if held["data"] != digest:
        raise InputError(
            f"{out} holds runs on other data ({held['data']}, expected {digest}): choose another --out, or remove it, "
            f"or point --data at the files it was made from"
        )
    return [Run(**found) for found in held["runs"]]


def save(out: Path, settings: Settings, digest: str, runs: list[Run]) -> None:
    content = {
        "title": TITLE,
        "machine": machine("transformers", "tokenizers", "sacrebleu"),
        "settings": asdict(settings),
        "data": digest,  # sha256 of all sentence pairs
        "runs": [asdict(found) for found in runs],
    }
    write_atomically(out, (json.dumps(content, indent=2) + "\n").encode())
