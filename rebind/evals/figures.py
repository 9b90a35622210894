"""The figures of a run: scores with intervals, scores against the number of edits, NLL before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.evals.answers import rows_by_fact
from rebind.evals.scores import SHARES
from rebind.evals.summary import Summary, describe_protocol
from rebind.plotting import AMBER, BLUE, COLORS, EDGE, GREEN, INK, legend, legend_below, panels, render, shorten
from rebind.storage import Row, RunFolder, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES = {"S": INK, "ES": BLUE, "PS": GREEN, "NS": AMBER}
NAMES = {
    "free": "free decoding",
    "free_paraphrases": "free decoding, paraphrases",
    "free_consequences": "free decoding, consequences",
    "locality": "first token unchanged, neighbors",
}
MIN_ROWS = 4  # a lower figure has no room for its title and legend

Runs = Sequence[tuple[str, Summary]]  # (name, summary)


def draw_run(folder: RunFolder, summary: Summary, rows: Sequence[Row]) -> None:
    """Draw every figure that the run has numbers for, as PNG in its folder."""
    folder.write("scores.png", render(scores([("after", summary)], before=True)))
    folder.write("nll.png", render(nll(summary, rows)))
    if len(summary["states"]) > 2:
        folder.write("edits.png", render(against_edits([(summary["method"], summary)])))


def draw_runs(path: Path, runs: Runs) -> None:
    """Draw runs into one figure: curves if there are checkpoints, else their last scores."""
    several = any(len(summary["states"]) > 2 for _, summary in runs)
    write_file(path, render(against_edits(runs) if several else scores(runs)))


def scores(runs: Runs, *, before: bool = False) -> Figure:
    """Draw the last scores of runs that are shares, with intervals; with `before` also those of the base model."""
    names = [name for name in SHARES if any(name in run["states"][-1]["scores"] for _, run in runs)]
    height = 1.9 + (0.26 + 0.12 * len(runs)) * max(len(names), MIN_ROWS)
    summary = runs[0][1]
    title = _heading(summary) if before else "Runs side by side"
    below = f"{describe_protocol(summary)}, {summary['states'][-1]['records']:,} records, " if before else ""
    figure, (axes,) = panels(title, f"{below}95% intervals", [("", "score", "")], size=(7.2, height))
    axes.set_yticks(range(len(names)), [NAMES.get(name, name) for name in names])
    axes.set(xlim=(-0.02, 1.02), ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    if before:
        first = summary["states"][0]["scores"]
        places = [(first[name]["value"], at) for at, name in enumerate(names) if name in first]
        axes.plot(*zip(*places, strict=True), "o", ms=6.5, mfc="white", mec=EDGE, mew=1.6, label="before")
    for number, (label, run) in enumerate(runs):
        shift = 0.5 * (number - (len(runs) - 1) / 2) / max(len(runs) - 1, 1)
        last, color = run["states"][-1]["scores"], COLORS[number % len(COLORS)]
        heights = [at + shift for at, name in enumerate(names) if name in last]
        low, middle, high = _columns([last[name] for name in names if name in last])
        axes.hlines(heights, low, high, color=color, lw=4, alpha=0.28, capstyle="round")
        axes.plot(middle, heights, "o", ms=6, color=color, zorder=3, label=shorten(label))
    legend_below(figure, 4)
    return figure


def against_edits(runs: Runs) -> Figure:
    """Draw S (for one run also its parts) and the perplexity against the number of edits."""
    alone = len(runs) == 1
    title = _heading(runs[0][1]) if alone else "Runs against the number of edits"
    everything = [state for _, run in runs for state in run["states"]]
    perplexities = [state["drift"]["perplexity"] for state in everything if state["drift"]]
    labels = [("score" if alone else "S", "records written", ""), ("perplexity", "records written", "")]
    below = describe_protocol(runs[0][1]) + (", ×: not finite" if None in perplexities else "")
    figure, (left, right) = panels(title, below, labels, size=(4.8, 4.2))
    for number, (label, run) in enumerate(runs):
        color = INK if alone else COLORS[number % len(COLORS)]
        for name in LINES if alone else ("S",):
            states = [state for state in run["states"] if state["edits"] and name in state["scores"]]
            at = [state["edits"] for state in states]
            low, middle, high = _columns([state["scores"][name] for state in states])
            shade, width = LINES[name] if alone else color, 2.4 if name == "S" else 1.6
            left.fill_between(at, low, high, color=shade, alpha=0.13, lw=0)
            left.plot(at, middle, "o-", color=shade, ms=4.5, lw=width, label=shorten(name if alone else label))
        at = [state["edits"] for state in run["states"]]
        values = [state["drift"].get("perplexity", math.nan) for state in run["states"]]
        right.plot(at, [math.nan if value is None else value for value in values], "o-", color=color, ms=4.5, lw=1.8)
        if crosses := [edits for edits, value in zip(at, values, strict=True) if value is None]:
            top, ones = right.get_xaxis_transform(), [1.0] * len(crosses)
            right.plot(crosses, ones, "x", color=color, ms=6.5, mew=1.8, transform=top, clip_on=False)
    left.set_ylim(-0.02, 1.02)
    finite = [value for value in perplexities if value is not None] or [1.0]
    if max(finite) > 10 * min(finite):
        right.set_yscale("log")
    most = max(state["edits"] for state in everything)
    for axes in (left, right):
        axes.set_xlim(-0.03 * most, 1.03 * most)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    legend(left, loc="lower left")
    return figure


def nll(summary: Summary, rows: Sequence[Row]) -> Figure:
    """Draw the NLL of each target in the base model and in the last state."""
    base = {row["record"]: row for row in rows if row["edits"] == 0}
    pairs = [(base[row["record"]], row) for row in rows if row["edits"] == summary["states"][-1]["edits"]]
    facts = [both for before, after in pairs for both in zip(rows_by_fact(before), rows_by_fact(after), strict=True)]
    series = {
        ("true target, neighbors: should stay", AMBER): _points(pairs, "neighbors", "true"),
        ("new target, paraphrases: should fall", "#60a5fa"): _points(facts, "paraphrases", "new"),
        ("new target, prompt: should fall", "#1d4ed8"): _points(facts, "prompt", "new"),
    }
    labels = [("", "NLL per token, before", "NLL per token, after")]
    figure, (axes,) = panels(_heading(summary), "negative log-likelihood of each target", labels, size=(5.6, 5.9))
    most = 1.05 * max((value for points in series.values() for point in points for value in point), default=1.0)
    axes.plot([0, most], [0, most], color=EDGE, lw=1, ls=(0, (4, 3)), zorder=1)
    size = 26 if len(pairs) <= 50 else 12 if len(pairs) <= 500 else 5
    for (label, color), points in series.items():
        if points:
            before, after = zip(*points, strict=True)
            axes.scatter(before, after, s=size, color=color, alpha=0.55, lw=0, label=label, zorder=2)
    axes.set(xlim=(-0.015 * most, most), ylim=(-0.015 * most, most))
    axes.set_aspect("equal")
    legend_below(figure, 1)
    return figure


def _points(pairs: Sequence[tuple[Row, Row]], group: str, target: str) -> list[tuple[float, float]]:
    points = []
    for before, after in pairs:
        sides = [side[group] if isinstance(side[group], list) else [side[group]] for side in (before, after)]
        points += [(one[target]["nll"], two[target]["nll"]) for one, two in zip(*sides, strict=True) if target in one]
    return points


def _columns(scores: Sequence[dict[str, float]]) -> list[list[float]]:
    return [[score[part] for score in scores] for part in ("low", "value", "high")]


def _heading(summary: Summary) -> str:
    return f"{summary['method']} on {shorten(Path(summary['model']).name)}"
