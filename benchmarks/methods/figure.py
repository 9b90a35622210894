"""The figure of facts written batch after batch. Imported to draw alone: measuring needs no matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.methods.states import Row
from rebind.plotting import AMBER, BLUE, GREEN, INK, RED, VIOLET, legend_below, panels, render
from rebind.storage import write_file

COLOURS = {"memit": BLUE, "alphaedit": AMBER, "recursive": GREEN, "rome": RED, "emmet": VIOLET}


def figure(rows: Sequence[Row], path: Path) -> None:
    """S, EA and perplexity against the number of (real) facts: solid on the base, dashed on the edited model."""
    rows = [row for row in rows if not row.made]
    said = "solid: targets and keys found on the base model; dashed: on the model that holds the batches before"
    drawn, (left, middle, right) = panels(
        "Facts written batch after batch",
        said,
        [
            ("S", "facts written", ""),
            ("facts whose every token comes first", "facts written", ""),
            ("perplexity, held text", "facts written", ""),
        ],
        size=(3.9, 4.4),
    )
    before = [row for row in rows if row.method == "before"][:1]
    named_already: set[str] = set()
    highest = 0.0
    for method, found in dict.fromkeys((row.method, row.found) for row in rows if row.protocol == "sequential"):
        some = [row for row in rows if (row.method, row.protocol, row.found) == (method, "sequential", found)]
        look = _look(method, found)
        _score(left, some, "S", label=None if method in named_already else method, **look)
        _score(middle, some, "EA", **look)
        highest = max(highest, _perplexity(right, some, before, **look))
        named_already.add(method)
    for axes in (left, middle, right):
        axes.set_xlim(right.get_xlim())
        axes.xaxis.set_major_formatter("{x:,.0f}")
    for axes in (left, middle):
        axes.set_ylim(top=1.02)
    if highest > 5:
        right.set_yscale("log")
        right.yaxis.set_major_formatter("{x:,.0f}")
        right.yaxis.set_minor_formatter("")
    legend_below(drawn, len(named_already))
    write_file(path, render(drawn))


def _look(method: str, found: str) -> dict[str, Any]:
    dashes = "-" if found == "base" else (0, (4, 2))
    return {"color": COLOURS.get(method, INK), "ls": dashes, "marker": "o", "ms": 3.6, "lw": 1.8}


def _score(axes: Axes, rows: Sequence[Row], score: str, **look: Any) -> None:
    points = [(row.facts, row.scores[score]["value"]) for row in rows if score in row.scores]
    axes.plot(*zip(*points, strict=True), **look)


def _perplexity(axes: Axes, rows: Sequence[Row], before: Sequence[Row], **look: Any) -> float:
    """From no facts on; the most that it grew by."""
    held = [*((0, row.perplexity) for row in before), *((row.facts, row.perplexity) for row in rows)]
    finite = [(facts, value) for facts, value in held if value is not None]
    axes.plot(*zip(*finite, strict=True), **look)
    return max(value / finite[0][1] for _, value in finite)
