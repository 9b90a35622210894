"""The look of the figures. Imported by figures alone: matplotlib is needed to draw, not to measure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rebind.files import write_atomically
from rebind.lab.report import Curve

INK, SOFT, FAINT, EDGE = "#1f2937", "#6b7280", "#e5e7eb", "#a9b1bd"
BLUE, AMBER, GREEN, RED = "#2563eb", "#d97706", "#059669", "#dc2626"
VIOLET, CYAN, PINK, OLIVE = "#7c3aed", "#0891b2", "#be185d", "#4d7c0f"

RULES = {  # one colour a rule, in every figure
    "sum": RED,
    "rfa": PINK,
    "mamba2": AMBER,
    "delta": BLUE,
    "longhorn": CYAN,
    "gated_delta": VIOLET,
    "recursive": GREEN,
    "ridge": GREEN,
    "tanh": OLIVE,
}


def panels(
    count: int, title: str, below: str, *, columns: int = 3, width: float = 4.6, height: float = 4.4
) -> tuple[Figure, list[Axes]]:
    """Axes in rows under one heading; width and height are those of one."""
    columns = min(count, columns)
    rows = -(-count // columns)
    height = rows * height
    figure = Figure(figsize=(width * columns, height), dpi=110, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    axes = [one for row in figure.subplots(rows, columns, squeeze=False) for one in row]
    for spare in axes[count:]:
        spare.remove()
    del axes[count:]
    for one in axes:
        plain(one)
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=13, color=INK, weight="bold", linespacing=1.7)
    figure.text(0.012, 1 - 0.42 / height, below, ha="left", va="top", fontsize=9.5, color=SOFT)
    return figure, axes


def plain(axes: Axes) -> None:
    """Light grid, no box."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(EDGE)
    axes.grid(color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(fontsize=9.5, color=INK)


def named(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set(xlabel=x, ylabel=y)


def draw(axes: Axes, curve: Curve, colour: str, label: str | None = None, **look: Any) -> None:
    """A line through the means, its points, and the range of the seeds behind it."""
    axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, lw=0)
    axes.plot(curve.x, curve.mean, color=colour, label=label, **{"lw": 1.7, "marker": "o", "ms": 3.6, **look})


def theory(
    axes: Axes, x: Sequence[float], y: Sequence[float], label: str | None = None, colour: str = INK, **look: Any
) -> None:
    """What is expected, dashed."""
    axes.plot(x, y, color=colour, label=label, **{"lw": 1.1, "ls": (0, (4, 2.5)), "alpha": 0.8, "zorder": 5, **look})


def note(axes: Axes, text: str, y: float) -> None:
    """A word on a horizontal line."""
    axes.annotate(
        text,
        (0.01, y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8.5,
        color=SOFT,
    )


def legend(axes: Axes, **place: Any) -> None:
    axes.legend(**{"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 1.8, **place})


def legend_below(figure: Figure, columns: int) -> None:
    """One legend for all panels, each label once."""
    every = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    once = {label: handle for handle, label in reversed(every)}
    labels = list(reversed(once))
    figure.legend(
        [once[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def save(figure: Figure, stem: Path) -> None:
    """PNG and SVG, the same bytes for the same numbers."""
    FigureCanvasAgg(figure)
    with mpl.rc_context({"svg.hashsalt": "rebind", "svg.fonttype": "none"}):
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            data = io.BytesIO()
            figure.savefig(data, format=kind, metadata=metadata)
            write_atomically(stem.with_suffix(f".{kind}"), data.getvalue())
