"""Group rows into curves, format means and spreads, and write the report as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, stdev
from typing import Any

from rebind.storage import Row


@dataclass(frozen=True)
class Claim:
    """A statement that is checked against the measurements."""

    statement: str
    holds: bool
    measured: str  # the numbers that decide it


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Curve:
    """One quantity against another: mean and range over the seeds."""

    x: list[float]
    mean: list[float]
    low: list[float]  # smallest over the seeds
    high: list[float]  # largest over the seeds

    def at(self, x: float) -> float:
        """Return the mean at the measured x nearest to this one."""
        return self.mean[min(range(len(self.x)), key=lambda index: abs(self.x[index] - x))]

    def has(self, *xs: float) -> bool:
        """Return whether all of `xs` were measured."""
        return all(any(math.isclose(x, value) for x in self.x) for value in xs)

    @property
    def points(self) -> list[tuple[float, float]]:
        """The pairs of x and mean."""
        return list(zip(self.x, self.mean, strict=True))


def select(rows: Sequence[Row], **values: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def curve(rows: Sequence[Row], x: str, y: str, **values: Any) -> Curve:
    """Return y against x, with the mean and range over all rows that have these `values`."""
    rows = select(rows, **values)
    xs = sorted({row[x] for row in rows})
    groups = [[row[y] for row in rows if row[x] == value] for value in xs]
    return Curve(xs, list(map(fmean, groups)), list(map(min, groups)), list(map(max, groups)))


def learning_rows(rows: Sequence[Row], name: str, every: int) -> list[Row]:
    """Return {step, value} for the evaluations in column `name`; a model that ended early repeats its last value."""
    rows = [row for row in rows if row[name]]  # a loss that was never finite has no evaluations
    evaluations = max((len(row[name]) for row in rows), default=0)
    last_step = max((row["steps"] for row in rows), default=0)
    return [
        {"step": min((index + 1) * every, last_step), "value": row[name][min(index, len(row[name]) - 1)]}
        for row in rows
        for index in range(evaluations)
    ]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean ± standard deviation over the seeds.

    >>> spread([0.5, 0.52, 0.54]), spread([0.25]), spread([1e-12, 2e-12])
    ('0.52 ± 0.02', '0.25', '1.5e-12 ± 7.1e-13')
    """
    mean = f"{fmean(values):.{digits}g}"
    deviation = stdev(values) if len(values) > 1 else 0.0
    return f"{mean} ± {deviation:.2g}" if deviation else mean


def spreads(rows: Sequence[Row], *names: str, digits: int = 3) -> list[str]:
    """Format the spread of each of these columns."""
    return [spread([row[name] for row in rows], digits) for name in names]


def agreement(statement: str, ratios: Sequence[float], tolerance: float) -> Claim:
    """Claim that the ratios of measurement to theory are 1, within a tolerance."""
    holds = all(abs(ratio - 1) < tolerance for ratio in ratios)
    return Claim(statement, holds, f"measured/theory {min(ratios):.3f} to {max(ratios):.3f}")


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p of y ∝ xᵖ, by least squares on logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return linear_regression(list(map(math.log, x)), list(map(math.log, y))).slope


def markdown(title: str, answers: str, table: Table, claims: Sequence[Claim]) -> str:
    """Return the content of table.md."""
    lines = [f"# {title}", "", f"Answers: {answers}."]
    if table.header:
        lines += ["", _line(table.header), _line(["---"] * len(table.header)), *map(_line, table.rows)]
    if claims:
        lines += ["", "## Claims", ""]
    for claim in claims:
        lines.append(f"- {'holds' if claim.holds else '**does not hold**'}: {claim.statement} ({claim.measured})")
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
