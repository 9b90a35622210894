"""Figures of traces and lenses. matplotlib is imported when a figure is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rebind.analysis.lens import Lens
from rebind.analysis.traces import AverageTrace, Trace
from rebind.plotting import render, require_matplotlib
from rebind.storage import write_file

COLORS = {"hidden": "Purples", "mlp": "Greens", "attention": "Reds"}  # as in ROME's figures
TITLES = {
    "hidden": "one block's output restored",
    "mlp": "MLP restored (window: {})",
    "attention": "attention restored (window: {})",
}
MAX_LENS_TOKENS = 16  # more would not be readable


def draw_trace(trace: Trace | AverageTrace, path: str | Path, *, title: str) -> Path:
    """Draw one heatmap per kind, tokens by layers, with one color scale."""
    kinds = list(trace.effects)
    rows, depth = trace.effects[kinds[0]].shape
    top = max(float(torch.stack(list(trace.effects.values())).max()), 1e-9)
    size = (1.9 + 3.5 * len(kinds), 1.35 + 0.25 * rows)
    figure, axes = _figure(size, len(kinds))
    for axis, kind in zip(axes, kinds, strict=True):
        image = axis.imshow(
            trace.effects[kind].numpy(), cmap=COLORS[kind], vmin=0.0, vmax=top, aspect="auto", interpolation="nearest"
        )
        axis.set_title(TITLES[kind].format(trace.window), fontsize=9)
        axis.set_xlabel("layer" if kind == "hidden" else "center of the window (layer)", fontsize=8)
        axis.set_xticks(range(0, depth, max(1, depth // 6)))
        axis.tick_params(labelsize=8, length=2)
        bar = _add_color_bar(figure, image, axis)
        for spine in axis.spines.values():
            spine.set_visible(False)
    bar.set_label("probability restored", fontsize=8)
    axes[0].set_yticks(range(rows), [_label(text) for text in trace.labels])
    figure.suptitle(_drawable(title), fontsize=10)
    write_file(path, render(figure))
    return Path(path)


def draw_lens(lens: Lens, path: str | Path, *, title: str) -> Path:
    """Draw layers by tokens, each cell with its likeliest token, colored by the probability of the answer."""
    first = max(0, len(lens.prompt.ids) - MAX_LENS_TOKENS)
    shown = lens.probability[:, first:]
    depth, width = shown.shape
    size = (1.6 + 0.85 * width, 1.2 + 0.19 * depth)
    figure, (axis,) = _figure(size, 1)
    image = axis.imshow(
        shown.numpy(), cmap="Blues", vmin=0.0, vmax=max(float(shown.max()), 1e-9), aspect="auto", origin="lower"
    )
    middle = float(shown.max()) / 2
    for layer in range(depth):
        for column in range(width):
            text = _label(lens.top[layer][first + column])[:11]
            color = "w" if float(shown[layer, column]) > middle else "0.25"
            weight = "bold" if int(lens.rank[layer, first + column]) == 1 else "normal"
            axis.text(column, layer, text, ha="center", va="center", fontsize=6, weight=weight, color=color)
    axis.set_xticks(range(width), [_label(text) for text in lens.prompt.labels[first:]], fontsize=8)
    axis.set_yticks(range(0, depth, max(1, depth // 10)))
    axis.tick_params(labelsize=8, length=2)
    axis.set_ylabel("layer", fontsize=8)
    bar = _add_color_bar(figure, image, axis)
    bar.set_label(_drawable(f"probability of {lens.answer!r}"), fontsize=8)
    figure.suptitle(_drawable(title), fontsize=10)
    write_file(path, render(figure))
    return Path(path)


def _figure(size: tuple[float, float], panels: int) -> tuple[Any, Any]:
    """Return a figure and its panels, side by side."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _add_color_bar(figure: Any, image: Any, axis: Any) -> Any:
    bar = figure.colorbar(image, ax=axis, pad=0.02, fraction=0.05)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)
    return bar


def _label(text: str) -> str:
    """Return a token on one line, without its leading space."""
    return _drawable(text.strip(" ").replace("\n", "⏎") or repr(text))


def _drawable(text: str) -> str:
    """Return text in which $ is a dollar sign, and characters that the font lacks are replaced by their numbers."""
    from matplotlib import font_manager

    path = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans"))
    known = font_manager.get_font(path).get_charmap()
    return "".join(letter if ord(letter) in known else f"U+{ord(letter):04X}" for letter in text).replace("$", r"\$")
