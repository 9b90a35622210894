"""Small evaluations of a tiny model, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rebind.edit.editor import Editor
from rebind.edit.targets.contexts import ContextSettings
from rebind.evals.answers import QuestionSettings
from rebind.evals.protocols import get_protocol
from rebind.evals.reading import read_records
from rebind.evals.records import Records
from rebind.evals.run import EvalConfig, EvalResult, evaluate
from tests import tiny

RAW = [
    {
        "prompt": "The capital of {France} is",
        "target": "Rome",
        "old": "Paris",
        "paraphrases": ["France is ruled from"],
        "neighbors": ["The capital of Spain is", {"prompt": "Berlin is in", "answer": "Germany"}],
        "consequences": [{"prompt": "In the capital of France they speak", "answer": "Italian", "aliases": ["Latin"]}],
        "references": ["Rome is old. Rome is the capital of Italy."],
    },
    {"prompt": "The mother tongue of {Danielle Darrieux} is", "target": "Italian", "old": "French"},
    {"prompt": "{Berlin} is the capital of", "target": "Spain", "neighbors": ["Madrid is the capital of"]},
    {"prompt": "עיר הבירה של {צרפת} היא", "target": "רומא העתיקה שבאיטליה", "old": "פריז"},
    {"prompt": "{法国}的首都是", "target": "罗马", "old": "巴黎", "paraphrases": ["法国的政府在"]},
]
TEXT = " ".join(tiny.SENTENCES)
LASTING = {"config.json", "records.jsonl", "edits.jsonl", "drift.jsonl", "summary.json", "table.md"}
every_protocol = pytest.mark.parametrize("name", ["single", "batch", "sequential"])


def new_editor(**options: Any) -> Editor:
    contexts = ContextSettings(("The", "I"), tokens=4)
    return Editor(tiny.llama(), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=1500, contexts=contexts, **options)


def config(name: str = "single", **options: Any) -> EvalConfig:
    """Return a small evaluation in units of two records, so that there are several; without figures, which are slow."""
    small = {"questions": QuestionSettings(4, 1, 6), "steps": 2, "rounds": 50, "drift_edits": 2}
    return EvalConfig(protocol=get_protocol(name, batch=2), **{**small, "unit_size": 2, "figures": False, **options})


def run(out: Path, name: str = "single", editor: Editor | None = None, raw: Any = RAW, **options: Any) -> EvalResult:
    progress = options.pop("progress", None)
    records = raw if isinstance(raw, Records) else read_records(raw)
    return evaluate(editor or new_editor(), records, config(name, **options), out, text=TEXT, progress=progress)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in ("timings.jsonl", ".lock")}


def lines(folder: Path, name: str = "records.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


class Killed(BaseException):
    """Nobody catches it."""


def dies_after(calls: int, what: Any) -> Any:
    """Return a version of a method that is killed in its last call, after `calls` whole ones."""
    count = [0]

    def dying(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > calls:
            raise Killed
        return what(*args, **options)

    return dying
