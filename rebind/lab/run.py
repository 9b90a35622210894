"""Run an experiment into a folder. What was measured stays; a run that was killed goes on where it was.

config.json     the experiment, its settings, device and versions: all it takes to repeat it
points.jsonl    one line a point, added as batches finish; when all are there, in the order of the points
table.md        the numbers and the claims
figure.png, figure.svg
"""

from __future__ import annotations

import contextlib
import json
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from rebind.errors import InputError
from rebind.evals.store import Lines, write_json
from rebind.files import write_atomically
from rebind.lab.experiment import C, Claim, Experiment, LabWarning, Point, Row, Table, settings
from rebind.lab.report import markdown
from rebind.memory.checks import require_finite, usable_device
from rebind.version import __version__

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

CONFIG, POINTS, TABLE, FIGURE = "config.json", "points.jsonl", "table.md", "figure"

Progress = Callable[[int, int, Point], None]  # points done, of how many, one that was or comes next


@dataclass(frozen=True)
class Result:
    """What a run left."""

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    claims: list[Claim]
    resumed: int  # points that were there already


def run(
    experiment: Experiment[C],
    config: C,
    out: str | Path | None = None,
    *,
    device: str = "cpu",
    progress: Progress = lambda done, total, point: None,
) -> Result:
    """Measure every point that the folder does not have yet, then write table and figure."""
    where = usable_device(device)
    described = describe(experiment, config, where)
    folder = Path(out) if out is not None else default_folder(experiment, config, where)
    batches = experiment.batches(config)
    begun = _open(folder, described)
    with _alone(folder), _nothing_left(folder, begun):
        rows, resumed = _points(experiment, config, batches, folder, where, progress)
        claims = _made_of("claims", lambda: experiment.claims(config, rows)) or []
        _report(experiment, config, folder, rows, claims)
    return Result(folder, described, rows, claims, resumed)


def _points(
    experiment: Experiment[C],
    config: C,
    batches: list[list[Point]],
    folder: Path,
    device: torch.device,
    progress: Progress,
) -> tuple[list[Row], int]:
    """All rows, once those that were not there are measured; and how many were."""
    path = folder / POINTS
    there = _there(path, batches)
    lines = _in_order(path, [line for batch in there if batch for line in batch])
    resumed, total = len(lines.rows), sum(map(len, batches))
    missing = [number for number, batch in enumerate(there) if batch is None]
    rest = [batches[number] for number in missing]
    if rest:
        progress(resumed, total, rest[0][0])
    for found, rows in experiment.rows(config, rest, device):
        there[missing[found]] = _checked(rest[found], rows)
        lines.append(there[missing[found]] or [])
        progress(len(lines.rows), total, rest[found][-1])
    lines = _in_order(path, [line for batch in there if batch for line in batch])
    return [{**line["point"], **line["found"]} for line in lines.rows], resumed


def describe(experiment: Experiment[C], config: C, device: torch.device) -> dict[str, Any]:
    """What config.json holds."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "experiment": experiment.name,
        "settings": settings(config),
        "device": hardware,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,  # they order a CPU's sums
        "versions": {"rebind": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def default_folder(experiment: Experiment[C], config: C, device: torch.device) -> Path:
    """One in runs/ for each experiment, size and device."""
    known = {experiment.config: "", experiment.quick: "-quick"}
    digest = sha256(json.dumps(settings(config)).encode()).hexdigest()[:6]
    place = "" if device.type == "cpu" else f"-{device.type}"
    return Path("runs") / f"lab-{experiment.name}{known.get(config, f'-{digest}')}{place}"


def _open(folder: Path, described: dict[str, Any]) -> bool:
    """Make the folder, or see that what it holds is this very run. Whether it was made."""
    path = folder / CONFIG
    foreign = InputError(f"{folder} is there already and holds no lab run: name another --out")
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or _others(folder)):
            raise foreign
        write_json(path, described)
        return True
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(f"{path} cannot be read ({problem}), expected a run's settings: name another --out") from None
    if not (isinstance(found, dict) and {"experiment", "settings"} <= found.keys()):
        raise foreign
    if found != described:
        names = ", ".join(_differences(found, described))
        raise InputError(f"{folder} holds a run that differs in {names}, expected this one: name another --out")
    return False


def _others(folder: Path) -> list[Path]:
    """What a folder holds, but for what a kill left of writing its settings."""
    return [path for path in folder.iterdir() if not path.match(f".{CONFIG}.*.tmp")]


@contextlib.contextmanager
def _nothing_left(folder: Path, begun: bool) -> Iterator[None]:
    """Settings that turn out to be wrong before anything is measured leave no begun run behind."""
    try:
        yield
    except InputError:
        if begun and not (folder / POINTS).exists():
            (folder / CONFIG).unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One run a folder at a time. The system lets go of the lock when its holder dies, however it dies."""
    with (folder / CONFIG).open("rb") as held:
        if fcntl is not None:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{folder} is being filled by another process, expected to be alone: wait, or name another --out"
                ) from None
        yield


def _differences(one: Any, other: Any, prefix: str = "") -> list[str]:
    """The dotted names of what is not the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = [*one, *(name for name in other if name not in one)]
        return [found for name in names for found in _differences(one.get(name), other.get(name), f"{prefix}{name}.")]
    return [] if one == other else [f"{prefix.removesuffix('.') or 'everything'} ({one} there, {other} here)"]


def _there(path: Path, batches: Sequence[Sequence[Point]]) -> list[list[Row] | None]:
    """The lines of every batch that the file has all of. Its lines must be of these points, each once."""
    ours = {_key(point): point for batch in batches for point in batch}
    lines: dict[str, Row] = {}
    for number, line in enumerate(Lines(path).rows, start=1):
        key = _key(line.get("point"))
        if key not in ours or key in lines:
            problem = "again" if key in lines else "which is not of this run"
            raise InputError(
                f"line {number} of {path} is about {line.get('point')}, {problem}, expected each point of this run "
                f"once: restore the file, or name another --out"
            )
        lines[key] = line
    whole = [[lines[_key(point)] for point in batch if _key(point) in lines] for batch in batches]
    return [found if len(found) == len(batch) else None for found, batch in zip(whole, batches, strict=True)]


def _key(point: Any) -> str:
    return json.dumps(point)


def _in_order(path: Path, lines: list[Row]) -> Lines:
    """The file with these lines in it: as it is, cut after them, or written anew."""
    file = Lines(path)
    if file.rows[: len(lines)] != lines:
        data = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        write_atomically(path, data.encode())
        file = Lines(path)
    file.keep(len(lines))
    return file


def _checked(batch: Sequence[Point], found: Sequence[Row]) -> list[Row]:
    """Lines of what a batch found, all of it finite."""
    for point, row in zip(batch, found, strict=True):
        for name, value in row.items():
            require_finite(**{f"{name} of {point}": torch.as_tensor(value, dtype=torch.float64)})
    return [{"point": point, "found": row} for point, row in zip(batch, found, strict=True)]


def _report(experiment: Experiment[C], config: C, folder: Path, rows: Sequence[Row], claims: Sequence[Claim]) -> None:
    table = _made_of("table", lambda: experiment.table(config, rows)) or Table([], [])
    write_atomically(folder / TABLE, markdown(experiment.title, experiment.answers, table, claims).encode())
    if find_spec("matplotlib") is not None:  # to measure it is not needed
        from rebind.lab.style import save

        _made_of("figure", lambda: save(experiment.figure(config, rows), folder / FIGURE))


def _made_of(what: str, make: Callable[[], T]) -> T | None:
    """Settings may leave too few points for a slope or a comparison: what was measured stays, and that is said."""
    try:
        return make()
    except (LookupError, ValueError, ZeroDivisionError) as problem:
        warnings.warn(
            f"no {what}: these settings leave too few points for it ({type(problem).__name__}: {problem}), expected "
            f"about as many as it has of itself; the points are in {POINTS}",
            LabWarning,
            stacklevel=3,
        )
        return None
