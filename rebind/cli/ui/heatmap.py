"""Heatmaps in a terminal, readable both by shade and by color."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from rebind.cli.ui.tables import one_line

SHADES = "·░▒▓█"
COLORS = {"hidden": (150, 110, 255), "mlp": (60, 200, 110), "attention": (255, 95, 85), "lens": (80, 160, 255)}
LABEL_WIDTH = 22


def heatmap(labels: Sequence[str], rows: Sequence[Sequence[float]], kind: str, *, width: int, top: float) -> list[Text]:
    """Return one line per row, dark at 0 and full at `top`, and a last line that numbers the columns.

    If there are more columns than fit, adjacent columns share a cell, which shows their maximum.
    """
    available = max(10, width - LABEL_WIDTH - 1)
    count = max((len(row) for row in rows), default=0)
    columns_per_cell = -(-count // available)
    cells = -(-count // columns_per_cell)
    cell_width = 2 if 2 * cells <= available else 1
    lines = []
    for label, row in zip(labels, rows, strict=True):
        line = Text(f"{one_line(label, LABEL_WIDTH):>{LABEL_WIDTH}} ")
        for start in range(0, count, columns_per_cell):
            level = max(row[start : start + columns_per_cell]) / top if top > 0 else 0.0
            line.append(*_cell(level, cell_width, kind))
        lines.append(line)
    axis = _axis(count, columns_per_cell, cell_width)
    return [*lines, Text(" " * (LABEL_WIDTH + 1) + axis, style="dim")]


def _cell(level: float, width: int, kind: str) -> tuple[str, str]:
    level = min(1.0, max(0.0, level))
    color = ",".join(str(round(60 + (channel - 60) * level)) for channel in COLORS[kind])
    return SHADES[min(len(SHADES) - 1, round(level * (len(SHADES) - 1) + 0.2))] * width, f"rgb({color})"


def _axis(count: int, columns_per_cell: int, cell_width: int) -> str:
    """Return a line with the number of every fifth column at its position.

    >>> _axis(12, 1, 2)
    '0         5         10'
    """
    line = ""
    for column in range(0, count, 5 * columns_per_cell):
        line = line.ljust(column // columns_per_cell * cell_width) + str(column)
    return line
