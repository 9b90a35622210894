"""Pictures of traces and lenses. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rebind.errors import InputError
from rebind.files import write_atomically

if TYPE_CHECKING:
    from rebind.analysis.averages import Average
    from rebind.analysis.lens import Lens
    from rebind.analysis.traces import Trace

COLOURS = {"hidden": "Purples", "mlp": "Greens", "attention": "Reds"}  # as in ROME's figures
TITLES = {
    "hidden": "one block's output restored",
    "mlp": "MLP restored, {} layers",
    "attention": "attention restored, {} layers",
}
SHOWN_TOKENS = 16  # of a lens: more would not be readable


def draw_trace(trace: Trace | Average, path: Path, *, window: int, title: str) -> Path:
    """A heatmap a kind, tokens by layers, one colour scale for all of them."""
    pyplot = _pyplot()
    kinds = list(trace.effects)
    rows, depth = trace.effects[kinds[0]].shape
    top = max(float(torch.stack(list(trace.effects.values())).max()), 1e-9)
    size = (1.9 + 3.5 * len(kinds), 1.35 + 0.25 * rows)
    figure, axes = pyplot.subplots(1, len(kinds), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], kinds, strict=True):
        image = axis.imshow(
            trace.effects[kind].numpy(), cmap=COLOURS[kind], vmin=0.0, vmax=top, aspect="auto", interpolation="nearest"
        )
        axis.set_title(TITLES[kind].format(window), fontsize=9)
        axis.set_xlabel("layer" if kind == "hidden" else "centre of the window (layer)", fontsize=8)
        axis.set_xticks(range(0, depth, max(1, depth // 6)))
        axis.tick_params(labelsize=8, length=2)
        bar = figure.colorbar(image, ax=axis, pad=0.02, fraction=0.05)
        bar.ax.tick_params(labelsize=7, length=2)
        bar.outline.set_visible(False)
        for spine in axis.spines.values():
            spine.set_visible(False)
        if axis is axes[0][-1]:
            bar.set_label("probability that comes back", fontsize=8)
    axes[0][0].set_yticks(range(rows), [_label(text) for text in trace.labels])
    figure.suptitle(_plain(title), fontsize=10)
    return _save(pyplot, figure, path)


def draw_lens(lens: Lens, path: Path, *, title: str) -> Path:
    """Layers by tokens, the likeliest token written in each cell, coloured by the probability of the answer."""
    pyplot = _pyplot()
    first = max(0, len(lens.question.ids) - SHOWN_TOKENS)
    shown = lens.probability[:, first:]
    depth, width = shown.shape
    size = (1.6 + 0.85 * width, 1.2 + 0.19 * depth)
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    image = axis.imshow(
        shown.numpy(), cmap="Blues", vmin=0.0, vmax=max(float(shown.max()), 1e-9), aspect="auto", origin="lower"
    )
    middle = float(shown.max()) / 2
    for layer in range(depth):
        for at in range(width):
            dark = float(shown[layer, at]) > middle
            text = _label(lens.top[layer][first + at])[:11]
            bold = "bold" if int(lens.rank[layer, first + at]) == 1 else "normal"
            axis.text(at, layer, text, ha="center", va="center", fontsize=6, weight=bold, color="w" if dark else "0.25")
    axis.set_xticks(range(width), [_label(text) for text in lens.question.labels[first:]], fontsize=8)
    axis.set_yticks(range(0, depth, max(1, depth // 10)))
    axis.tick_params(labelsize=8, length=2)
    axis.set_ylabel("layer", fontsize=8)
    bar = figure.colorbar(image, ax=axis, pad=0.01, fraction=0.03)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)
    bar.set_label(_plain(f"probability of {lens.answer!r}"), fontsize=8)
    figure.suptitle(_plain(title), fontsize=10)
    return _save(pyplot, figure, path)


def _label(text: str) -> str:
    """A token on one line, its leading space left out."""
    return _plain(text.strip(" ").replace("\n", "⏎") or repr(text))


def _plain(text: str) -> str:
    """Text in which $ is a dollar, and characters that the figure's font lacks are shown by their number."""
    return "".join(_drawable(letter) for letter in text).replace("$", r"\$")


def _drawable(letter: str) -> str:
    from matplotlib import font_manager

    if letter.isascii():
        return letter
    path = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans"))
    return letter if ord(letter) in font_manager.get_font(path).get_charmap() else f"U+{ord(letter):04X}"


def _pyplot() -> Any:
    """pyplot without a window, on any machine."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise InputError(
            "matplotlib is not installed, expected it for a picture: pip install 'rebind[lab]', or leave out --out"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110, metadata={"Software": None})  # else its version is in the bytes
    pyplot.close(figure)
    write_atomically(path, data.getvalue())
    return path
