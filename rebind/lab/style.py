"""How curves of experiments are drawn, in the style of `rebind.plotting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rebind.lab.experiment import Row
from rebind.lab.report import Curve, curve
from rebind.plotting import AMBER, BLUE, CYAN, EDGE, GREEN, INK, OLIVE, PINK, RED, SOFT, VIOLET

if TYPE_CHECKING:
    import matplotlib.axes

Axes: TypeAlias = "matplotlib.axes.Axes"

Look: TypeAlias = dict[str, Any]  # of a curve, in the words of matplotlib's `plot`


def look(label: str, color: str, **more: Any) -> Look:
    """Return the label and the color of a curve, and whatever else makes it look different."""
    return {"label": label, "color": color, **more}


RULES = {  # the same in every figure
    "sum": look("sum", RED),
    "mamba2": look("Mamba-2", AMBER),
    "rfa": look("RFA", PINK),
    "tanh": look("tanh fast weights", OLIVE),
    "delta": look("delta", BLUE),
    "longhorn": look("Longhorn", CYAN),
    "gated_delta": look("gated delta", VIOLET),
    "recursive": look("recursive", GREEN),
    "softmax": look("softmax attention", INK),
}
CROSS: Look = {"marker": "x", "ls": "none", "ms": 6.5, "mew": 1.6, "zorder": 4}  # for a curve on top of another
DASHES = (0, (4, 2.5))


def draw(axes: Axes, values: Curve, *, color: str, **look: Any) -> None:
    """Draw a line through the means, and the range of the seeds behind it."""
    axes.fill_between(values.x, values.low, values.high, color=color, alpha=0.15, lw=0)
    axes.plot(values.x, values.mean, color=color, **{"lw": 1.7, "marker": "o", "ms": 3.6, **look})


def draw_groups(axes: Axes, rows: Sequence[Row], x: str, y: str, by: str, looks: Mapping[Any, Look]) -> None:
    """Draw one curve of y against x per value of the column `by` that has a look."""
    for value, look in looks.items():
        draw(axes, curve(rows, x, y, **{by: value}), **look)


def draw_theory(axes: Axes, x: Sequence[float], y: Sequence[float], label: str | None = None) -> None:
    """Draw what theory predicts, as a dashed line."""
    axes.plot(x, y, color=INK, label=label, lw=1.1, ls=DASHES, alpha=0.8, zorder=5)


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float] = (4, 0), **look: Any) -> None:
    """Write a remark beside a place; `offset` is in typographic points."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **{"fontsize": 8.5, "color": SOFT, **look})


def mark_level(axes: Axes, y: float, text: str) -> None:
    """Draw a thin horizontal line with a name."""
    axes.axhline(y, color=EDGE, lw=1)
    note(axes, text, (0.01, y), (0, 3), xycoords=("axes fraction", "data"))
