"""The campaign: parts, each with a share of the time, whose faults are tried in several processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.faults import crowds, inputs, kills, tampering, values
from tests.faults.artifacts import all_artifacts
from tests.faults.children import Fault
from tests.faults.kills import Survey
from tests.faults.operations import all_operations
from tests.faults.report import Tally
from tests.nn import training_runs

SHARES = {"kills": 0.4, "disks": 0.2, "crowds": 0.08, "tampering": 0.2, "inputs": 0.1, "values": 0.02}  # of the time
PARTS = tuple(SHARES)
RANDOM_KILLS, TAMPERINGS, CROWDS = 25, 40, 28  # per operation, per artifact, in all
DISK_FAULTS = 1_000

Result = tuple[str, str, list[tuple[str, str]]]  # the name of a fault, how it ended, what went wrong
Task = tuple[str, Callable[..., Result], tuple[Any, ...]]  # the name, or the beginning of it, and the call


@dataclass
class Campaign:
    """All parts of a campaign share a folder, a seed and the time that is left."""

    folder: Path
    seed: int = 0
    seconds: float = 1200.0
    jobs: int = 1
    match: str = ""
    scale: float = 1.0
    parts: tuple[str, ...] = PARTS
    operations: tuple[str, ...] = field(default_factory=lambda: tuple(all_operations()))
    artifacts: tuple[str, ...] = field(default_factory=lambda: tuple(all_artifacts()))
    _surveys: dict[str, Survey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        os.environ["REBIND_FAULTS"] = str(self.folder)
        training_runs.corpus(self.folder)
        self.start = time.monotonic()
        self._spent_share = 0.0

    def run(self, part: str) -> Tally:
        """Try the faults of a part until they are done or its share of the time is over; what is left goes on."""
        begin = time.monotonic()
        self._spent_share += SHARES[part] / sum(SHARES[one] for one in self.parts)
        deadline = self.start + self.seconds * min(self._spent_share, 1.0)
        tally = Tally(part)
        tasks = [task for task in getattr(self, f"_{part}")() if self.match in task[0] or task[0] in self.match]
        for name, end, problems in self._try(tasks, deadline):
            if self.match in name:
                for finding in tally.add(name, end, problems):
                    print(finding.described(self.seed), flush=True)
        tally.skipped = max(0, len(tasks) - tally.tried) if not self.match else 0
        tally.seconds = time.monotonic() - begin
        print(f"{part}: {tally.tried:,} tried, {len(tally.findings)} findings, {tally.seconds:.0f} s", flush=True)
        return tally

    def _try(self, tasks: list[Task], deadline: float) -> Iterator[Result]:
        """Call the tasks in forked processes, which fork again for every fault."""
        context = multiprocessing.get_context("fork")
        waiting = iter(tasks)
        with ProcessPoolExecutor(self.jobs, mp_context=context) as pool:
            running: set[Future[Result]] = set()
            while True:
                while len(running) < 2 * self.jobs and time.monotonic() < deadline:
                    if (task := next(waiting, None)) is None:
                        break
                    running.add(pool.submit(task[1], *task[2]))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)

    def _survey(self, names: tuple[str, ...]) -> list[Survey]:
        for name in names:
            if name not in self._surveys:
                self._surveys[name] = kills.survey(name, self.folder)
        return [self._surveys[name] for name in names]

    def _number(self, count: int) -> int:
        return max(1, round(self.scale * count))

    def _kills(self) -> list[Task]:
        surveys = self._survey(self.operations)
        faults = kills.plan(surveys, ("kill",), self._number(RANDOM_KILLS), self.seed)
        return [(f"{one.name} {fault}", try_kill, (one, fault, self.folder)) for one, fault in faults]

    def _disks(self) -> list[Task]:
        faults = kills.plan(self._survey(self.operations), ("disk",), 0, self.seed + 1)[: self._number(DISK_FAULTS)]
        return [(f"{one.name} {fault}", try_kill, (one, fault, self.folder)) for one, fault in faults]

    def _crowds(self) -> list[Task]:
        surveys = {one.name: one for one in self._survey(("memory-again", "moments", "experiment"))}
        planned = crowds.plan(self._number(CROWDS), self.seed)
        return [(f"{kind} {seed}", try_crowd, (kind, seed, self.folder, surveys)) for kind, seed in planned]

    def _tampering(self) -> list[Task]:
        built = [tampering.build(name, self.folder) for name in self.artifacts]
        planned = tampering.plan(built, self._number(TAMPERINGS), self.seed)
        return [(f"{one.name} {seed}", tampering.try_tampering, (one, seed, self.folder)) for one, seed in planned]

    def _inputs(self) -> list[Task]:
        inputs.prepare(folder := self.folder / "inputs")
        listed = inputs.cases(folder, self.seed)
        chosen = listed if self.scale >= 1 else listed[: self._number(len(listed))]
        return [(name, try_input, (name, words, folder, number)) for number, (name, words) in enumerate(chosen)]

    def _values(self) -> list[Task]:
        names = list(dict.fromkeys(name for name, _ in values.cases()))
        groups = [names[begin : begin + 50] for begin in range(0, len(names), 50)]
        return [(name, try_value, (name,)) for group in groups for name in group]


def try_kill(one: Survey, fault: Fault, folder: Path) -> Result:
    end, problems = kills.try_fault(one, fault, folder)
    return f"{one.name} {fault}", end, problems


def try_crowd(kind: str, seed: int, folder: Path, surveys: dict[str, Survey]) -> Result:
    end, problems = crowds.try_crowd(kind, seed, folder, surveys)
    return f"{kind} {seed}", end, problems


def try_input(name: str, words: list[str], folder: Path, number: int) -> Result:
    end, problems = inputs.try_input(words, folder / f"scratch-{number}", folder)
    return name, end, [(verdict, f"{' '.join(words)[:200]!r}: {text}") for verdict, text in problems]


def try_value(name: str) -> Result:
    result = values.try_value(name)
    verdicts = {"accepted": "silent", "traceback": "traceback"}
    problems = [(verdicts[result["end"]], result["text"])] if result["end"] in verdicts else []
    return name, result["end"], problems
