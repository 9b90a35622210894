"""The style of every figure. matplotlib is imported when something is drawn: measuring does not need it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rebind.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, FAINT, EDGE = "#1f2937", "#6b7280", "#e5e7eb", "#a9b1bd"
BLUE, AMBER, GREEN, RED = "#2563eb", "#d97706", "#059669", "#dc2626"
VIOLET, CYAN, PINK, OLIVE = "#7c3aed", "#0891b2", "#be185d", "#4d7c0f"
COLORS = (BLUE, AMBER, GREEN, RED, VIOLET, CYAN, PINK, OLIVE)  # for series without a fixed color


def require_matplotlib() -> None:
    """Raise an error that says what to install if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InputError(
            "Figures need matplotlib, which is not installed",
            advice="Run pip install 'rebind[lab]'",
            code="package_missing",
        ) from None


def panels(
    title: str,
    subtitle: str,
    labels: Sequence[tuple[str, str, str]],
    *,
    columns: int = 3,
    size: tuple[float, float] = (4.6, 4.4),
) -> tuple[Figure, list[Axes]]:
    """Return a figure with one panel per label (its title and the names of its axes), each `size` inches large."""
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = min(len(labels), columns)
    rows = -(-len(labels) // columns)
    width, height = size[0] * columns, size[1] * rows
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    axes = [panel for row in figure.subplots(rows, columns, squeeze=False) for panel in row]
    for unused in axes[len(labels) :]:
        unused.remove()
    for panel, (name, x, y) in zip(axes, labels, strict=False):
        simplify(panel)
        panel.set_title(name, loc="left", fontsize=10.5, color=INK)
        panel.set(xlabel=x, ylabel=y)
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=13, color=INK, weight="bold", linespacing=1.7)
    figure.text(0.012, 1 - 0.42 / height, subtitle, ha="left", va="top", fontsize=9.5, color=SOFT)
    return figure, axes[: len(labels)]


def simplify(axes: Axes) -> None:
    """Give a panel a light grid and no box."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(EDGE)
    axes.grid(color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(fontsize=9.5, color=INK)


def legend(axes: Axes, **options: Any) -> None:
    """Add a legend inside a panel."""
    axes.legend(**{"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 1.8, **options})


def legend_below(figure: Figure, columns: int) -> None:
    """Add one legend for all panels, with each label once, in as many of these columns as there is room for."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    widest = 0.45 + 0.075 * max(map(len, handles), default=0)  # inches: a marker and 9-point letters
    columns = max(1, min(columns, int(figure.get_figwidth() / widest)))
    style = {"ncols": columns, "frameon": False, "fontsize": 9, "labelcolor": INK}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", **style)


def render(figure: Figure, form: str = "png") -> bytes:
    """Return the figure as PNG or SVG: the same bytes for the same numbers."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    data = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "rebind", "svg.fonttype": "none"}):
        figure.savefig(data, format=form, metadata={"Date": None} if form == "svg" else {"Software": None})
    return data.getvalue()


def shorten(name: str, length: int = 36) -> str:
    """Shorten a name in its middle, and keep matplotlib from reading $ as mathematics.

    >>> shorten("SmolLM2-135M-Instruct"), shorten("a-name-that-goes-on-and-on", 16)
    ('SmolLM2-135M-Instruct', 'a-name-…n-and-on')
    """
    half = length // 2
    short = name if len(name) <= length else f"{name[: half - 1]}…{name[-half:]}"
    return short.replace("$", r"\$")
