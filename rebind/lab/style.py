"""The curves of experiments: panels of them, which the studio shows while they are measured, and how they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from rebind import plotting
from rebind.lab.report import Curve, curve, select
from rebind.plotting import AMBER, BLUE, CYAN, EDGE, GREEN, INK, OLIVE, PINK, RED, SOFT, VIOLET
from rebind.storage import Row

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Axes: TypeAlias = "matplotlib.axes.Axes"

LineStyle: TypeAlias = dict[str, Any]  # keyword arguments of matplotlib's `plot`


def line(label: str, color: str, **options: Any) -> LineStyle:
    """Return the style of a curve: its label, its color and other options of matplotlib's `plot`."""
    return {"label": label, "color": color, **options}


DASHES = (0, (4, 2.5))
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
    "softmax": line("softmax attention", INK, ls=DASHES),
}
CROSS: LineStyle = {"marker": "x", "ls": "none", "ms": 6.5, "mew": 1.6, "zorder": 4}  # for a curve on top of another
SHADES = (CYAN, BLUE, VIOLET, PINK, AMBER)  # for curves that differ in a size


@dataclass(frozen=True)
class Series:
    """One curve: its look, the column that it shows, and the rows that belong to it."""

    look: LineStyle
    y: str
    where: Mapping[str, Any] = field(default_factory=dict)


def by(column: str, looks: Mapping[Any, LineStyle], y: str, **where: Any) -> list[Series]:
    """Return one series per value of a column that has a look."""
    return [Series(look, y, {**where, column: value}) for value, look in looks.items()]


@dataclass(frozen=True)
class Panel:
    """Some curves over one quantity. `expand` changes the rows of a series, for example one that holds a list."""

    title: str
    x_label: str
    x: str
    series: Sequence[Series]
    y_label: str = ""
    x_scale: str = "linear"  # or "log", or "symlog", which shows 0 too
    y_scale: str = "linear"
    expand: Callable[[Sequence[Row]], Sequence[Row]] = list
    markers: bool = True

    def curves(self, rows: Sequence[Row]) -> Iterator[tuple[LineStyle, Curve]]:
        """Yield each curve with its look, as far as it is measured: the mean and the range over the seeds at each x."""
        for one in self.series:
            some = self.expand(select(rows, **one.where))
            yield one.look, curve([row for row in some if one.y in row], self.x, one.y)

    def to_json(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the panel for the studio, with what is measured so far."""
        series = [
            {"label": look["label"], "color": look["color"]}
            | {"x": values.x, "mean": values.mean, "low": values.low, "high": values.high}
            for look, values in self.curves(rows)
        ]
        title = " · ".join(filter(None, [self.title, self.y_label]))
        scales = {"x_scale": self.x_scale, "y_scale": self.y_scale}
        return {"title": title, "x_label": self.x_label, **scales, "series": series}

    def draw(self, axes: Axes, rows: Sequence[Row]) -> None:
        """Draw the curves."""
        for look, values in self.curves(rows):
            self.draw_curve(axes, values, look if self.markers else {**look, "marker": ""})
        for name, scale in (("x", self.x_scale), ("y", self.y_scale)):
            options = {"linthresh": 1, "linscale": 0.4} if scale == "symlog" else {}
            getattr(axes, f"set_{name}scale")(scale, **options)

    def draw_curve(self, axes: Axes, values: Curve, look: LineStyle) -> None:
        """Draw a line through the means, and the range of the seeds behind it."""
        axes.fill_between(values.x, values.low, values.high, color=look["color"], alpha=0.15, lw=0)
        axes.plot(values.x, values.mean, **{"lw": 1.7, "marker": "o", "ms": 3.6, **look})


log_panel = partial(Panel, x_scale="log", y_scale="log")


def figure_of(
    panels: Sequence[Panel], rows: Sequence[Row], title: str, subtitle: str
) -> tuple[matplotlib.figure.Figure, list[Axes]]:
    """Return a figure of these panels, in two columns or three."""
    labels = [(panel.title, panel.x_label, panel.y_label) for panel in panels]
    columns, size = (2, (5.4, 4.0)) if len(panels) in (1, 2, 4) else (3, (4.8, 4.4))
    figure, all_axes = plotting.panels(title, subtitle, labels, columns=columns, size=size)
    for panel, axes in zip(panels, all_axes, strict=True):
        panel.draw(axes, rows)
    return figure, all_axes


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
