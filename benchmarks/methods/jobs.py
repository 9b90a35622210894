"""Which rows of the comparison are measured, in which order, and which are there already.

A job is measured in one go: a batch, or a sequence with its stops. Rows go to a file as they come, and a state that
another row is of already is not measured again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.methods.protocols import batch, sequential
from benchmarks.methods.shared import impossible
from benchmarks.methods.states import GROUPS, MADE_OF, Bench, Row
from rebind.bench.measure import machine
from rebind.edit.facts.fact import Fact
from rebind.edit.methods import get_method
from rebind.edit.settings import EditSettings
from rebind.evals.records import Record
from rebind.storage import write_file


@dataclass(frozen=True)
class Job:
    """Rows that are measured one after another: of one batch, or of one sequence."""

    method: str
    protocol: str
    found: str
    stops: tuple[int, ...]  # numbers of facts
    size: int  # facts an edit

    @property
    def names(self) -> list[tuple[str, str, str, int]]:
        return [(self.method, self.protocol, self.found, stop) for stop in self.stops]

    def run(self, bench: Bench, stops: Sequence[int]) -> Iterator[Row]:
        """The rows at some of the stops."""
        if self.protocol == "batch":
            yield batch(bench, self.method, self.size)
        else:
            yield from sequential(bench, self.method, self.found, self.size, stops)

    def made(self, bench: Bench) -> bool:
        """Whether there are not as many records as it writes."""
        return self.stops[-1] > len(bench.records)

    def needs(self, bench: Bench) -> Iterator[tuple[EditSettings, list[Fact]]]:
        """What is searched for on the base, with which settings."""
        if impossible(bench.editor, get_method(self.method), self.size):
            return
        if self.protocol == "sequential":
            (records,) = bench.facts(self.stops[-1], once=True)
            last = self.stops[-1] if self.found == "base" else min(self.size, self.stops[-1])
            for begin in range(0, last, self.size):
                facts = [one.written_facts[0] for one in records[begin : min(begin + self.size, last)]]
                yield bench.settings(self.method, len(facts)), facts
        else:
            groups = bench.facts(self.size)
            yield bench.settings(self.method, self.size), [one.written_facts[0] for group in groups for one in group]


def jobs(
    bench: Bench,
    *,
    methods: Sequence[str],
    numbers: Sequence[int],
    protocols: Sequence[str],
    found: Sequence[str],
    size: int,
    at: Sequence[int],
) -> list[Job]:
    """Those that say most first: many facts at once, sequences, few facts, made ones.

    Made facts are mixed with the records, for each number of them anew: each is a sequence of its own.
    """
    most = len(bench.records)
    stops, beyond = (tuple(sorted({*some})) for some in ((n for n in at if n <= most), (n for n in at if n > most)))
    several = [method for method in methods if get_method(method).several_layers]

    def batches(some: Iterable[int]) -> list[Job]:
        chosen = sorted(some) if "batch" in protocols else []
        return [Job(method, "batch", "base", (n,), n) for n in chosen for method in methods]

    def sequences(way: str, some: Sequence[str], stops: tuple[int, ...]) -> list[Job]:
        asked = stops and way in found and "sequential" in protocols
        return [Job(method, "sequential", way, stops, size) for method in some] if asked else []

    return [
        *batches(n for n in numbers if n not in GROUPS and n <= most),
        *sequences("base", methods, stops),
        *sequences("edited", several, stops),
        *batches(n for n in numbers if n in GROUPS and n <= most),
        *batches(n for n in numbers if n > most),
        *(job for stop in beyond for job in sequences("base", methods, (stop,))),
    ]


def same(job: Job, stop: int, rows: Sequence[Row]) -> Row | None:
    """The row of a state that another row is of already."""
    if job.protocol == "batch":
        twin = ("memit", "batch", "base", stop) if job.method == "recursive" else None
    else:
        twin = (job.method, "batch", "base", stop) if stop == job.size and stop not in GROUPS else None
    for row in rows:
        if row.name == twin and not row.why:
            told = f"{row.method}, {row.protocol}"
            own: Any = {"method": job.method, "protocol": job.protocol, "found": job.found}
            return replace(row, **own, same=told, phases={}, searched=0)
    return None


@dataclass(eq=False)
class Results:
    """Rows, in a file that is written anew after each."""

    path: Path
    of: dict[str, Any]  # what the rows depend on: a file of something else is not gone on with
    rows: list[Row] = field(default_factory=list)
    former: int = 0  # rows of the file that are not kept: their facts were made in another way

    @classmethod
    def open(cls, path: Path, of: dict[str, Any]) -> Results:
        if not path.exists():
            return cls(path, of)
        stored = json.loads(path.read_bytes())
        if stored["of"] != json.loads(json.dumps(of)):
            raise SystemExit(f"{path} holds rows of {stored['of']}, expected {of}: remove it or name another --out")
        rows = [Row(**(row | {"layers": tuple(row["layers"])})) for row in stored["rows"]]
        kept = [row for row in rows if not row.made or row.made_of == MADE_OF]
        return cls(path, of, kept, former=len(rows) - len(kept))

    @cached_property
    def _machine(self) -> dict[str, Any]:
        return dict(machine("transformers"))

    def have(self, *names: tuple[str, str, str, int]) -> bool:
        return {*names} <= {row.name for row in self.rows}

    def add(self, row: Row) -> None:
        self.rows = [other for other in self.rows if other.name != row.name] + [row]
        content = {"machine": self._machine, "of": self.of, "rows": [asdict(one) for one in self.rows]}
        write_file(self.path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def run(
    bench: Bench,
    results: Results,
    ordered: Sequence[Job],
    told: Callable[[Row, float], None],
    *,
    seconds: float = math.inf,
    again: bool = False,
) -> list[Job]:
    """Every row that is not there yet, in order; the jobs that were not begun within so many seconds.

    With `again` those that are there too, but for the unedited model's: each keeps its place until it is measured.
    """
    begin = time.perf_counter()

    def add(rows: Iterable[Row]) -> None:
        before = time.perf_counter()
        for row in rows:
            results.add(row)
            told(row, time.perf_counter() - before)
            before = time.perf_counter()

    def ask_unedited(records: Sequence[Record]) -> None:
        row = bench.row("before", "batch", "base", len(records))
        if not results.have(row.name):
            add(bench.measured(one, records) for one in [row])

    missing = [job for job in ordered if again or not results.have(*job.names)]
    ask_unedited(bench.records)
    # All at once; made facts are many and come last, so they wait until it is their turn
    bench.prepare([need for job in missing if not job.made(bench) for need in job.needs(bench)])
    for index, job in enumerate(missing):
        if time.perf_counter() - begin > seconds:
            return missing[index:]
        stops = [stop for stop, name in zip(job.stops, job.names, strict=True) if again or not results.have(name)]
        twins = [twin for stop in stops if (twin := same(job, stop, results.rows)) is not None]
        add(twins)
        if left := [stop for stop in stops if stop not in {twin.facts for twin in twins}]:
            if job.made(bench):
                ask_unedited(*bench.facts(job.stops[-1]))
                bench.prepare(list(job.needs(bench)))
            add(job.run(bench, left))
    return []
