"""Run an experiment into a folder, or resume an interrupted run. The folder contains

config.json                the experiment, its settings, the device and the versions: everything needed to repeat it
points.jsonl               one line per point with its results, appended batch by batch
table.md                   the table and the claims
figure.png, figure.svg     the figure, if matplotlib is installed
"""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from rebind.errors import InputError, RebindWarning
from rebind.lab.experiment import Experiment, Point
from rebind.lab.report import Claim, Table, markdown
from rebind.memory.checks import usable_device
from rebind.parallel import OrderedUnits, is_writer, local_device, open_run_folder, ranks, share
from rebind.plotting import render
from rebind.storage import JsonLines, Row, RunFolder
from rebind.version import __version__

POINTS, TABLE, FIGURE = "points.jsonl", "table.md", "figure"

Progress: TypeAlias = Callable[[int, int, Point], None]  # points finished, points in total, the point that comes next
OnRows: TypeAlias = Callable[[list[Row]], None]
T = TypeVar("T")


@dataclass(frozen=True)
class ExperimentResult:
    """The results of a run, and their folder."""

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    claims: list[Claim]
    resumed: int  # points that an earlier run had already measured
    seconds: float  # of this run alone

    @property
    def failed_claims(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.holds]


def run_experiment(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    device: str = "cpu",
    progress: Progress = lambda done, total, point: None,
    on_rows: OnRows = lambda rows: None,
) -> ExperimentResult:
    """Measure every point that is not in the folder yet, then write the table and the figure.

    Args:
        experiment: the experiment, with its settings.
        out: the run folder; by default one in runs/ that depends on the experiment, its settings and the device.
        device: the device to measure on.
        progress: called before each batch and at the end.
        on_rows: called after each batch with the rows measured so far by this process.
    """
    started = time.monotonic()
    used_device = usable_device(local_device(device) or "cpu")
    path = Path(out) if out is not None else default_folder(experiment, used_device)
    with open_run_folder(path, "experiment", describe(experiment, used_device)) as folder:
        lines, resumed = _measure(experiment, used_device, folder, progress, on_rows)
        rows = _rows(lines)
        claims = _or_warning("claims", lambda: list(experiment.claims(rows))) or []
        if is_writer():
            _write_report(experiment, rows, claims, folder)
    return ExperimentResult(path, folder.config, rows, claims, resumed, time.monotonic() - started)


def _write_report(experiment: Experiment, rows: Sequence[Row], claims: Sequence[Claim], folder: RunFolder) -> None:
    table = _or_warning("table", lambda: experiment.table(rows)) or Table([], [])
    folder.write(TABLE, markdown(experiment.title, experiment.answers, table, claims).encode())
    if find_spec("matplotlib") is not None:
        images = _or_warning("figure", lambda: _images(experiment, rows)) or {}
        for form, image in images.items():
            folder.write(f"{FIGURE}.{form}", image)


def _measure(
    experiment: Experiment, device: torch.device, folder: RunFolder, progress: Progress, on_rows: OnRows
) -> tuple[list[Row], int]:
    """Measure the batches that are not in the folder; return all lines, and the number of points measured before.

    Batches are divided between processes. Each batch is stored when it is finished.
    """
    batches, lines = experiment.batches(), folder.rows(POINTS)

    def drop_incomplete_batches() -> int:
        completed = _count_completed(lines, batches)
        lines.truncate(sum(map(len, batches[:completed])))
        return completed

    units = OrderedUnits(folder, drop_incomplete_batches, lines.append)
    finished, stored = units.open(), lines.read()
    missing = [number for number in range(len(batches)) if number not in finished]
    total = sum(map(len, batches))
    resumed = done = total - sum(len(batches[number]) for number in missing)
    for number in share(missing):
        batch = batches[number]
        progress(min(done, total), total, batch[0])
        results = experiment.measure(batch, device)
        new_lines = [{"point": point, "result": result} for point, result in zip(batch, results, strict=True)]
        units.add(number, new_lines)
        stored += new_lines
        on_rows(_rows(stored))
        done += ranks().count * len(batch)
    units.merge()
    progress(total, total, {})
    return lines.read(), resumed


def describe(experiment: Experiment, device: torch.device) -> dict[str, Any]:
    """Return the content of config.json. A run is resumed only if it is the same."""
    on_cpu = device.type == "cpu"
    return {
        "experiment": experiment.name,
        "settings": asdict(experiment),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads() if on_cpu else None,  # they determine the order of sums
        "versions": {"rebind": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def default_folder(experiment: Experiment, device: torch.device) -> Path:
    """Return a folder in runs/ for this experiment, its settings and its device."""
    digest = sha256(json.dumps(asdict(experiment)).encode()).hexdigest()[:6]
    size = {type(experiment)(): "", experiment.quick(): "-quick"}.get(experiment, f"-{digest}")
    suffix = "" if device.type == "cpu" else f"-{device.type}"
    return Path("runs") / f"lab-{experiment.name}{size}{suffix}"


def _count_completed(lines: JsonLines, batches: Sequence[Sequence[Point]]) -> int:
    """Return how many of the first batches are stored completely."""
    points = [line.get("point") for line in lines.read()]
    start = 0
    for number, batch in enumerate(batches):
        if points[start : start + len(batch)] != list(batch):
            return number
        start += len(batch)
    return len(batches)


def _rows(lines: Sequence[Row]) -> list[Row]:
    return [{**line["point"], **_result(line)} for line in lines]


def _result(line: Row) -> Row:
    """Return the result in a stored line."""
    result = line.get("result")
    if not isinstance(result, dict):
        advice = "Remove the folder, or choose another, and run again"
        raise InputError(f"A line of {POINTS} has no result", expected="an object", advice=advice, code="damaged_row")
    return result


def _images(experiment: Experiment, rows: Sequence[Row]) -> dict[str, bytes]:
    figure = experiment.figure(rows)
    return {form: render(figure, form) for form in ("png", "svg")}


def _or_warning(name: str, compute: Callable[[], T]) -> T | None:
    """Return a part of the report, or warn and return None if the settings leave too few points for it."""
    try:
        return compute()
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as problem:
        warnings.warn(
            f"There is no {name}, because these settings leave too few points for it ({problem}). "
            f"The measurements are in {POINTS}.",
            RebindWarning,
            stacklevel=3,
        )
        return None
