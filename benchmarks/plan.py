"""How far the plan of an edit is off: the rates of a GPU fitted to some sizes of models, and checked on another one.

    python -m benchmarks.plan

The edits are those of benchmarks/results/growth-h200.json: random Llamas of the shapes of 135M to 8B, with 1, 10 and
100 facts. They were searched with six prompts per fact (the plain prompt and five contexts, nothing kept), so they are
planned with as many. A fit is one of least squares of log(plan / measurement). Two of the edits with ten facts include
the time to record other CUDA graphs, which no plan predicts.

The last line has an edit that no fit has seen, by a later form of the search: 100 facts of CounterFact in
SmolLM2-135M, in every framing, with kept prompts (benchmarks/results/framings-h200.json). It is planned with 100
made-up facts.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from benchmarks.growth import SHAPES, invented, small_tokenizer
from benchmarks.report import RESULTS
from rebind.edit.plan import GIB, Plan, Rates, plan_from_config
from rebind.edit.targets import ContextSettings, TargetSettings

MEASURED, LATER = RESULTS / "growth-h200.json", RESULTS / "framings-h200.json"
BASIS = (Rates(1.0, 0.0, 0.0), Rates(math.inf, 1.0, 1.0))  # a plan is linear in 1/operations and the others


@dataclass(frozen=True)
class Measurement:
    """An edit that was made, and what its plan is made of."""

    shape: str
    facts: int
    seconds: float
    gib: float
    operations: float
    launches: float
    fixed_gib: float
    search_gib: float  # per byte of `Rates.search_bytes`

    def planned_seconds(self, rates: Rates) -> float:
        return self.operations / rates.operations + self.launches * rates.block_seconds

    def planned_gib(self, rates: Rates) -> float:
        return self.fixed_gib + self.search_gib * rates.search_bytes


def measurements(folder: Path) -> list[Measurement]:
    """Return every edit of the stored result, with its plan."""
    stored = json.loads(MEASURED.read_text())
    rows = stored["rows"]
    for shape in {row["shape"] for row in rows}:
        LlamaConfig(**SHAPES[shape], dtype=stored["dtype"]).save_pretrained(folder / shape)
        small_tokenizer().save_pretrained(folder / shape)
    return [_measurement(row, folder / row["shape"]) for row in rows]


def _measurement(row: dict[str, Any], folder: Path) -> Measurement:
    settings = {"contexts": ContextSettings.of(5), "framings": ("start",), "moment_tokens": 1}
    targets = TargetSettings(steps=row["steps"], keep=0.0)
    work, rest = (
        plan_from_config(folder, invented(row["facts"]), "memit", targets=targets, rates=rates, **settings)
        for rates in BASIS
    )
    if (work.parameters, list(work.layers)) != (row["parameters"], row["layers"]):
        raise ValueError(f"{row['shape']} is not the model that was measured")
    fixed, whole = _gib(work), _gib(rest)
    return Measurement(
        row["shape"], row["facts"], row["seconds"], row["memory_gib"], work.seconds, rest.seconds, fixed, whole - fixed
    )


def _gib(plan: Plan) -> float:
    return (plan.weight_bytes + plan.bytes_in_memory) / GIB


def fit(rows: Sequence[Measurement]) -> Rates:
    """Return the rates with the smallest error on some edits."""

    def seconds_error(operations: float, block_seconds: float) -> float:
        rates = Rates(operations, block_seconds, 0.0)
        return _error(row.planned_seconds(rates) / row.seconds for row in rows)

    def memory_error(search_bytes: float) -> float:
        rates = Rates(1.0, 0.0, search_bytes)
        return _error(row.planned_gib(rates) / row.gib for row in rows)

    pairs = [(rate, block) for rate in np.geomspace(1e13, 1e15, 81) for block in np.geomspace(1e-4, 1e-2, 81)]
    operations, block_seconds = min(pairs, key=lambda pair: seconds_error(*pair))
    return Rates(float(operations), float(block_seconds), float(min(np.geomspace(1, 1000, 301), key=memory_error)))


def _error(ratios: Iterable[float]) -> float:
    return sum(math.log(ratio) ** 2 for ratio in ratios)


def predictions(rows: Sequence[Measurement]) -> list[tuple[Measurement, Rates, Rates]]:
    """Return every edit with the rates that all edits give, and those that the edits of other sizes give."""
    everything = fit(rows)
    others = {shape: fit([row for row in rows if row.shape != shape]) for shape in {row.shape for row in rows}}
    return [(row, everything, others[row.shape]) for row in rows]


def later_edit(folder: Path) -> tuple[float, float]:
    """Return the planned and the measured seconds of the edit that no fit has seen."""
    row = next(row for row in json.loads(LATER.read_text())["rows"] if row["variant"] == "default")
    plan = plan_from_config(folder / "135M", invented(100), "memit", moment_tokens=1)
    return plan.seconds, row["together"]["100"]["seconds"]


def main() -> None:
    """Print every measurement beside both plans, and the fitted rates."""
    with tempfile.TemporaryDirectory() as folder:
        rows = predictions(measurements(Path(folder)))
        planned, measured = later_edit(Path(folder))
    table = Table(title="plan / measurement", title_justify="left", title_style="bold")
    headings = ("model", "facts", "seconds", "fitted", "other sizes", "GiB", "fitted", "other sizes")
    for column in headings:
        table.add_column(column, justify="right")
    for row, fitted, others in rows:
        seconds = [f"{row.planned_seconds(rates) / row.seconds:.2f}" for rates in (fitted, others)]
        memory = [f"{row.planned_gib(rates) / row.gib:.2f}" for rates in (fitted, others)]
        table.add_row(row.shape, f"{row.facts}", f"{row.seconds:.2f}", *seconds, f"{row.gib:.1f}", *memory)
    console = Console(width=120)
    console.print(table)
    console.print(rows[0][1])
    for shape, rates in {row.shape: others for row, _, others in rows}.items():
        console.print(f"without {shape}: {rates}")
    console.print(f"135M in every framing, 100 facts: plan {planned:.1f} s, measured {measured:.1f} s")


if __name__ == "__main__":
    main()
