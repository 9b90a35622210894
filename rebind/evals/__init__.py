"""Evaluations: write records with an editing method, ask everything before and after, and report what changed.

- `records`, `reading`: evaluation records; reading them from files and datasets, in the formats of the literature
- `selection`: which records a model can be evaluated with
- `answers`, `drift`: everything a model says about a record; perplexity, canary prompts and growth of the weights
- `baselines`: a LoRA fine-tune on the same facts, to compare with
- `metrics`, `scores`: one function per metric; which metric applies to which answers
- `protocols`, `run`: single, batch and sequential protocols; the run itself
- `summary`, `figures`: tables, JSON and one PNG of a run, and of several side by side
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
