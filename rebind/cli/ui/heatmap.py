"""Heatmaps in a terminal: shade and colour, so that either alone can be read."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

SHADES = "·░▒▓█"
COLOURS = {"hidden": (150, 110, 255), "mlp": (60, 200, 110), "attention": (255, 95, 85), "lens": (80, 160, 255)}
LABEL = 22  # columns for the names of rows


def heatmap(labels: Sequence[str], rows: Sequence[Sequence[float]], kind: str, *, width: int, top: float) -> list[Text]:
    """A line a row, dark at 0 and full at `top`; a last line numbers the columns.

    Where there are more columns than room, neighbours share a cell, which shows the largest of them.
    """
    room = max(10, width - LABEL - 1)
    count = max((len(row) for row in rows), default=0)
    share = -(-count // room)  # columns a cell
    cells = -(-count // share)
    wide = 2 if 2 * cells <= room else 1
    lines = []
    for label, row in zip(labels, rows, strict=True):
        line = Text(f"{_cut(label):>{LABEL}} ")
        for begin in range(0, count, share):
            line.append(*_cell(max(row[begin : begin + share]) / top if top > 0 else 0.0, wide, kind))
        lines.append(line)
    return [*lines, Text(" " * (LABEL + 1) + _axis(count, share, wide), style="dim")]


def _cell(level: float, wide: int, kind: str) -> tuple[str, str]:
    level = min(1.0, max(0.0, level))
    colour = ",".join(str(round(60 + (part - 60) * level)) for part in COLOURS[kind])
    return SHADES[min(len(SHADES) - 1, round(level * (len(SHADES) - 1) + 0.2))] * wide, f"rgb({colour})"


def _axis(count: int, share: int, wide: int) -> str:
    """Every fifth column's number, where it begins.

    >>> _axis(12, 1, 2)
    '0         5         10'
    """
    line = ""
    for column in range(0, count, 5 * share):
        line = line.ljust(column // share * wide) + str(column)
    return line


def _cut(label: str) -> str:
    line = label.replace("\n", "⏎").strip(" ") or repr(label)
    return line if len(line) <= LABEL else f"{line[: LABEL - 1]}…"
