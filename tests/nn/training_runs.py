"""Small runs for the tests of training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from rebind.nn.training import DataConfig, OptimizerConfig, Progress, TrainConfig, train

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "dropout": 0.1}
WORDS = ["the", "a", "red", "old", "cat", "dog", "bird", "house", "sees", "likes", "and", "sleeps", "under"]


class Killed(BaseException):
    """What no handler of errors catches: as good as a kill, without a new process."""


def text(words: int = 900, seed: int = 0) -> str:
    drawn = random.Random(seed)
    return " ".join(drawn.choice(WORDS) + ("\n" if drawn.random() < 0.1 else "") for _ in range(words)) + "\n"


def corpus(folder: Path, content: str | None = None) -> str:
    path = folder / "corpus.txt"
    path.write_bytes((text() if content is None else content).encode())
    return str(path)


def config(source: str, *, tokenizer: str = "characters", **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {
        "layers": "delta",
        "model": TINY,
        "optimizer": OptimizerConfig(rate=1e-2, warmup=3),
        "length": 16,
        "batch": 4,
        "steps": 12,
        "save_every": 5,
        "evaluate_every": 4,
        "evaluate_tokens": 100,
        "log_every": 1,
    }
    return TrainConfig(DataConfig(source, tokenizer, vocabulary=300), **{**options, **changes})


def killed_at(step: int) -> Progress:
    """A listener that ends the run when it hears of that step."""

    def tell(update: Any) -> None:
        if update.step == step:
            raise Killed

    return Progress(step=tell)


def killed(run: TrainConfig, out: Path, step: int) -> None:
    """Run until that step is done and logged, and end there as if killed."""
    try:
        train(run, out, progress=killed_at(step))
    except Killed:
        return
    raise AssertionError(f"the run ended before step {step}")


def outcome(out: Path) -> dict[str, bytes]:
    """Every byte that must not depend on where a run was interrupted."""
    last = sorted((out / "checkpoints").glob("step-*"))[-1]
    files = {f"{last.name}/{file.name}": file.read_bytes() for file in last.iterdir()}
    return {**files, **{name: (out / name).read_bytes() for name in ("log.jsonl", "result.json")}}


def losses_of(out: Path) -> torch.Tensor:
    """What the log has of them, measured ones too."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return torch.tensor([row.get("loss", row.get("validation")) for row in rows])
