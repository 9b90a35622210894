"""Time, memory and a report: a table on the terminal, the same numbers as JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from rebind.bench.measure import machine, peak_of_call

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One way of doing a thing, measured."""

    name: str
    seconds: float  # median
    peak_mib: float  # resident memory above what was there before the call, the largest seen
    error: float  # against the float64 truth of this benchmark


def measure(name: str, call: Callable[[], torch.Tensor], error: Callable[[torch.Tensor], float], repeats: int) -> Row:
    """The median time of `repeats` calls after one that warms up and is watched for memory."""
    peak, result = peak_of_call(call)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return Row(name, statistics.median(seconds), peak, error(result))


def report(subject: str, title: str, rows: list[Row], *, baseline: str, note: str) -> None:
    """Print the table and write benchmarks/results/SUBJECT.json. Speed-ups are over the row named `baseline`."""
    reference = next(row for row in rows if row.name == baseline)
    table = Table(title=title, title_justify="left", title_style="bold", caption=note, caption_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("median s", "speed-up", "peak MiB", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        speedup = f"{reference.seconds / row.seconds:.1f}×"
        table.add_row(row.name, f"{row.seconds:.4f}", speedup, f"{row.peak_mib:.0f}", f"{row.error:.1e}")
    Console(width=100).print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {
        "title": title,
        "note": note,
        "baseline": baseline,
        "machine": machine(),
        "rows": [asdict(r) for r in rows],
    }
    (RESULTS / f"{subject}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
