"""A benchmark's rows as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rebind.bench.scan import Row

# first s: the first forward call; then s: the first of both passes, after it. The last two: what share of the time of
# both passes their floors are; of the forward pass where that is all.
NUMBERS = ("fwd ms", "both ms", "MiB", "first s", "then s", "error", "I/O", "FLOP")
KERNELS = ("fwd alone", "both alone")  # of a GPU, the host's part left out


def tables(rows: list[Row]) -> Iterator[Table]:
    """One table a shape."""
    for shape, group in groupby(rows, key=lambda row: row.shape):
        some = list(group)
        alone = any(row.kernels_forward for row in some)
        made = Table(box=SIMPLE_HEAD, title=shape, title_justify="left", title_style="bold", pad_edge=False)
        for column in ("rule", ""):
            made.add_column(column, no_wrap=True)
        for column in (*NUMBERS[:2], *(KERNELS if alone else ()), *NUMBERS[2:]):
            made.add_column(column, justify="right", no_wrap=True)
        for row in some:
            made.add_row(
                row.rule.removeprefix("gated delta, "),
                row.name,
                milliseconds(row.forward),
                milliseconds(row.both),
                *((milliseconds(row.kernels_forward), milliseconds(row.kernels_both)) if alone else ()),
                _number(row.peak_mib, ".0f"),
                _number(row.first_s, ".2f"),
                _number(row.first_both_s, ".2f"),
                _number(row.error, ".0e"),
                _number(row.io_both or row.io_forward, ".0%"),
                _number(row.flop_both or row.flop_forward, ".0%"),
            )
        yield made


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
