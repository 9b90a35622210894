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

RULES = {  # label and color of a rule, the same in every figure
    "sum": ("sum", RED),
    "mamba2": ("Mamba-2", AMBER),
    "rfa": ("RFA", PINK),
    "tanh": ("tanh fast weights", OLIVE),
    "delta": ("delta", BLUE),
    "longhorn": ("Longhorn", CYAN),
    "gated_delta": ("gated delta", VIOLET),
    "recursive": ("recursive", GREEN),
    "softmax": ("softmax attention", INK),
}
# For a curve that coincides with another.
CROSS: dict[str, Any] = {"marker": "x", "ls": "none", "ms": 6.5, "mew": 1.6, "zorder": 4}
DASHES = (0, (4, 2.5))


def draw(axes: Axes, values: Curve, color: str, label: str | None = None, **look: Any) -> None:
    """Draw a line through the means, and the range of the seeds behind it."""
    axes.fill_between(values.x, values.low, values.high, color=color, alpha=0.15, lw=0)
    axes.plot(values.x, values.mean, color=color, label=label, **{"lw": 1.7, "marker": "o", "ms": 3.6, **look})


def draw_groups(
    axes: Axes, rows: Sequence[Row], x: str, y: str, by: str, looks: Mapping[str, tuple[str, str]], **look: Any
) -> None:
    """Draw one curve of y against x per value of the column `by`; `looks` maps each value to its label and color."""
    for value, (label, color) in looks.items():
        draw(axes, curve(rows, x, y, **{by: value}), color, label, **look)


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
