"""Small runs for the tests of training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from rebind.nn.training import DataConfig, OptimizerConfig, TrainConfig, TrainingProgress, train
from rebind.storage import JsonLines

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "dropout": 0.1}
WORDS = ["the", "a", "red", "old", "cat", "dog", "bird", "house", "sees", "likes", "and", "sleeps", "under"]


class Killed(BaseException):
    """Passes every handler of errors, as a kill would, but without a new process."""


def text(words: int = 900, seed: int = 0) -> str:
    generator = random.Random(seed)
    lines = (generator.choice(WORDS) + ("\n" if generator.random() < 0.1 else "") for _ in range(words))
    return " ".join(lines) + "\n"


def corpus(folder: Path, content: str | None = None) -> str:
    path = folder / "corpus.txt"
    path.write_bytes((text() if content is None else content).encode())
    return str(path)


def config(source: str, *, tokenizer: str = "characters", **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "layers": "delta",
        "model": TINY,
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup=3),
        "length": 16,
        "batch_size": 4,
        "steps": 12,
        "save_every": 5,
        "evaluate_every": 4,
        "evaluate_tokens": 100,
        "log_every": 1,
    }
    return TrainConfig(DataConfig(source, tokenizer, vocabulary=300), **{**settings, **changes})


def kill(run: TrainConfig, out: Path, step: int) -> None:
    """Run until that step is logged, and stop there as if killed."""

    def stop(update: Any) -> None:
        if update.step == step:
            raise Killed

    try:
        train(run, out, progress=TrainingProgress(step=stop))
    except Killed:
        return
    raise AssertionError(f"the run ended before step {step}")


def outcome(out: Path) -> dict[str, bytes]:
    """Return every byte that must not depend on where a run was interrupted."""
    last = sorted((out / "checkpoints").glob("step-*"))[-1]
    files = {f"{last.name}/{file.name}": file.read_bytes() for file in last.iterdir()}
    return {**files, **{name: (out / name).read_bytes() for name in ("log.jsonl", "result.json")}}


def losses(out: Path) -> torch.Tensor:
    """Return the losses in the log, those on the validation text included."""
    return torch.tensor([row.get("loss", row.get("validation")) for row in JsonLines(out / "log.jsonl").read()])


def saved_steps(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())
