"""Two to eight processes on one ledger, export, cache or run folder, some of which are killed on the way."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rebind.edit.ledger import Ledger, verify_folder
from rebind.errors import StorageError
from tests.edit.writes import new_edit, open_ledger
from tests.faults import operations as ops
from tests.faults.children import Acknowledge, Child, Ending, Fault, run_child
from tests.faults.kills import Survey

TIMEOUT = 120.0
Problems = list[tuple[str, str]]


def plan(count: int, seed: int) -> list[tuple[str, int]]:
    """Return crowds to try: a kind, and a seed that fixes everything about it."""
    draw = random.Random(seed)
    kinds = [*["ledger"] * 4, "export", "moments", "experiment"]
    return [(kinds[number % len(kinds)], draw.randrange(10**6)) for number in range(count)]


def try_crowd(kind: str, seed: int, scratch: Path, surveys: dict[str, Survey]) -> tuple[str, Problems]:
    """Run one crowd; return how many processes it had, and what went wrong."""
    draw = random.Random(seed)
    processes = draw.randint(2, 8)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        home = Path(folder) / "home"
        if kind == "ledger":
            home.mkdir()
            problems = _ledger_crowd(home, processes, draw)
        else:
            name = {"export": "memory-again", "moments": "moments", "experiment": "experiment"}[kind]
            shutil.copytree(surveys[name].prepared, home, symlinks=True)
            problems = _same_operation(surveys[name], home, processes, draw)
    return f"with {processes} processes", problems


# One ledger


def _ledger_crowd(home: Path, processes: int, draw: random.Random) -> Problems:
    """Let processes append, undo and redo edits of their own, and one of them only look."""
    children = []
    for number in range(processes):
        work = _look if number == processes - 1 and processes > 2 else _write
        moment = draw.uniform(0.1, 1.5) if draw.random() < 0.3 else None
        children.append(Child(_at_work(work, home, number, draw.randrange(10**6)), home, Fault("kill", 0, moment)))
    endings = [child.wait() for child in children]
    problems = [problem for ending in endings for problem in _judge_end(ending)]
    acknowledged = [text for ending in endings for text in ending.acknowledged]
    checked = run_child(lambda _: _compare(home, acknowledged), home, timeout=TIMEOUT)
    if checked.status != "finished":
        return [*problems, ("corrupted", f"the next command {checked.status}: {checked.problem}")]
    return problems + [tuple(one) for one in checked.value]


def _at_work(work: Callable[[Path, int, int, Acknowledge], None], home: Path, number: int, seed: int) -> Any:
    return lambda acknowledge: work(home / ops.LEDGER, number, seed, acknowledge)


def _write(folder: Path, number: int, seed: int, acknowledge: Acknowledge) -> None:
    torch.set_num_threads(1)
    draw, own = random.Random(seed), dict[str, bool]()
    ledger = open_ledger(folder)
    for step in range(8):
        undone = [id for id, is_active in own.items() if not is_active]
        active = [id for id, is_active in own.items() if is_active]
        if undone and draw.random() < 0.3:
            own[ledger.redo(id := draw.choice(undone)).id] = True
            acknowledge(f"active {id}")
        elif active and draw.random() < 0.4:
            own[ledger.undo(id := draw.choice(active)).id] = False
            acknowledge(f"undone {id}")
        else:
            subject = number * 1000 + step
            own[id := ledger.append(new_edit(subject, rows=1)).id] = True
            acknowledge(f"edit {id} {subject}")


def _look(folder: Path, number: int, seed: int, acknowledge: Acknowledge) -> None:
    """Read and verify while others write: there is nothing wrong with a ledger that somebody is writing to."""
    ledger = open_ledger(folder)
    for _ in range(10):
        count = len(ledger.edits)
        problems = [one for one in verify_folder(folder) if "unfinished" not in one]
        if problems:
            acknowledge(f"false alarm {problems[0]}")
            return
        if len(ledger.edits) < count:
            acknowledge("false alarm edits disappeared")


def _compare(home: Path, acknowledged: list[str]) -> Problems:
    """Return what is missing of all that was acknowledged. The last word about an edit is the one that counts."""
    ledger = open_ledger(home / ops.LEDGER)
    ledger.append(new_edit(999_999, rows=1))  # the next command
    subjects = {edit.id: edit.facts[0].subject for edit in ledger.edits}
    problems: Problems = []
    for text in acknowledged:
        kind, *words = text.split()
        if kind == "edit" and subjects.get(words[0]) != f"subject {words[1]}-0":
            problems.append(("lost", f"{text} is not there"))
        if kind == "false":
            problems.append(("unclear", text))
    problems += [("corrupted", problem) for problem in ledger.verify()]
    problems += [("corrupted", problem) for problem in Ledger.open(home / ops.LEDGER).verify()]
    if list(subjects) != [f"e{number:04d}" for number in range(1, len(subjects) + 1)]:
        problems.append(("corrupted", "the ids have gaps"))
    return problems


# The same operation several times at once


def _same_operation(one: Survey, home: Path, processes: int, draw: random.Random) -> Problems:
    """Run an operation in several processes; whoever comes second waits, is refused, or does the same again."""
    operation = ops.all_operations()[one.name]
    work: Callable[[Acknowledge], None] = lambda acknowledge: operation.run(home, acknowledge)
    moments = [draw.uniform(0, one.seconds) if draw.random() < 0.3 else None for _ in range(processes)]
    endings = [child.wait() for child in [Child(work, home, Fault("kill", 0, moment)) for moment in moments]]
    problems = [problem for ending in endings for problem in _judge_end(ending)]
    checked = run_child(lambda _: _run_again(operation, home), home, timeout=TIMEOUT)
    if checked.status != "finished":
        return [*problems, ("corrupted", f"the next command {checked.status}: {checked.problem}")]
    if checked.value != one.after:
        problems.append(("corrupted", "what is there is not what one process writes"))
    return problems


def _run_again(operation: ops.Operation, home: Path) -> str:
    operation.run(home, lambda text: None)
    return operation.inspect(home)


def _judge_end(ending: Ending) -> Problems:
    if ending.status == "stuck":
        return [("stuck", f"no end within {TIMEOUT:g} s")]
    if ending.status == "crashed":
        return [("traceback", ending.problem)]
    if ending.status == "refused" and not ending.problem.startswith((StorageError.__name__, "InputError")):
        return [("unclear", ending.problem)]
    return []
