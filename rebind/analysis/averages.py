"""Traces of many facts, averaged by what each token is to its subject (the figure of ROME's section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rebind.analysis.traces import Trace
from rebind.errors import InputError

PLACES = (
    "first subject token",
    "middle subject tokens",
    "last subject token",
    "first token after",
    "further tokens",
    "last token",
)


@dataclass(frozen=True, eq=False)
class Average:
    """Mean indirect effects by the token's place."""

    effects: dict[str, Tensor]  # a kind's [places, layers], float64; 0 where no fact has such a token
    counts: tuple[int, ...]  # facts that have a token there
    clean: float
    corrupted: float
    facts: int
    traces: tuple[Trace, ...]

    @property
    def labels(self) -> list[str]:
        return list(PLACES)

    def to_json(self) -> dict[str, Any]:
        return {
            "facts": self.facts,
            "places": list(PLACES),
            "counts": list(self.counts),
            "clean": self.clean,
            "corrupted": self.corrupted,
            "effects": {kind: rows.tolist() for kind, rows in self.effects.items()},
            "settings": asdict(self.traces[0].settings),
            "noise": self.traces[0].noise,
            "window": self.traces[0].window,
            "prompts": [
                {"prompt": one.question.text, "answer": one.answer, "clean": one.clean, "corrupted": one.corrupted}
                for one in self.traces
            ],
        }


def places_of(trace: Trace) -> list[list[int]]:
    """The tokens at each of `PLACES`. A subject of one token has a last one only, and so has what follows it."""
    first, last = trace.question.subject
    end = len(trace.question.ids) - 1
    return [
        [first] if first < last else [],
        list(range(first + 1, last)),
        [last],
        [last + 1] if last + 1 < end else [],
        list(range(last + 2, end)),
        [end] if end > last else [],
    ]


def average(traces: Sequence[Trace]) -> Average:
    """Each fact counts once at every place it has, however many tokens it has there."""
    if not traces:
        raise InputError("got no traces, expected at least one: trace facts that the model knows")
    found = [places_of(one) for one in traces]
    counts = [sum(bool(places[at]) for places in found) for at in range(len(PLACES))]
    effects = {}
    for kind, like in traces[0].effects.items():
        total = torch.zeros(len(PLACES), like.shape[1], dtype=torch.float64)
        for one, places in zip(traces, found, strict=True):
            for at, tokens in enumerate(places):
                if tokens:
                    total[at] += one.effects[kind][tokens].mean(0)
        effects[kind] = total / torch.tensor(counts).clamp_min(1).unsqueeze(-1)
    return Average(
        effects=effects,
        counts=tuple(counts),
        clean=sum(one.clean for one in traces) / len(traces),
        corrupted=sum(one.corrupted for one in traces) / len(traces),
        facts=len(traces),
        traces=tuple(traces),
    )
