"""Processes that die, and disks that fill or fail, at every file-changing call and at random moments."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebind.storage.atomic import TEMPORARY
from tests.faults.children import Ending, Fault, run_child
from tests.faults.operations import Operation, all_operations

TIMEOUT = 60.0
# What a kill leaves in a cache: targets of a search are removed after a week, partial sums of moments after a day,
# snapshots by the next one. Fingerprints are named by the paths of the weights, which differ here.
CACHED = re.compile(
    r"ledger/(work/targets-|snapshots/)|data/snapshots\.key|cache/fingerprints/|cache/moments/\w+\.partial"
)
RANDOM_NAME = re.compile(r"[0-9a-f]{16}\.pack")
SIZES = (0, 1, 100, 1_000, 4_000, 10_000, 30_000)  # bytes that a file may have on a small disk


@dataclass(frozen=True)
class Survey:
    """An operation that was not disturbed: what it changes and how it goes about it."""

    name: str
    prepared: Path  # the home before
    before: str
    after: str
    calls: tuple[str, ...]
    seconds: float
    files: Counter[str]  # in the home after the operation


def survey(name: str, scratch: Path) -> Survey:
    """Run an operation undisturbed, in children, so that this process stays as it is."""
    operation = all_operations()[name]
    prepared, home = scratch / "prepared" / name, scratch / "surveyed" / name
    prepared.mkdir(parents=True)
    _value(run_child(lambda _: operation.prepare(prepared), prepared, timeout=TIMEOUT), f"prepare {name}")
    shutil.copytree(prepared, home, symlinks=True)
    before = _value(run_child(lambda _: operation.inspect(home), home, timeout=TIMEOUT), f"inspect {name}")
    shutil.rmtree(home)
    shutil.copytree(prepared, home, symlinks=True)
    ending = run_child(lambda acknowledge: operation.run(home, acknowledge), home, timeout=TIMEOUT)
    _value(ending, f"run {name}")
    files = visible_files(home)
    after = _value(run_child(lambda _: operation.inspect(home), home, timeout=TIMEOUT), f"inspect {name}")
    return Survey(name, prepared, before, after, tuple(ending.calls), ending.seconds, files)


def _value(ending: Ending, what: str) -> Any:
    if ending.status != "finished":
        raise RuntimeError(f"{what} {ending.status} without any fault: {ending.problem}")
    return ending.value


def visible_files(home: Path) -> Counter[str]:
    """Return the names of all files in a home, except caches and those that only a process at work needs."""
    names = (file.relative_to(home) for file in home.rglob("*") if not file.is_dir())
    seen = (name.as_posix() for name in names if not any(_is_hidden(part) for part in name.parts))
    return Counter(RANDOM_NAME.sub("*.pack", name) for name in seen if not CACHED.match(name))


def _is_hidden(name: str) -> bool:
    """Return whether the next write into the folder removes this file, and no reader sees it before."""
    return bool(TEMPORARY.fullmatch(name)) or name.endswith(".rebind-old")


def plan(surveys: list[Survey], kinds: tuple[str, ...], per_operation: int, seed: int) -> list[tuple[Survey, Fault]]:
    """Return the faults to try: every call of every operation, and random moments, in random order."""
    draw = random.Random(seed)
    faults = []
    for one in surveys:
        calls = list(enumerate(one.calls, start=1))
        mine: list[Fault] = []
        if "kill" in kinds:
            mine += [Fault("kill", call) for call, _ in calls]
            mine += [Fault("torn", call) for call, name in calls if name == "os.write"]
            mine += [Fault("kill", seconds=draw.uniform(0, one.seconds)) for _ in range(per_operation)]
        if "disk" in kinds:
            mine += [Fault("full", call) for call, _ in calls] + [Fault("error", call) for call, _ in calls]
            mine += [Fault("small", size) for size in SIZES]
        faults += [(one, fault) for fault in mine]
    draw.shuffle(faults)
    return faults


def try_fault(one: Survey, fault: Fault, scratch: Path) -> tuple[str, list[tuple[str, str]]]:
    """Let one fault happen; return how the operation ended, and what is wrong after it."""
    operation = all_operations()[one.name]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        home = Path(folder) / "home"
        shutil.copytree(one.prepared, home, symlinks=True)
        ending = run_child(lambda acknowledge: operation.run(home, acknowledge), home, fault, timeout=TIMEOUT)
        problems = list(_judge_ending(ending))
        checked = run_child(lambda _: check(operation, home, one), home, timeout=TIMEOUT)
        problems += _judge_state(operation, one, ending, checked)
        left = visible_files(home) - one.files
        if left and operation.is_run:  # a folder that could not be removed: the next run removes it
            run_child(lambda acknowledge: operation.run(home, acknowledge), home, timeout=TIMEOUT)
            left = visible_files(home) - one.files
        if not problems and left:
            problems.append(("corrupted", f"left behind: {', '.join(sorted(left)[:5])}"))
    return ending.status, problems


def check(operation: Operation, home: Path, one: Survey) -> dict[str, Any]:
    """Look at a home after a fault, run the operation again if it did not finish, and look again."""
    seen = first = operation.inspect(home)
    if seen != one.after:
        operation.run(home, lambda text: None)
        seen = operation.inspect(home)
    return {"first": first, "then": seen, "problems": operation.problems(home)}


def _judge_ending(ending: Ending) -> list[tuple[str, str]]:
    if ending.status == "stuck":
        return [("stuck", f"no end within {TIMEOUT:g} s")]
    if ending.status == "crashed":
        return [("traceback", ending.problem)]
    return []


def _judge_state(operation: Operation, one: Survey, ending: Ending, checked: Ending) -> list[tuple[str, str]]:
    if checked.status == "stuck":
        return [("stuck", "the next command does not end")]
    if checked.status != "finished":
        return [("corrupted", f"the next command {checked.status}: {checked.problem}")]
    state, problems = checked.value, []
    if ending.acknowledged and state["first"] != one.after:
        problems.append(("lost", "it was acknowledged and is not there"))
    if state["first"] not in (one.before, one.after):
        problems.append(("corrupted", "what is there is neither as before the operation nor as after it"))
    if state["then"] != one.after:
        problems.append(("corrupted", "run again, it leads to something else"))
    return problems + [("corrupted", problem) for problem in state["problems"]]
