"""Draw the curves of experiments, in the style of `rebind.plotting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rebind.lab.experiment import Row
from rebind.lab.report import Curve, curve
from rebind.plotting import AMBER, BLUE, CYAN, EDGE, GREEN, INK, OLIVE, PINK, RED, SOFT, VIOLET

if TYPE_CHECKING:
    import matplotlib.axes

Axes: TypeAlias = "matplotlib.axes.Axes"

LineStyle: TypeAlias = dict[str, Any]  # keyword arguments of matplotlib's `plot`


def line(label: str, color: str, **options: Any) -> LineStyle:
    """Return the style of a curve: its label, its color and other options of matplotlib's `plot`."""
    return {"label": label, "color": color, **options}


RULES = {  # the same in every figure
    "sum": line("sum", RED),
    "mamba2": line("Mamba-2", AMBER),
    "rfa": line("RFA", PINK),
    "tanh": line("tanh fast weights", OLIVE),
    "delta": line("delta", BLUE),
    "longhorn": line("Longhorn", CYAN),
    "gated_delta": line("gated delta", VIOLET),
    "gla": line("GLA", AMBER, marker="s"),
    "kda": line("KDA", VIOLET, marker="s"),
    "gdn2": line("GDN-2", GREEN, marker="s"),
    "comba": line("Comba", PINK, marker="s"),
    "rwkv7": line("RWKV-7", OLIVE, marker="s"),
    "recursive": line("recursive", GREEN),
    "softmax": line("softmax attention", INK),
}
CROSS: LineStyle = {"marker": "x", "ls": "none", "ms": 6.5, "mew": 1.6, "zorder": 4}  # for a curve on top of another
DASHES = (0, (4, 2.5))


def draw(axes: Axes, values: Curve, *, color: str, **options: Any) -> None:
    """Draw a line through the means, and the range of the seeds behind it."""
    axes.fill_between(values.x, values.low, values.high, color=color, alpha=0.15, lw=0)
    axes.plot(values.x, values.mean, color=color, **{"lw": 1.7, "marker": "o", "ms": 3.6, **options})


def draw_groups(axes: Axes, rows: Sequence[Row], x: str, y: str, by: str, styles: Mapping[Any, LineStyle]) -> None:
    """Draw one curve of y against x for each value of the column `by` in `styles`."""
    for value, line_style in styles.items():
        draw(axes, curve(rows, x, y, **{by: value}), **line_style)


def draw_theory(axes: Axes, x: Sequence[float], y: Sequence[float], label: str | None = None) -> None:
    """Draw a theoretical prediction as a dashed line."""
    axes.plot(x, y, color=INK, label=label, lw=1.1, ls=DASHES, alpha=0.8, zorder=5)


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float] = (4, 0), **options: Any) -> None:
    """Write a note beside a point; `offset` is in typographic points."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **{"fontsize": 8.5, "color": SOFT, **options})


def mark_level(axes: Axes, y: float, text: str) -> None:
    """Draw a thin horizontal line with a name."""
    axes.axhline(y, color=EDGE, lw=1)
    note(axes, text, (0.01, y), (0, 3), xycoords=("axes fraction", "data"))
