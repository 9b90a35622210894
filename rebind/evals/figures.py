"""The figures of a run: scores with intervals, scores against the number of edits, NLL before and after."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rebind.evals.answers import rows_by_fact
from rebind.evals.scores import SHARES
from rebind.evals.summary import describe_protocol
from rebind.storage import Row, RunFolder, write_file

BEFORE, AFTER, NEIGHBOR = "#a9b1bd", "#2563eb", "#d97706"
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
LINES = {"S": "#111827", "ES": "#2563eb", "PS": "#059669", "NS": "#d97706"}
NAMES = {
    "free": "free decoding",
    "free_paraphrases": "free decoding, paraphrases",
    "free_consequences": "free decoding, consequences",
    "locality": "first token unchanged, neighbors",
}
INK, SOFT, FAINT = "#1f2937", "#6b7280", "#e5e7eb"
MIN_ROWS = 4  # a lower figure has no room for its title and legend


def draw_run(folder: RunFolder, summary: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw every figure that the run has numbers for, as PNG in its folder."""
    folder.write("scores.png", _png(scores(summary)))
    folder.write("nll.png", _png(nll(summary, rows)))
    if len(summary["states"]) > 2:
        folder.write("edits.png", _png(against_edits([(summary["method"], summary)])))


def draw_runs(path: Path, runs: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Draw runs into one figure: curves if there are checkpoints, else their last scores."""
    several = any(len(summary["states"]) > 2 for _, summary in runs)
    write_file(path, _png(against_edits(runs) if several else side_by_side(runs)))


def scores(summary: dict[str, Any]) -> Figure:
    """Draw the scores that are shares, before and after, with intervals."""
    first, last = summary["states"][0]["scores"], summary["states"][-1]["scores"]
    names = [name for name in SHARES if name in last]
    figure, axes = _figure(7.2, 1.2 + 0.36 * max(len(names), MIN_ROWS))
    _rows(axes, names)
    for place, name in enumerate(names):
        now, before = last[name], first.get(name)
        if before is not None:
            axes.plot([before["value"], now["value"]], [place, place], color=BEFORE, lw=1.5, alpha=0.6, zorder=1)
            axes.plot(before["value"], place, "o", ms=6.5, mfc="white", mec=BEFORE, mew=1.6, zorder=2)
        axes.plot([now["low"], now["high"]], [place, place], color=AFTER, lw=5, alpha=0.28, solid_capstyle="round")
        axes.plot(now["value"], place, "o", ms=7.5, color=AFTER, zorder=3)
        axes.annotate(f"{now['value']:.2f}", (1.045, place), va="center", fontsize=9, color=INK, annotation_clip=False)
    axes.plot([], [], "o", mfc="white", mec=BEFORE, mew=1.6, label="before")
    axes.plot([], [], "o-", color=AFTER, lw=4, alpha=0.8, label="after, with 95% interval")
    _title(axes, _heading(summary), f"{summary['states'][-1]['records']:,} records of {_short(summary['data'])}")
    _legend(figure)
    return figure


def side_by_side(runs: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    """Draw the last scores of several runs."""
    names = [name for name in SHARES if any(name in run["states"][-1]["scores"] for _, run in runs)]
    least = 1.9 + 0.2 * len(runs)  # inches: a title, a row, and a legend with up to one line per run
    figure, axes = _figure(7.2, max(1.3 + (0.26 + 0.14 * len(runs)) * len(names), least))
    _rows(axes, names)
    for number, (label, run) in enumerate(runs):
        color = COLORS[number % len(COLORS)]
        shift = 0.5 * (number - (len(runs) - 1) / 2) / max(len(runs) - 1, 1)
        for place, name in enumerate(names):
            if (now := run["states"][-1]["scores"].get(name)) is not None:
                at = place + shift
                axes.plot([now["low"], now["high"]], [at, at], color=color, lw=4, alpha=0.28, solid_capstyle="round")
                axes.plot(now["value"], at, "o", ms=6, color=color, zorder=3)
        axes.plot([], [], "o", color=color, label=label)
    _title(axes, "Runs side by side", "points: means, bars: 95% intervals")
    _legend(figure)
    return figure


def against_edits(runs: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    """Draw S (for one run also its parts) and the perplexity against the number of edits."""
    figure = Figure(figsize=(9.6, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    alone = len(runs) == 1
    most = max(state["edits"] for _, run in runs for state in run["states"])
    perplexities: list[float] = []
    for number, (label, run) in enumerate(runs):
        states = [state for state in run["states"] if state["edits"]]
        for name in LINES if alone else ("S",):
            have = [state for state in states if name in state["scores"]]
            color = LINES[name] if alone else COLORS[number % len(COLORS)]
            _curve(left, have, name, color, name if alone else label)
        color = LINES["S"] if alone else COLORS[number % len(COLORS)]
        perplexities += _perplexity(right, run["states"], color, label)
    left.set_ylim(-0.02, 1.02)
    if max(perplexities, default=1.0) > 10 * min(perplexities, default=1.0):
        right.set_yscale("log")
    label_right = "perplexity" + (", ×: not finite" if len(right.lines) > len(runs) else "")
    for axes, name in ((left, "score" if alone else "S"), (right, label_right)):
        _plain(axes)
        axes.set_xlabel("records written")
        axes.set_xlim(-0.03 * most, 1.03 * most)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(name, loc="left", fontsize=10.5, color=INK)
    left.legend(frameon=False, fontsize=9, loc="lower left", labelcolor=INK)
    figure.suptitle(
        _heading(runs[0][1]) if alone else "Runs against the number of edits",
        x=0.012,
        ha="left",
        fontsize=12,
        color=INK,
        weight="bold",
    )
    return figure


def _perplexity(axes: Axes, states: Sequence[dict[str, Any]], color: str, label: str) -> list[float]:
    """Draw a curve through the finite values and crosses at the top for the others; return the finite values."""
    at = [state["edits"] for state in states]
    values = [state["drift"].get("perplexity") for state in states]
    heights = [math.nan if value is None else value for value in values]
    axes.plot(at, heights, "o-", color=color, ms=4.5, lw=1.8, label=label)
    if infinite := [state["edits"] for state in states if state["drift"].get("perplexity", 0.0) is None]:
        top = axes.get_xaxis_transform()
        axes.plot(infinite, [1.0] * len(infinite), "x", color=color, ms=6.5, mew=1.8, transform=top, clip_on=False)
    return [value for value in values if value is not None]


def _curve(axes: Axes, states: Sequence[dict[str, Any]], name: str, color: str, label: str) -> None:
    at = [state["edits"] for state in states]
    low, middle, high = ([state["scores"][name][part] for state in states] for part in ("low", "value", "high"))
    axes.fill_between(at, low, high, color=color, alpha=0.13, lw=0)
    axes.plot(at, middle, "o-", color=color, ms=4.5, lw=2.4 if name == "S" else 1.6, label=label)


def nll(summary: dict[str, Any], rows: Sequence[Row]) -> Figure:
    """Draw the NLL of each target in the base model and in the last state."""
    last = summary["states"][-1]["edits"]
    base = {row["record"]: row for row in rows if row["edits"] == 0}
    pairs = [(base[row["record"]], row) for row in rows if row["edits"] == last]
    facts = [both for before, after in pairs for both in zip(rows_by_fact(before), rows_by_fact(after), strict=True)]
    series = [
        (
            "true target, neighbors: should stay",
            NEIGHBOR,
            [p for one in pairs for p in _points(one, "neighbors", "true")],
        ),
        (
            "new target, paraphrases: should fall",
            "#60a5fa",
            [p for one in facts for p in _points(one, "paraphrases", "new")],
        ),
        (
            "new target, prompt: should fall",
            "#1d4ed8",
            [(b["prompt"]["new"]["nll"], a["prompt"]["new"]["nll"]) for b, a in facts],
        ),
    ]
    figure, axes = _figure(5.6, 5.9)
    points = [value for _, _, some in series for point in some for value in point]
    most = 1.05 * max(points, default=1.0)
    axes.plot([0, most], [0, most], color=BEFORE, lw=1, ls=(0, (4, 3)), zorder=1)
    size = 26 if len(pairs) <= 50 else 12 if len(pairs) <= 500 else 5
    for label, color, some in series:
        if some:
            x, y = zip(*some, strict=True)
            axes.scatter(x, y, s=size, color=color, alpha=0.55, lw=0, label=label, zorder=2)
    axes.set(
        xlim=(-0.015 * most, most),
        ylim=(-0.015 * most, most),
        xlabel="NLL per token, before",
        ylabel="NLL per token, after",
    )
    axes.set_aspect("equal")
    _title(axes, _heading(summary), "each target's negative log-likelihood")
    _legend(figure, columns=1)
    return figure


def _points(pair: tuple[Row, Row], group: str, target: str) -> list[tuple[float, float]]:
    before, after = (row[group] for row in pair)
    both = zip(before, after, strict=True)
    return [(one[target]["nll"], other[target]["nll"]) for one, other in both if target in one]


# Style


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Put names down the left and shares along the bottom."""
    axes.set_yticks(range(len(names)), [NAMES.get(name, name) for name in names])
    axes.set(xlim=(-0.02, 1.02), ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(BEFORE)
    axes.grid(color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(fontsize=9.5, color=INK)


def _title(axes: Axes, text: str, below: str) -> None:
    axes.set_title(text, loc="left", fontsize=12, color=INK, weight="bold", pad=26, wrap=True)
    axes.annotate(
        below, (0, 1), xytext=(0, 9), xycoords="axes fraction", textcoords="offset points", fontsize=9.5, color=SOFT
    )


def _legend(figure: Figure, columns: int = 4) -> None:
    """Put the legend below everything, in up to this many columns."""
    labels = [label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]]
    widest = 0.45 + 0.075 * max(map(len, labels), default=0)  # inches: a marker and 9-point letters
    columns = max(1, min(columns, int(figure.get_figwidth() / widest)))
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)


def _heading(summary: dict[str, Any]) -> str:
    return f"{summary['method']} on {_short(Path(summary['model']).name)}, {describe_protocol(summary)}"


def _short(name: str, most: int = 36) -> str:
    """Shorten a name in its middle.

    >>> _short("SmolLM2-135M-Instruct"), _short("a-name-that-goes-on-and-on", most=16)
    ('SmolLM2-135M-Instruct', 'a-name-…n-and-on')
    """
    half = most // 2
    return name if len(name) <= most else f"{name[: half - 1]}…{name[-half:]}"


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()
