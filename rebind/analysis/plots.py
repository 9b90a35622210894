"""Figures of traces and lenses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rebind.analysis.lens import Lens
from rebind.analysis.traces import AverageTrace, Trace
from rebind.plotting import panels, render, require_matplotlib, shorten
from rebind.storage import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {  # kind → (colors as in ROME's figures, title, label of the layers)
    "hidden": ("Purples", "one block's output restored", "layer"),
    "mlp": ("Greens", "MLP restored (window: {})", "center of the window (layer)"),
    "attention": ("Reds", "attention restored (window: {})", "center of the window (layer)"),
}
MAX_LENS_TOKENS = 16  # more would not be readable
MAX_CELL_LETTERS = 12
LETTERS_PER_INCH = 12  # of a subtitle
FRAME_COLOR = "#d1495b"


def draw_trace(trace: Trace | AverageTrace, path: str | Path, *, title: str) -> Path:
    """Draw one heatmap per kind, tokens by layers, with one color scale."""
    rows = len(trace.labels)
    top = max(float(effects.max()) for effects in trace.effects.values())
    styles = [STYLES[kind] for kind in trace.effects]
    labels = [(name.format(trace.window), x_label, "") for _, name, x_label in styles]
    size = (4.2 if len(labels) > 1 else 6.0, 1.9 + 0.25 * rows)
    subtitle = shorten(_drawable(title), int(LETTERS_PER_INCH * size[0] * len(labels)))
    figure, axes = panels("Causal trace", subtitle, labels, size=size)
    for panel, effects, (colors, *_) in zip(axes, trace.effects.values(), styles, strict=True):
        _heatmap(panel, effects, top, "probability restored" if panel is axes[-1] else "", cmap=colors)
        panel.set_xticks(range(0, effects.shape[1], max(1, effects.shape[1] // 6)))
        panel.set_yticks(range(rows), [_label(text) for text in trace.labels] if panel is axes[0] else [""] * rows)
    write_file(path, render(figure))
    return Path(path)


def draw_lens(lens: Lens, path: str | Path, *, title: str) -> Path:
    """Draw layers by tokens: each cell names the likeliest next token and is colored by its probability.

    Cells in which that token is the answer have a frame.
    """
    first = max(0, len(lens.prompt.ids) - MAX_LENS_TOKENS)
    probabilities, is_answer = lens.top_probability[:, first:], lens.rank[:, first:] == 1
    depth, width = probabilities.shape
    size = (2.2 + 0.9 * width, 2.0 + 0.22 * depth)
    subtitle = shorten(_drawable(title), int(LETTERS_PER_INCH * size[0]))
    x_label = _drawable(f"after this token (framed: the answer {lens.answer!r} is the first choice)")
    figure, (axes,) = panels("Logit lens", subtitle, [("", x_label, "layer")], size=size)
    from matplotlib.patches import Rectangle

    _heatmap(axes, probabilities, 1.0, "probability of the likeliest next token", cmap="Blues", origin="lower")
    for layer, column in torch.cartesian_prod(torch.arange(depth), torch.arange(width)).tolist():
        color = "w" if float(probabilities[layer, column]) > 0.5 else "0.15"
        weight = "bold" if is_answer[layer, column] else "normal"
        text = _label(lens.top[layer][first + column])[:MAX_CELL_LETTERS]
        axes.text(column, layer, text, ha="center", va="center", fontsize=7, weight=weight, color=color)
        if is_answer[layer, column]:
            corner = (column - 0.48, layer - 0.46)
            axes.add_patch(Rectangle(corner, 0.96, 0.92, fill=False, edgecolor=FRAME_COLOR, linewidth=1.2, zorder=3))
    axes.set_xticks(range(width), [_label(text) for text in lens.prompt.labels[first:]])
    axes.set_yticks(range(0, depth, max(1, depth // 10)))
    write_file(path, render(figure))
    return Path(path)


def _heatmap(axes: Axes, values: Tensor, top: float, label: str, **style: Any) -> None:
    """Draw values from 0 to `top`, with a labeled color bar."""
    image = axes.imshow(values.numpy(), vmin=0.0, vmax=max(top, 1e-9), aspect="auto", interpolation="nearest", **style)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=40)
    bar.ax.tick_params(labelsize=7, length=0)
    bar.set_label(label, fontsize=8)
    bar.outline.set_visible(False)


def _label(text: str) -> str:
    """Return a token on one line, without its leading space."""
    return _drawable(text.strip(" ").replace("\n", "⏎") or repr(text)).replace("$", r"\$")


def _drawable(text: str) -> str:
    """Return text in which characters that the font lacks are replaced by their numbers."""
    require_matplotlib()
    from matplotlib import font_manager

    charmap = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    return "".join(letter if ord(letter) in charmap else f"U+{ord(letter):04X}" for letter in text)
