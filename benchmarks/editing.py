"""Quality and speed of editing on CounterFact records: every method, any number of facts.

    python -m benchmarks.editing --facts counterfact.json --text held.txt --n 100 1000
    python -m benchmarks.editing --facts counterfact.json --text held.txt --n 100 --methods memit emmet --made 10000

Facts are those of the file whose true object the unedited model prefers to the new one. Each row edits the
base model with the method's defaults (or with what --layers, --lam and --steps say, where the method takes them),
measures, and undoes the edit. Scores and perplexity are those of `rebind.evals` (docs/evals.md), asked after the
edit's time was taken, EA in every framing that the model has; perplexity is on the given text. Drift is
KL(base ‖ edited) of the next token on unrelated prompts, growth the largest ‖ΔW‖/‖W‖. With --made, neighbors of the
records are facts too (benchmarks/made.py): these rows are for time and memory, of scores they have ES and EA. A row
whose edit cannot be made says why. JSON goes to benchmarks/results/editing.json, after every row.

Of the phases, *keys* are the subjects' keys and states at the edited layers, *checks* the facts' scores before and
after, and with --guard its measurements; an edit that it would refuse is made all the same, and the row says why it
would. On a GPU targets are searched for on a copy of the model in bfloat16; with --search every row is measured
for each of the dtypes given, on any device. With --repeats an edit is made and undone so many times and the last one
told: the first loads kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.clock import Clock, peak_gib, told_apart
from benchmarks.made import made_facts
from benchmarks.methods.shared import SEVERAL_FIRST, beginning, impossible, known_records, mean, whole
from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.cli.options import parse_layers
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.guard import Guard
from rebind.edit.ledger.edit import Edit
from rebind.edit.methods import METHODS, Method
from rebind.edit.progress import Progress
from rebind.edit.targets import TargetSearch
from rebind.errors import GuardError, NumericalError
from rebind.evals.answers import QuestionSettings, answer_records
from rebind.evals.drift import DriftMeter
from rebind.evals.reading import read_records
from rebind.evals.records import Record, Records
from rebind.evals.scores import summarize
from rebind.evals.selection import without_conflicts
from rebind.storage import Row as Answer
from rebind.storage import write_file

DTYPES = ("float32", "bfloat16")
SCORES = ("ES", "PS", "NS", "S", "EA", "PA", "EA_plain", "EA_text", "EA_chat")
PHASES = ("contexts", "moments", "targets", "keys", "solve", "writing", "checks")
FAILURES = (GuardError, NumericalError, torch.linalg.LinAlgError)
ROUNDS = 100  # of resampling for intervals, which are not told here


@dataclass(frozen=True)
class Result:
    """One edit, measured; None is what was not, or is not defined."""

    method: str  # "before" for the unedited model
    facts: int
    made: bool = False  # whether neighbors of records were made facts too: then ES and EA alone are given
    seconds: float | None = None  # everything but the moments, which are computed once a model
    facts_a_second: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    lam: float | None = None
    scores: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(SCORES))
    perplexity: float | None = None
    drift: float | None = None  # nats
    growth: float | None = None
    memory_gib: float | None = None  # peak: of the GPU, or of the process on a CPU
    search: str = ""  # the dtype that targets were searched for in
    refused: tuple[str, ...] = ()  # the guard's checks that failed, and were overridden
    why: str = ""  # nothing was measured


@dataclass(frozen=True)
class Choices:
    """What is not left to the method's defaults."""

    layers: tuple[int, ...] | None = None
    lam: float | None = None
    steps: int | None = None

    def taken_by(self, method: Method) -> Choices:
        """Less several layers where a method writes to one, and λ where it meets its facts exactly."""
        several = self.layers is not None and len(self.layers) > 1
        layers = None if several and not method.several_layers else self.layers
        return replace(self, layers=layers, lam=None if method.exact else self.lam)


def ask(editor: Editor, records: Sequence[Record]) -> list[Answer]:
    """What the model as it stands says to every question of the records, nothing decoded."""
    return answer_records(editor.language_model, records, QuestionSettings(free_tokens=0, texts=0))


def scores(records: Sequence[Record], said: Sequence[Answer]) -> dict[str, float | None]:
    """Those of `rebind.evals`; None where no record has anything for one."""
    found = summarize(records, said, rounds=ROUNDS)
    return {name: found[name]["value"] if name in found else None for name in SCORES}


def bare(record: Record) -> Record:
    """The fact alone, of which ES and EA can be asked."""
    return Record(replace(record.fact, paraphrases=(), neighbors=()), record.id)


@dataclass(frozen=True)
class Cost:
    """What an edit took."""

    seconds: float
    phases: dict[str, float]
    memory_gib: float


def write(editor: Editor, facts: Sequence[Fact], method: str, chosen: Choices) -> tuple[Edit, Cost]:
    """Edit, phase by phase."""
    clock = Clock()
    chosen = chosen.taken_by(METHODS[method])
    search = editor.settings(method, facts=len(facts)).targets
    search = search if chosen.steps is None else replace(search, steps=chosen.steps)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    editor.progress = clock.progress
    begin = time.perf_counter()
    try:
        with told_apart(editor, clock):
            edit = editor.rewrite_many(
                list(facts), method=method, layers=chosen.layers, lam=chosen.lam, targets=search, force=True
            )
        clock.enter(None)
    finally:
        editor.progress = Progress()
    seconds = time.perf_counter() - begin - clock.spent.get("moments", 0.0)
    return edit, Cost(seconds, clock.spent, peak_gib(editor))


@contextmanager
def written(editor: Editor, facts: Sequence[Fact], method: str, chosen: Choices) -> Iterator[tuple[Edit, Cost]]:
    """The edited model inside, the one before after."""
    edit, cost = write(editor, facts, method, chosen)
    try:
        yield edit, cost
    finally:
        editor.undo(edit.id)


def edited(
    held: DriftMeter, records: Sequence[Record], method: str, chosen: Choices, *, repeats: int = 1
) -> tuple[Result, list[Answer]]:
    """Edit, measure, undo: a row that lacks its scores, and what they are taken of."""
    editor, facts = held.editor, [record.written_facts[0] for record in records]
    for _ in range(repeats - 1):
        with written(editor, facts, method, chosen):
            pass
    with written(editor, facts, method, chosen) as (edit, cost):
        settings: Any = edit.settings
        row = Result(
            method=method,
            facts=len(facts),
            seconds=cost.seconds,
            facts_a_second=len(facts) / cost.seconds,
            phases=cost.phases,
            layers=tuple(settings["layers"]),
            lam=None if METHODS[method].exact else float(settings["lam"]),
            memory_gib=cost.memory_gib,
            search=settings["search"],
            refused=failed_checks(edit),
            **whole(held),
        )
        return row, ask(editor, records)


def failed_checks(edit: Edit) -> tuple[str, ...]:
    told: Any = edit.scores.get("guard", {})
    return tuple(one["check"] for one in told.get("failed", ()))


def run(held: DriftMeter, records: Sequence[Record], method: str, chosen: Choices, *, repeats: int = 1) -> Result:
    """A row of all records in one edit."""
    row, said = edited(held, records, method, chosen, repeats=repeats)
    return replace(row, scores=scores(records, said))


def one_at_a_time(held: DriftMeter, records: Sequence[Record], method: str, chosen: Choices) -> Result:
    """Each fact alone, undone before the next: the protocol of ROME's paper. Seconds are a fact's."""
    pairs = [edited(held, [record], method, chosen) for record in records]
    alone = [row for row, _ in pairs]
    seconds = statistics.median(row.seconds or 0.0 for row in alone)
    return replace(
        alone[0],
        facts=len(records),
        seconds=seconds,
        facts_a_second=1 / seconds,
        phases={},
        lam=None,
        scores=scores(records, [answer for _, said in pairs for answer in said]),
        perplexity=mean(row.perplexity for row in alone),
        drift=mean(row.drift for row in alone),
        growth=max((row.growth for row in alone if row.growth is not None), default=None),
        memory_gib=max(row.memory_gib or 0.0 for row in alone),
    )


def attempted(empty: Result, measure: Callable[[], Result], why: str = "") -> Result:
    """The row measured, by its own name; or why it is not: for a reason known before, or because the edit fails."""
    if not why:
        try:
            return replace(measure(), method=empty.method, made=empty.made)
        except FAILURES as problem:
            why = str(problem)
    return replace(empty, why=why)


def show(rows: Sequence[Result]) -> None:
    """Two tables: what became of the facts and of the model, and where the time went."""
    notes = [f"{_name(row)} at {row.facts:,}: {row.why}" for row in rows if row.why]
    notes += [f"{_name(row)} at {row.facts:,} fails {', '.join(row.refused)}" for row in rows if row.refused]
    if any(row.made for row in rows):
        notes.append("made: neighbors of records are facts too, for time and memory; ES and EA alone are given")
    quality = _table("editing", ("method", "facts", *SCORES, "perplexity", "drift", "growth"), "; ".join(notes))
    cost = _table("seconds", ("method", "facts", "layers", "λ", "search", "all", "facts/s", *PHASES, "peak GiB"))
    for row in rows:
        shares = (_told(row.scores[score], ".3f") for score in SCORES)
        rest = _told(row.perplexity, ".2f"), _told(row.drift, ".4f"), _told(row.growth, ".3f")
        quality.add_row(_name(row), str(row.facts), *shares, *rest)
        if row.seconds is not None:
            spent = (_told(row.phases.get(phase), ".2f") for phase in PHASES)
            how = ",".join(map(str, row.layers)), _told(row.lam, ".0f"), row.search
            took = _told(row.seconds, ".2f"), _told(row.facts_a_second, ".3g")
            cost.add_row(_name(row), str(row.facts), *how, *took, *spent, _told(row.memory_gib, ".1f"))
    console = Console(width=160)
    console.print(quality)
    if cost.row_count:
        console.print(cost)


def _table(title: str, columns: Sequence[str], note: str = "") -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", caption=note or None, caption_justify="left")
    for column in columns:
        made.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    return made


def _name(row: Result) -> str:
    return row.method + (", made" if row.made else "")


def _told(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.editing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--facts", required=True, help="CounterFact records, nested or flat")
    parser.add_argument("--text", type=Path, required=True, help="held-out text for perplexity")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, nargs="*", default=[100], help="numbers of facts")
    parser.add_argument("--methods", nargs="+", default=SEVERAL_FIRST, choices=SEVERAL_FIRST, help="default: all")
    parser.add_argument("--layers", type=parse_layers, help="as 1,2,3 or 1-5; default: the method's for the model")
    parser.add_argument("--lam", type=float, help="λ, of methods that have one; default: from the keys")
    parser.add_argument("--steps", type=int, help="most steps of the search; default: the method's for the model")
    parser.add_argument("--seed", type=int, default=0, help="of contexts and of sampled moments")
    parser.add_argument("--read", type=int, help="records of the file that are looked at; default: all")
    parser.add_argument("--tokens", type=int, default=50_000, help="of held text, 50,000 at most")
    parser.add_argument("--made", type=int, nargs="*", default=[], help="also so many facts, of neighbors too")
    parser.add_argument("--alone", type=int, default=0, help="also ROME on so many facts, one at a time")
    parser.add_argument("--guard", action="store_true", help="check each edit as an editor does by default")
    parser.add_argument("--search", nargs="+", choices=DTYPES, default=[None], help="in; default: the device's")
    parser.add_argument("--repeats", type=int, default=1, help="edits a row, of which the last is told; default: 1")
    parser.add_argument("--out", type=Path, default=RESULTS / "editing.json")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Bench:
    """What all rows share."""

    held: DriftMeter
    records: Records  # known to the model
    made: dict[int, list[Record]]  # for each of --made so many
    chosen: Choices
    repeats: int

    @classmethod
    def open(cls, options: argparse.Namespace) -> Bench:
        everything = without_conflicts(read_records(options.facts, limit=options.read, skip_bad=True), skip_bad=True)
        made = {n: [bare(record) for record in made_facts(everything, n)] for n in options.made}
        guard = Guard() if options.guard else None
        editor = Editor(options.model, device=options.device, seed=options.seed, guard=guard)
        text = beginning(editor.tokenizer, options.text.read_text(encoding="utf-8"), options.tokens)
        chosen = Choices(options.layers, options.lam, options.steps)
        return cls(DriftMeter(editor, text), known_records(editor, everything), made, chosen, options.repeats)

    def warm_up(self, methods: Sequence[str]) -> None:
        """Moments, contexts and kernels, which no row pays for."""
        facts = [record.written_facts[0] for record in self.records[:2]]
        for method in methods:
            with suppress(*FAILURES), written(self.held.editor, facts, method, self.chosen):
                pass

    def before(self, n: int) -> Result:
        """The unedited model."""
        asked = self.records[:n]
        found = scores(asked, ask(self.held.editor, asked))
        return Result("before", len(asked), scores=found, **whole(self.held))

    def row(self, method: str, n: int, *, made: bool = False) -> Result:
        """So many facts in one edit."""
        records = self.made[n] if made else self.records[:n]
        why = f"the model knows {len(records):,} of the facts" if len(records) < n else ""
        why = why or impossible(self.held.editor, METHODS[method], n)
        measure = partial(run, self.held, records, method, self.chosen, repeats=self.repeats)
        return attempted(Result(method, n, made), measure, why)

    def alone(self, n: int) -> Result:
        """ROME on so many facts, one at a time."""
        records = self.records[:n]
        measure = partial(one_at_a_time, self.held, records, "rome", self.chosen)
        return attempted(Result("rome, one at a time", len(records)), measure)

    def rows(self, options: argparse.Namespace) -> Iterator[Result]:
        """All that is asked for, the unedited model first."""
        yield self.before(min(options.n, default=100))
        for search in options.search:
            with searched_in(search):
                yield from self.edits(options)

    def edits(self, options: argparse.Namespace) -> Iterator[Result]:
        """Of each method, those of made facts last."""
        methods = list(dict.fromkeys(options.methods))
        self.warm_up([*methods, *(["rome"] if options.alone and "rome" not in methods else [])])
        yield from (self.row(method, n) for method in methods for n in options.n)
        if options.alone:
            yield self.alone(options.alone)
        yield from (self.row(method, n, made=True) for method in methods for n in options.made)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    bench, rows = Bench.open(options), []
    for row in bench.rows(options):
        rows.append(row)
        store(rows, options, bench.held.editor.language_model.name)
        show([row])
    show(rows)


@contextmanager
def searched_in(name: str | None) -> Iterator[None]:
    """Searches in a dtype of this name; as the device has it without one."""
    with nullcontext() if name is None else patch.object(TargetSearch, "dtype", getattr(torch, name)):
        yield


def store(rows: Sequence[Result], options: argparse.Namespace, model: str) -> None:
    """All rows so far, in the file: what is measured is not lost."""
    content = {
        "machine": machine(),
        "model": model,
        "options": {name: _short(value) for name, value in vars(options).items() if name != "out"},
        "rows": [
            {name: value for name, value in (asdict(row) | row.scores).items() if name != "scores"} for row in rows
        ],
    }
    write_file(options.out, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _short(value: Any) -> Any:
    """A file or folder by its name: where it lies is this machine's."""
    there = isinstance(value, (str, Path)) and Path(value).exists()
    return Path(value).name if there else value


if __name__ == "__main__":
    main()
