"""The measurements as tables for a terminal, and as a figure of time and memory against the length of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rebind.bench.contenders import parse_shape
from rebind.bench.scan import Measurement
from rebind.plotting import AMBER, BLUE, GREEN, INK, RED, VIOLET, legend_below, panels, render
from rebind.storage import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# "first s" is the first forward call, "then s" the first of both passes after it. The last two are the floors as a
# share of the time of both passes, or of the forward pass if that is all.
COLUMNS: dict[str, Callable[[Measurement], str]] = {
    "fwd ms": lambda row: milliseconds(row.forward),
    "both ms": lambda row: milliseconds(row.both),
    "fwd alone": lambda row: milliseconds(row.kernels_forward),
    "both alone": lambda row: milliseconds(row.kernels_both),
    "MiB": lambda row: _number(row.peak_mib, ".0f"),
    "first s": lambda row: _number(row.first_s, ".2f"),
    "then s": lambda row: _number(row.first_both_s, ".2f"),
    "error": lambda row: _number(row.error, ".0e"),
    "I/O": lambda row: _number(row.io_both or row.io_forward, ".0%"),
    "FLOP": lambda row: _number(row.flop_both or row.flop_forward, ".0%"),
}
OMITTED_FIRST = ("first s", "then s", "I/O", "FLOP", "fwd alone", "both alone", "error", "MiB")  # on a narrow terminal

COLORS = {"ours": BLUE, "fla": RED, "transformers": AMBER, "SDPA": GREEN, "loop": VIOLET}
DASHES = {"gated_delta": "-", "kda": (0, (3, 1, 1, 1)), "delta": (0, (5, 2)), "sum": (0, (1.2, 1.6)), "softmax": "-"}

Line = list[tuple[int, float]]  # (T, value)
Lines = dict[tuple[str, str], Line]  # by (name, rule)


def tables(rows: list[Measurement], width: int | None = None) -> Iterator[Table]:
    """Yield one table per shape, without empty columns and without those that do not fit in `width`."""
    for _, group in groupby(rows, key=lambda row: row.shape):
        yield _fit(list(group), width)[0]


def notes(rows: list[Measurement], width: int | None = None) -> Iterator[str]:
    """Yield what could not be measured and why, and which columns the tables leave out at this width."""
    for row in rows:
        if row.note:
            yield f"{row.shape} {row.rule}, {row.name}: {row.note}"
    groups = groupby(rows, key=lambda row: row.shape)
    omitted = {name for _, group in groups for name in _fit(list(group), width)[1]}
    if omitted:
        yield f"too narrow for {', '.join(name for name in COLUMNS if name in omitted)}: see the JSON file"


def _fit(rows: list[Measurement], width: int | None) -> tuple[Table, list[str]]:
    """Return the table, and the columns that it leaves out."""
    columns = [name for name, cell in COLUMNS.items() if any(cell(row) for row in rows)]
    omitted = []
    table = _table(rows, columns)
    for name in OMITTED_FIRST:
        if width is not None and name in columns and Console(width=1_000).measure(table).maximum > width:
            columns.remove(name)
            omitted.append(name)
            table = _table(rows, columns)
    return table, omitted


def _table(rows: list[Measurement], columns: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=rows[0].shape, title_justify="left", title_style="bold", pad_edge=False)
    for column in ("rule", ""):
        table.add_column(column, overflow="fold")  # names give way before a number is cut
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.rule, row.name, *(COLUMNS[column](row) for column in columns))
    return table


def milliseconds(value: float | None) -> str:
    """Return three digits, or all before the point.

    >>> milliseconds(0.2834), milliseconds(41.27), milliseconds(1234.5), milliseconds(None)
    ('0.283', '41.3', '1234', '')
    """
    if value is None:
        return ""
    return format(value, ".3f" if value < 1 else ".3g" if value < 100 else ".0f")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def draw(document: dict[str, Any], *paths: Path) -> bool:
    """Write the figure, in the formats that the paths' suffixes name; return False if no shape has two lengths."""
    where, times = lines(document, "both")
    _, memory = lines(document, "peak_mib")
    if not any(len(line) > 1 for line in times.values()):
        return False
    names = ("forward + backward, ms", "peak memory with the inputs, MiB")
    labels = [(name, "T, tokens per sequence", "") for name in names]
    title = f"The scan against the length of the sequence  ({where})"
    figure, axes = panels(title, _caption(document), labels, size=(4.8, 4.7))
    for panel, drawn in zip(axes, (times, memory), strict=True):
        _draw_lines(panel, drawn)
    legend_below(figure, 4)
    for path in paths:
        write_file(path, render(figure, path.suffix.removeprefix(".") or "png"))
    return True


def lines(document: dict[str, Any], column: str) -> tuple[str, Lines]:
    """Return the family of shapes (B, ·, H, D) with most lengths, and a line for each (name, rule) in it.

    Of our own rules those are drawn that another implementation has too.
    """
    families: dict[tuple[int, int, int], Lines] = {}
    for row in document["rows"]:
        if row[column] is not None and row["rule"] in DASHES:
            b, t, h, d = parse_shape(row["shape"])
            families.setdefault((b, h, d), {}).setdefault((row["name"], row["rule"]), []).append((t, row[column]))
    if not families:
        return "", {}
    (b, h, d), family = max(families.items(), key=lambda item: max(map(len, item[1].values())))
    shared = {rule for name, rule in family if name != "ours"} | {"gated_delta"}
    drawn = {key: sorted(line) for key, line in family.items() if key[1] in shared or len(family) == 1}
    return f"batch {b}, {h} heads of {d}", drawn


def _draw_lines(axes: Axes, drawn: Lines) -> None:
    """Draw every line, and write beside others how many times ours they take at the longest length of both."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({t for line in drawn.values() for t, _ in line})
    axes.set_xticks(lengths, [f"{t // 1024}k" if t % 1024 == 0 else str(t) for t in lengths])
    axes.minorticks_off()
    names = [name for name, _ in drawn]
    for (name, rule), line in drawn.items():
        is_ours, color = name == "ours", COLORS.get(name, INK)
        label = f"{name}, {rule}" if is_ours or names.count(name) > 1 else name
        look: dict[str, Any] = {"lw": 2.4, "zorder": 3} if is_ours else {"lw": 1.6, "zorder": 2}
        axes.plot(*zip(*line, strict=True), ls=DASHES[rule], marker="o", ms=4.5, color=color, label=label, **look)
        ours = dict(drawn.get(("ours", rule), []))
        shared = [(t, value) for t, value in line if t in ours]
        if shared and not is_ours:
            t, value = shared[-1]
            text: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5, "annotation_clip": False}
            axes.annotate(f"{value / ours[t]:.1f}× ours", (t, value), xytext=(7, -3), color=color, **text)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")


def _caption(document: dict[str, Any]) -> str:
    here = document["machine"]
    threads = f"{here['threads']} thread{'s' * (here['threads'] != 1)}"
    device = f"{here['processor']}, {threads}" if document["note"].startswith("cpu") else here["gpu"]
    dtype = document["note"].split(";")[0].split(", ")[-1]
    names = ("torch", "fla", "transformers")
    return " · ".join([device, dtype, *(f"{name} {here[name]}" for name in names if here.get(name, "none") != "none")])
