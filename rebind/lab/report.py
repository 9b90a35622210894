"""Rows in groups, their means and spreads, and the table as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rebind.lab.experiment import Claim, Row, Table


@dataclass(frozen=True)
class Curve:
    """A quantity against another, over the seeds."""

    x: list[float]
    mean: list[float]
    low: list[float]  # the smallest of the seeds
    high: list[float]

    def at(self, x: float) -> float:
        """The mean at the measured place nearest to x."""
        return self.mean[min(range(len(self.x)), key=lambda index: abs(self.x[index] - x))]

    def has(self, *places: float) -> bool:
        """Whether all these places were measured."""
        return all(any(math.isclose(one, place) for one in self.x) for place in places)


def select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def curve(rows: Sequence[Row], x: str, y: str) -> Curve:
    """y against x: the mean and the range of all rows with one x."""
    places = sorted({row[x] for row in rows})
    groups = [[row[y] for row in rows if row[x] == place] for place in places]
    return Curve(places, [fmean(one) for one in groups], [min(one) for one in groups], [max(one) for one in groups])


def courses(rows: Sequence[Row], every: int) -> Curve:
    """Losses against steps, to where the last seed ends; one that ended sooner stays where it was."""
    rows = [row for row in rows if row["losses"]]  # a loss that was never finite has no course
    turns = max((len(row["losses"]) for row in rows), default=0)
    end = max((row["steps"] for row in rows), default=0)
    found = [
        {"step": min((turn + 1) * every, end), "loss": row["losses"][min(turn, len(row["losses"]) - 1)]}
        for row in rows
        for turn in range(turns)
    ]
    return curve(found, "step", "loss")


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard deviation over the seeds.

    >>> spread([0.5, 0.52, 0.54]), spread([0.25]), spread([1e-12, 2e-12])
    ('0.52 ± 0.02', '0.25', '1.5e-12 ± 7.1e-13')
    """
    mean = f"{fmean(values):.{digits}g}"
    if len(values) == 1:
        return mean
    deviation = stdev(values)
    return mean if deviation == 0 else f"{mean} ± {deviation:.2g}"


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y ∝ xᵖ, by least squares on logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    across, up = [math.log(one) for one in x], [math.log(one) for one in y]
    middle, height = fmean(across), fmean(up)
    moved = [one - middle for one in across]
    return sum(a * (b - height) for a, b in zip(moved, up, strict=True)) / sum(a * a for a in moved)


def told(rows: Sequence[Row], name: str) -> str:
    """Mean and deviation over the seeds, with a word of those that diverged: theirs is the last finite loss."""
    lost = len(select(rows, diverged=True))
    return spread([row[name] for row in rows]) + (f" ({lost} of {len(rows)} diverged)" if lost else "")


def stayed_finite(rows: Sequence[Row]) -> Claim:
    lost = len(select(rows, diverged=True))
    return Claim("no model's loss becomes NaN or infinite", not lost, f"{lost} of {len(rows)} did")


def markdown(title: str, answers: str, table: Table, claims: Sequence[Claim]) -> str:
    """table.md."""
    lines = [f"# {title}", "", f"Answers: {answers}."]
    if table.header:
        lines += ["", _row(table.header), _row(["---"] * len(table.header)), *(_row(row) for row in table.rows)]
    if claims:
        lines += ["", "## Claims", ""]
    lines += [f"- {'holds' if claim.holds else '**does not hold**'}: {claim.says} ({claim.got})" for claim in claims]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
