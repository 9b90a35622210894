"""Evaluate editing methods: write records, question the model before and after, and report what changed.

- `records`, `reading`: evaluation records; reading them from files and published datasets
- `selection`: select the records that suit a model
- `answers`, `drift`: the answers of a model to a record; perplexity, canary prompts and growth of the weights
- `baselines`: a LoRA fine-tune on the same facts, to compare with
- `metrics`, `scores`: one function per metric; the scores of a record's answers
- `protocols`, `run`, `stored`: single, batch and sequential protocols; the run, and its stored rows
- `summary`, `figures`: tables, JSON and a figure of one run, or of several side by side
- `demo`: the demonstration of `rebind demo`
"""

from __future__ import annotations

from rebind.evals.answers import QuestionSettings
from rebind.evals.protocols import PROTOCOLS, Protocol, get_protocol
from rebind.evals.reading import bundled_records, read_records
from rebind.evals.records import Question, Record, Records
from rebind.evals.run import EvalConfig, EvalProgress, EvalResult, evaluate
from rebind.evals.selection import known_records, usable_records
from rebind.evals.summary import Comparison, compare

__all__ = [
    "PROTOCOLS",
    "Comparison",
    "EvalConfig",
    "EvalProgress",
    "EvalResult",
    "Protocol",
    "Question",
    "QuestionSettings",
    "Record",
    "Records",
    "bundled_records",
    "compare",
    "evaluate",
    "get_protocol",
    "known_records",
    "read_records",
    "usable_records",
]
