"""A benchmark's rows as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rebind.bench.scan import Row

# first s: the first forward call; then s: the first of both passes, after it. The last two: what share of the time of
# both passes their floors are; of the forward pass where that is all.
NUMBERS = ("fwd ms", "both ms", "fwd alone", "both alone", "MiB", "first s", "then s", "error", "I/O", "FLOP")
FIRST, KERNELS = NUMBERS[5:7], NUMBERS[2:4]  # the latter of a GPU, the host's part left out
# What a narrow screen does without, in this order.
SPARED = {
    "the first calls": FIRST,
    "the floors' shares": NUMBERS[8:],
    "the kernels alone": KERNELS,
    "the error": ("error",),
    "the memory": ("MiB",),
}


def tables(rows: list[Row], width: int | None = None) -> Iterator[Table]:
    """One table a shape, without columns that are empty or that `width` is too little for; `spared` says which."""
    for shape, some in _by_shape(rows):
        yield _fitted(shape, some, width)[0]


def spared(rows: list[Row], width: int) -> str | None:
    """What the tables of this width do without, in words; None where that is nothing."""
    left = {what for shape, some in _by_shape(rows) for what in _fitted(shape, some, width)[1]}
    told = [f"{what} ({', '.join(columns)})" for what, columns in SPARED.items() if what in left]
    return f"too narrow for {', '.join(told)}: they are in the JSON file" if told else None


def _by_shape(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    return [(shape, list(group)) for shape, group in groupby(rows, key=lambda row: row.shape)]


def _fitted(shape: str, rows: list[Row], width: int | None) -> tuple[Table, list[str]]:
    """The table, and what of `SPARED` it does without."""
    kept = [name for name in NUMBERS if any(_cells(row)[name] for row in rows)]
    made, left = _table(shape, rows, kept), []
    for what, columns in SPARED.items():
        if width is None or _width(made) <= width:
            break
        if not any(name in kept for name in columns):
            continue
        left.append(what)
        kept = [name for name in kept if name not in columns]
        made = _table(shape, rows, kept)
    return made, left


def _table(shape: str, rows: list[Row], columns: list[str]) -> Table:
    made = Table(box=SIMPLE_HEAD, title=shape, title_justify="left", title_style="bold", pad_edge=False)
    for column in ("rule", ""):
        made.add_column(column, overflow="fold")  # names give way before a number is cut
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = _cells(row)
        made.add_row(row.rule.removeprefix("gated delta, "), row.name, *(cells[name] for name in columns))
    return made


def _cells(row: Row) -> dict[str, str]:
    """The numbers of a row by their column."""
    return {
        "fwd ms": milliseconds(row.forward),
        "both ms": milliseconds(row.both),
        "fwd alone": milliseconds(row.kernels_forward),
        "both alone": milliseconds(row.kernels_both),
        "MiB": _number(row.peak_mib, ".0f"),
        "first s": _number(row.first_s, ".2f"),
        "then s": _number(row.first_both_s, ".2f"),
        "error": _number(row.error, ".0e"),
        "I/O": _number(row.io_both or row.io_forward, ".0%"),
        "FLOP": _number(row.flop_both or row.flop_forward, ".0%"),
    }


def _width(table: Table) -> int:
    """What a table takes where there is room for all of it."""
    return Console(width=1_000).measure(table).maximum


def notes(rows: list[Row]) -> Iterator[str]:
    """What could not be measured, and why."""
    if not all(row.calm for row in rows):
        yield "other programs kept this machine busy: times are too long, and say little"
    for row in rows:
        if row.note:
            yield f"{row.shape} {row.rule}, {row.name}: {row.note}"


def milliseconds(value: float | None) -> str:
    """Three digits, or all before the point.

    >>> milliseconds(0.2834), milliseconds(41.27), milliseconds(1234.5), milliseconds(None)
    ('0.283', '41.3', '1234', '')
    """
    if value is None:
        return ""
    return format(value, ".3f" if value < 1 else ".3g" if value < 100 else ".0f")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
