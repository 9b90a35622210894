"""Small evaluations of a tiny model, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rebind.edit.editor import Editor
from rebind.evals import report
from rebind.evals import run as run_module
from rebind.evals.answers import Asking
from rebind.evals.protocols import get_protocol
from rebind.evals.records import Records, read_records
from rebind.evals.run import Trial, evaluate
from tests import tiny

RAW = [
    {
        "prompt": "The capital of {France} is",
        "target": "Rome",
        "old": "Paris",
        "paraphrases": ["France is ruled from"],
        "neighbours": ["The capital of Spain is", {"prompt": "Berlin is in", "answer": "Germany"}],
        "consequences": [{"prompt": "In the capital of France they speak", "answer": "Italian", "aliases": ["Latin"]}],
        "references": ["Rome is old. Rome is the capital of Italy."],
    },
    {"prompt": "The mother tongue of {Danielle Darrieux} is", "target": "Italian", "old": "French"},
    {"prompt": "{Berlin} is the capital of", "target": "Spain", "neighbours": ["Madrid is the capital of"]},
    {"prompt": "עיר הבירה של {צרפת} היא", "target": "רומא העתיקה שבאיטליה", "old": "פריז"},
    {"prompt": "{法国}的首都是", "target": "罗马", "old": "巴黎", "paraphrases": ["法国的政府在"]},
]
TEXT = " ".join(tiny.SENTENCES)
LASTING = {"config.json", "records.jsonl", "edits.jsonl", "drift.jsonl", "summary.json", "table.md"}
every_protocol = pytest.mark.parametrize("name", ["single", "batch", "sequential"])


def new_editor(**options: Any) -> Editor:
    return Editor(tiny.llama(), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=1500, **options)


def trial(name: str = "single", **options: Any) -> Trial:
    given = {"asking": Asking(4, 1, 6), "steps": 2, "rounds": 50, "drifts": 2}
    return Trial(protocol=get_protocol(name, batch=2), **{**given, **options})


def run(out: Path, name: str = "single", editor: Editor | None = None, raw: Any = RAW, **options: Any):
    told, figures = options.pop("progress", None), options.pop("figures", False)
    records = raw if isinstance(raw, Records) else read_records(raw)
    with pytest.MonkeyPatch.context() as patch:
        if not figures:  # they take longer than all the rest
            patch.setattr(report, "_figures", lambda: None)
        return evaluate(editor or new_editor(), records, trial(name, **options), out, text=TEXT, progress=told)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "timings.jsonl"}


def lines(folder: Path, name: str = "records.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


class Killed(BaseException):
    """Nobody catches it."""


def die_asking(patch: pytest.MonkeyPatch, portion: int) -> None:
    """Be killed before the answers of a portion of the records."""
    real, calls = run_module.answer_all, []

    def answer_all(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == portion:
            raise Killed
        return real(*args, **options)

    patch.setattr(run_module, "answer_all", answer_all)
