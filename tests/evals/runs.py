"""Small evaluations of a tiny model, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebind.edit.editor import Editor
from rebind.edit.targets import ContextSettings
from rebind.evals import EvalConfig, EvalProgress, EvalResult, QuestionSettings, evaluate, get_protocol, read_records
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
        "also": [
            {"prompt": "{Madrid} is the capital of", "target": "France", "old": "Spain", "paraphrases": ["Madrid is"]}
        ],
    },
    {"prompt": "The mother tongue of {Danielle Darrieux} is", "target": "Italian", "old": "French"},
    {"prompt": "{Berlin} is the capital of", "target": "Spain", "neighbors": ["Madrid is the capital of"]},
    {"prompt": "עיר הבירה של {צרפת} היא", "target": "רומא העתיקה שבאיטליה", "old": "פריז"},
    {"prompt": "{法国}的首都是", "target": "罗马", "old": "巴黎", "paraphrases": ["法国的政府在"]},
]
TEXT = " ".join(tiny.SENTENCES[:5])
FILES = {"config.json", "records.jsonl", "edits.jsonl", "drift.jsonl", "summary.json", "table.md"}


@dataclass(frozen=True)
class FinishedRun:
    """A run that was not disturbed."""

    result: EvalResult
    editor: Editor
    reports: list[Any]  # the arguments of each report of progress

    @property
    def folder(self) -> Path:
        return self.result.folder

    @property
    def contents(self) -> dict[str, bytes]:
        return contents(self.folder)


def new_editor(**options: Any) -> Editor:
    contexts = ContextSettings(("The", "I"), tokens=4)
    return Editor(
        tiny.llama(max_position_embeddings=256),
        tiny.tokenizer(),
        corpus=tiny.texts(),
        moment_tokens=600,
        contexts=contexts,
        **options,
    )


def run(
    out: Path,
    name: str = "single",
    editor: Editor | None = None,
    raw: Any = RAW,
    on_unit: Callable[..., None] = lambda *_: None,
    **options: Any,
) -> EvalResult:
    """Run a small evaluation in units of two records, so that there are several; without a figure, which is slow."""
    small = {
        "method": "memit",
        "questions": QuestionSettings(4, 1, 6),
        "steps": 2,
        "rounds": 50,
        "drift_edits": 2,
        "figure": False,
    }
    config = EvalConfig(protocol=get_protocol(name, batch=2), **{**small, "unit_size": 2, **options})
    progress = EvalProgress(unit=on_unit)
    return evaluate(editor or new_editor(), read_records(raw), config, out, text=TEXT, progress=progress)


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.iterdir() if file.is_file() and file.name not in ("timings.jsonl", ".lock"))
    return {file.name: file.read_bytes() for file in files}


def lines(folder: Path, name: str = "records.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]
