"""What both comparisons of methods share, this one and `benchmarks.editing`: which records, how much text, means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

from rebind.edit.editor import Editor
from rebind.edit.facts.fact import comparable
from rebind.edit.methods import METHODS, Method
from rebind.evals.drift import DriftMeter
from rebind.evals.records import Records
from rebind.evals.selection import known_records as known

# The methods that change weights; `benchmarks.dense` has the other one.
WEIGHTS = [name for name, method in METHODS.items() if not method.dense]
SEVERAL_FIRST = sorted(WEIGHTS, key=lambda name: not METHODS[name].several_layers)


def known_records(editor: Editor, records: Records, most: int | None = None) -> Records:
    """Those with all that is asked, whose true object the model prefers; of one prompt's the first."""
    whole = [index for index, one in enumerate(records) if one.fact.old and one.fact.paraphrases and one.neighbors]
    chosen = known(editor, replace(records, records=tuple(records[index] for index in whole)))
    first = {comparable(record.fact.text): index for index, record in reversed(list(enumerate(chosen)))}
    return replace(chosen, records=tuple(chosen[index] for index in sorted(first.values())[:most]))


def beginning(tokenizer: Any, text: str, tokens: int) -> str:
    """As much of a text as so many tokens are: it is tokenised anew for every row."""
    begun = text[: 20 * tokens]
    ends = tokenizer(begun, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = ends["offset_mapping"]
    return begun if len(offsets) <= tokens else begun[: offsets[tokens - 1][1]]


def impossible(editor: Editor, method: Method, n: int) -> str:
    """Why so many facts are not written at once with this method; nothing if they are."""
    width = min(site.d_k for site in editor.sites)
    if not method.several_layers and n > width:
        return f"{n:,} facts exactly in one matrix, whose keys have {width:,} dimensions: there is no solution"
    return ""


def whole(meter: DriftMeter) -> dict[str, Any]:
    """Perplexity, drift and growth of the model as it stands."""
    found = meter.measure()
    return {"perplexity": found["perplexity"], "drift": found["kl"], "growth": found["growth"]}


def mean(values: Iterable[float | None]) -> float | None:
    """None where one of them is."""
    listed = list(values)
    return None if None in listed else fmean(value for value in listed if value is not None)
