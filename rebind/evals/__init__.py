"""Evaluations: write records with an editing method, ask everything before and after, and report what changed.

| module | purpose |
| --- | --- |
| `records`, `formats`, `reading` | evaluation records, the formats of the literature, reading files and datasets |
| `selection` | which records a model can be evaluated with |
| `answers` | everything a model says about a record |
| `metrics`, `scores` | one function per metric; which metric applies to which answers |
| `drift` | perplexity, canary prompts and growth of the weights |
| `protocols`, `run` | single, batch and sequential protocols; the run itself |
| `summary`, `report`, `comparison`, `figures` | tables, JSON and PNG of one run; several runs side by side |
"""

from __future__ import annotations

from rebind.evals.answers import QuestionSettings
from rebind.evals.comparison import Comparison, compare
from rebind.evals.protocols import PROTOCOLS, Protocol, get_protocol
from rebind.evals.reading import bundled_records, read_records
from rebind.evals.records import Question, Record, Records
from rebind.evals.run import EvalConfig, EvalProgress, EvalResult, evaluate
from rebind.evals.selection import known_records, usable_records

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
