"""The loss curve of a run. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rebind.files import write_atomically
from rebind.nn.training.log import Row


def draw_curve(path: Path, rows: Sequence[Row], title: str) -> bool:
    """Draw the losses of a log into a PNG file; False where there is no matplotlib to draw with."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trained = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held = [(row["step"], row["validation"]) for row in rows if "validation" in row]
    axes.plot(*zip(*trained, strict=True), color="#9bb7d4", linewidth=0.8, label="training")
    if held:
        axes.plot(*zip(*held, strict=True), color="#c44e52", marker="o", markersize=3, label="held text")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title.replace("$", r"\$"))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110, metadata={"Software": None})
    write_atomically(path, data.getvalue())
    return True
