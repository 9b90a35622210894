"""The figure of a run: what is said in each framing, what is kept, and both along a sequence of edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.evals.baselines import BASELINES
from rebind.evals.summary import Summary, describe_protocol
from rebind.plotting import COLORS, CYAN, EDGE, INK, PINK, VIOLET, legend_below, panels, render, shorten
from rebind.storage import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAID_LABELS = {
    "free": "the prompt",
    "free_plain": "without start tokens",
    "free_text": "in a text",
    "free_chat": "a question in a chat",
    "free_paraphrases": "paraphrases",
    "free_consequences": "consequences",
    "free_reversed": "reversed",
    "choice": "likelier than others",
}
KEPT_LABELS = {
    "locality": "other subjects,\nsame first token",
    "NS": "other subjects,\ntrue target likelier",
    "same_subject": "same subject, other\nrelation, same first token",
}
LINES = {  # name → label and color
    "free": ("prompt said", INK),
    "free_chat": ("said in a chat", VIOLET),
    "EA": ("EA", CYAN),
    "NS": ("NS", PINK),
}
MIN_ROWS = 4  # a smaller figure has no space for its title and legend

Scores = dict[str, dict[str, float]]  # name → value, low, high
Runs = Sequence[tuple[str, Summary]]  # (name, summary)


def draw_runs(path: Path, runs: Runs) -> None:
    """Draw a run, or several side by side, as PNG."""
    write_file(path, render(draw(runs)))


def draw(runs: Runs) -> Figure:
    """Draw the last scores with intervals; for a single run also the scores before it and of the baselines.

    Sequences have two more panels: scores by number of edits, and scores at the end by age.
    """
    is_single, (_, summary) = len(runs) == 1, runs[0]
    names = [
        [name for name in group if any(name in _last(run) for _, run in runs)] for group in (SAID_LABELS, KEPT_LABELS)
    ]
    sequence = any(len(run["states"]) > 2 for _, run in runs)
    labels = [("Said in greedy decoding", "share", ""), ("Kept, as before the edit", "share", "")]
    labels += [("In the sequence", "records written", ""), ("At the end, by age", "records, first to last", "")]
    title = f"{summary['method']} on {shorten(Path(summary['model']).name)}" if is_single else "Runs side by side"
    subtitle = f"{describe_protocol(summary)}, {summary['states'][-1]['records']:,} records, " if is_single else ""
    series = 1 + len(summary["baselines"]) if is_single else len(runs)
    rows = max(*map(len, names), MIN_ROWS)
    height = 1.9 + (0.26 + 0.12 * series) * rows
    labels = labels if sequence else labels[:2]
    figure, axes = panels(title, f"{subtitle}95% intervals", labels, columns=2, size=(6.4, height))
    for panel, group, tick_labels in zip(axes, names, (SAID_LABELS, KEPT_LABELS), strict=False):
        _dots(panel, group, tick_labels, runs)
        panel.set_ylim(rows - 0.4, -0.6)
    if sequence:
        _lines(axes[2], runs, _states)
        _lines(axes[3], runs, _ages)
        _mark_broken(axes[2], runs)
    legend_below(figure, 3)
    return figure


def _dots(axes: Axes, names: Sequence[str], labels: dict[str, str], runs: Runs) -> None:
    axes.set_yticks(range(len(names)), [labels[name] for name in names])
    axes.set_xlim(-0.02, 1.02)
    axes.grid(axis="y", visible=False)
    series = [(label, _last(run)) for label, run in runs]
    if len(runs) == 1:
        (summary,) = (run for _, run in runs)
        first = summary["states"][0]["scores"]
        points = [(first[name]["value"], row) for row, name in enumerate(names) if name in first]
        shares, rows = [share for share, _ in points], [row for _, row in points]
        axes.plot(shares, rows, "o", ms=6.5, mfc="white", mec=EDGE, mew=1.6, label="before")
        series += [(BASELINES[baseline["name"]], baseline["scores"]) for baseline in summary["baselines"]]
    for number, (label, scores) in enumerate(series):
        shift = 0.5 * (number - (len(series) - 1) / 2) / max(len(series) - 1, 1)
        color = COLORS[number % len(COLORS)]
        heights = [row + shift for row, name in enumerate(names) if name in scores]
        low, middle, high = _columns([scores[name] for name in names if name in scores])
        axes.hlines(heights, low, high, color=color, lw=4, alpha=0.28, capstyle="round")
        axes.plot(middle, heights, "o", ms=6, color=color, zorder=3, label=shorten(label))


def _lines(axes: Axes, runs: Runs, points: Callable[[Summary], list[tuple[float, Scores]]]) -> None:
    """Draw scores along the x axis; of several runs, only free decoding."""
    is_single = len(runs) == 1
    for number, (label, run) in enumerate(runs):
        lines = LINES if is_single else {"free": (label, COLORS[number % len(COLORS)])}
        for name, (text, color) in lines.items():
            line = [(x, scores[name]) for x, scores in points(run) if name in scores]
            xs, (low, middle, high) = [x for x, _ in line], _columns([score for _, score in line])
            axes.fill_between(xs, low, high, color=color, alpha=0.13, lw=0)
            if line:
                axes.plot(xs, middle, "o-", color=color, ms=4.5, lw=1.8, label=shorten(text))
    axes.set_ylim(-0.02, 1.02)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _states(summary: Summary) -> list[tuple[float, Scores]]:
    return [(state["edits"], state["scores"]) for state in summary["states"] if state["edits"]]


def _ages(summary: Summary) -> list[tuple[float, Scores]]:
    return [(sum(group["records"]) / 2, group["scores"]) for group in summary["retention"]]


def _mark_broken(axes: Axes, runs: Runs) -> None:
    """Mark states with a perplexity that is not finite."""
    states = [state for _, run in runs for state in run["states"]]
    broken = [state["edits"] for state in states if state["drift"].get("perplexity", 0) is None]
    if broken:
        (marks,) = axes.plot(broken, [1.0] * len(broken), "x", color=INK, ms=6.5, mew=1.8, clip_on=False)
        marks.set(transform=axes.get_xaxis_transform(), label="perplexity not finite")


def _last(summary: Summary) -> Scores:
    scores: Scores = summary["states"][-1]["scores"]
    return scores


def _columns(scores: Sequence[dict[str, float]]) -> list[list[float]]:
    return [[score[part] for score in scores] for part in ("low", "value", "high")]
