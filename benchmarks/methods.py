"""What every method makes of one fact to ten thousand, written at once or batch after batch, with a figure.

    python -m benchmarks.methods --facts counterfact.json --text held.txt --out methods.json --figure methods.png

Records are those of the file whose true object the unedited model prefers, at most --records of them. *Batch*: all
facts in one edit; one and ten facts are the mean of several disjoint groups. *Sequential*: edits of --batch facts one
after another, nothing taken back, everything written so far asked again at --at. The guard is off: what a method breaks
is to be seen.

A sequence is written in two ways. *On the base*, as rebind does it: targets and keys of every edit are those of the
unedited model, and the weights are the fold of the edits. *On the edited model*, as in the papers, by the methods that
write to several layers: each batch's targets and keys are found on the model that holds the batches before it; the
moments stay those of the unedited model, and methods that remember are handed the keys of earlier batches.

What is asked: ES and EA of all facts; PS and NS of --around of them, evenly spaced, with --neighbours each; what the
model says by itself to --free of them (not where edits have one fact each); perplexity of --tokens tokens. Scores come
with 95 % intervals. Two states that are the same are measured once: in one edit recursive is memit, and the first batch
of a sequence is a batch.

The search for targets takes nearly all of the time, so those on the base are found in one search for all rows and
methods that set them at the same layer with the same settings. Seconds here are therefore no measure of a method: those
are `benchmarks.editing`'s. Rows come in the order of their weight, and a file that --out names already is gone on with:
rows that it holds are not measured again. With --seconds no row is begun after that time.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.editing import Clock, peak_gib
from benchmarks.made import made_facts
from benchmarks.remembered import Memory
from benchmarks.report import RESULTS
from rebind.bench.machine import machine
from rebind.edit.editor import Editor, Progress
from rebind.edit.facts import Fact, comparable
from rebind.edit.kept import KeptTargets
from rebind.edit.ledger import Ledger
from rebind.edit.methods import METHODS, Method, Settings, get_method
from rebind.edit.search import Search
from rebind.edit.sites import memory_of, module_at, write_memory
from rebind.edit.spread import Place, spread, suitable_lambda
from rebind.evals.answers import Asking, answer_all
from rebind.evals.answers import Row as Answer
from rebind.evals.asking import Model, generate
from rebind.evals.choosing import known
from rebind.evals.drift import Held
from rebind.evals.metrics import bootstrap
from rebind.evals.records import Record, Records, read_records, without_conflicts
from rebind.evals.scores import S_OF, Asked
from rebind.evals.scores import SCORES as SCORE
from rebind.files import write_atomically
from rebind.memory import Write

SCORES = ("S", "ES", "PS", "NS", "EA", "free")
GROUPS = {1: 10, 10: 5}  # how many disjoint groups of so many facts are written, each alone
LOOKED_AT = 3  # groups whose perplexity is measured
FREELY = 10  # facts that each of several groups has at least for free decoding: its passes are dear for one fact
FREE_TOKENS = 16
WAYS = {"base": "on the base", "edited": "on the edited model"}
COLOURS = {"memit": "#2563eb", "alphaedit": "#d97706", "recursive": "#059669", "rome": "#dc2626", "emmet": "#7c3aed"}


@dataclass(frozen=True)
class Row:
    """A state of the model, measured."""

    method: str  # "before" for the unedited model
    protocol: str  # batch or sequential
    found: str  # base or edited: which model targets and keys are found on
    facts: int
    groups: int = 1
    made: bool = False  # whether facts were paired anew: then ES, EA and free alone mean something
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # {name: value, low, high, records}
    perplexity: float | None = None
    drift: float | None = None  # nats
    growth: float | None = None
    layers: tuple[int, ...] = ()
    lam: float | None = None
    phases: dict[str, float] = field(default_factory=dict)  # seconds, of all edits of this row
    searched: int = 0  # facts whose targets were not there yet
    memory_gib: float = 0.0
    why: str = ""  # nothing was measured
    same: str = ""  # as the state that was measured

    @property
    def name(self) -> tuple[str, str, str, int]:
        return self.method, self.protocol, self.found, self.facts


@dataclass(frozen=True)
class Amount:
    """How much is asked of a row."""

    around: int = 300  # facts whose paraphrases and neighbours are asked
    neighbours: int = 5  # of each
    free: int = 100  # facts that are decoded freely
    tokens: int = 20_000  # of held text


@dataclass(eq=False)
class Bench:
    """An editor, the records to write, and how they are asked about."""

    editor: Editor
    records: Sequence[Record]  # known to the model, no prompt twice
    pool: Sequence[Fact]  # all facts of the file: more are made of them
    text: str
    amount: Amount = Amount()

    def __post_init__(self) -> None:
        self.memory = Memory.of(self.editor)
        self.model, self.held = Model.of(self.editor), Held(self.editor, self.held_text)

    @cached_property
    def held_text(self) -> str:
        """As much of the text as is read: it is tokenised anew for every row."""
        most = self.amount.tokens
        begun = self.text[: 20 * most]
        ends = self.editor.tokenizer(begun, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = ends["offset_mapping"]
        return begun if len(offsets) <= most else begun[: offsets[most - 1][1]]

    def ask(self, records: Sequence[Record], *, freely: bool = True) -> list[tuple[Record, Answer]]:
        """What the model as it stands says: each record, less what is not asked of it, with its answer."""
        around = evenly(len(records), self.amount.around)
        asked = [self._asked(record, around=index in around) for index, record in enumerate(records)]
        answers = answer_all(self.model, asked, Asking(free_tokens=0, texts=0))
        free = sorted(evenly(len(records), self.amount.free)) if freely else []
        for index, text in zip(free, self._said([asked[index] for index in free]), strict=True):
            answers[index]["free"] = {"prompt": text}
        return list(zip(asked, answers, strict=True))

    def _asked(self, record: Record, *, around: bool) -> Record:
        some = record.neighbours[: self.amount.neighbours] if around else ()
        fact = record.fact if around else replace(record.fact, paraphrases=())
        return replace(record, fact=fact, neighbours=some, consequences=())

    def _said(self, records: Sequence[Record]) -> list[str]:
        return generate(self.model, [record.fact.text for record in records], FREE_TOKENS)

    def scores(self, said: Sequence[tuple[Record, Answer]]) -> dict[str, dict[str, float]]:
        asked = [Asked(record, answer, answer, {}) for record, answer in said]  # none looks at what was said before
        columns = {name: [SCORE[name].of(one) for one in asked] for name in SCORES if name != "S"}
        return {name: asdict(one) for name, one in bootstrap(columns, {"S": S_OF}, rounds=200).items()}

    def facts(self, n: int) -> list[list[Record]]:
        """Groups of n records to write; made ones where there are not as many."""
        if n > len(self.records):
            return [self._made(n)]
        count = max(1, min(GROUPS.get(n, 1), len(self.records) // n))
        return [list(self.records[group * n : (group + 1) * n]) for group in range(count)]

    @cached_property
    def _made(self) -> Callable[[int], list[Record]]:
        @cache
        def made(n: int) -> list[Record]:
            facts = (replace(fact, paraphrases=(), neighbours=()) for fact in made_facts(self.pool, n))
            return [Record(fact, str(number)) for number, fact in enumerate(facts)]

        return made

    def settings(self, method: str, n: int) -> Settings:
        return self.editor.settings(method, facts=n)[1]

    def prepare(self, needs: Sequence[tuple[Settings, Sequence[Fact]]]) -> None:
        """Moments of all layers in one pass; targets of all facts, in one search for each layer and settings."""
        if not needs:
            return
        editor = self.editor
        for settings, facts in needs:
            self.memory.targets.plan(settings.layers[-1], settings.targets, editor._requests(facts))
        places = _places(editor, sorted({layer for settings, _ in needs for layer in settings.layers}))
        editor.weights.remember([place.name for place in places])
        editor.weights.learn_old_keys(places)

    @contextmanager
    def apart(self) -> Iterator[Clock]:
        """An empty ledger, and a clock; the unedited model again after."""
        self.editor.use(Ledger.in_memory(self.editor.fingerprint, self.editor.loaded.name))
        if self.editor.trunk.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock, self.memory.targets.searched = Clock(), 0
        self.editor.progress = clock
        try:
            yield clock
        finally:
            self.editor.progress = Progress()
            self.editor.use(Ledger.in_memory(self.editor.fingerprint, self.editor.loaded.name))
            self.memory.gains.forget()

    def measured(self, row: Row, records: Sequence[Record], clock: Clock | None = None) -> Row:
        """The row with what the model as it stands says to the records."""
        return replace(
            row,
            scores=self.scores(self.ask(records)),
            **self.whole(),
            phases={} if clock is None else dict(clock.spent),  # type: ignore[attr-defined]
            searched=self.memory.targets.searched,
            memory_gib=peak_gib(self.editor),
        )

    def whole(self) -> dict[str, Any]:
        """Perplexity, drift and growth."""
        found = self.held.measure()
        return {"perplexity": found["perplexity"], "drift": found["kl"], "growth": found["growth"]}


def evenly(n: int, most: int) -> set[int]:
    """At most so many of n places, evenly spaced: of a sequence, early facts and late ones alike."""
    return set(range(n)) if n <= most else {index * n // most for index in range(most)}


def _places(editor: Editor, layers: Sequence[int]) -> list[Place]:
    names = [(editor.sites[layer].name, layer) for layer in layers]
    return [Place(name, layer, module_at(editor.model, name)) for name, layer in names]


# In one edit


def impossible(editor: Editor, method: Method, n: int) -> str:
    """Why so many facts are not written at once with this method; nothing if they are."""
    width = min(site.d_k for site in editor.sites)
    if not method.several_layers and n > width:
        return f"{n:,} facts exactly in one matrix, whose keys have {width:,} dimensions: there is no solution"
    return ""


def batch(bench: Bench, name: str, n: int) -> Row:
    """n facts in one edit, or the mean of several such edits."""
    editor, method = bench.editor, get_method(name)
    empty = Row(name, "batch", "base", n, made=n > len(bench.records))
    if why := impossible(editor, method, n):
        return replace(empty, why=why)
    groups = bench.facts(n)
    said: list[tuple[Record, Answer]] = []
    wholes: list[dict[str, Any]] = []
    with bench.apart() as clock:
        for number, records in enumerate(groups):
            edit = editor.rewrite_many([record.fact for record in records], method=method)
            clock.enter(None)
            said += bench.ask(records, freely=len(groups) == 1 or n >= FREELY)
            if number < LOOKED_AT:
                wholes.append(bench.whole())
            editor.undo(edit.id)
        settings: Any = edit.settings
        return replace(
            empty,
            groups=len(groups),
            scores=bench.scores(said),
            perplexity=_mean(one["perplexity"] for one in wholes),
            drift=_mean(one["drift"] for one in wholes),
            growth=_mean(one["growth"] for one in wholes),
            layers=tuple(settings["layers"]),
            lam=float(settings["lam"]),
            phases=dict(clock.spent),  # type: ignore[attr-defined]
            searched=bench.memory.targets.searched,
            memory_gib=peak_gib(editor),
        )


def _mean(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    return None if None in listed else fmean(value for value in listed if value is not None)


# One edit after another


def sequential(bench: Bench, name: str, found: str, size: int, at: Sequence[int]) -> Iterator[Row]:
    """Batches of facts, one after another; a row for each number of facts in `at`."""
    method = get_method(name)
    stops = sorted({min(stop, len(bench.records)) for stop in at})
    if why := impossible(bench.editor, method, min(size, stops[-1])):
        yield from (Row(name, "sequential", found, stop, why=why) for stop in stops)
        return
    with bench.apart() as clock:
        write = _on_base(bench.editor, method) if found == "base" else _on_edited(bench, method)
        for begin in range(0, stops[-1], size):
            end = min(begin + size, stops[-1])
            layers, lam = write([record.fact for record in bench.records[begin:end]])
            clock.enter(None)
            if end in stops:
                row = Row(name, "sequential", found, end, layers=layers, lam=lam)
                yield bench.measured(row, bench.records[:end], clock)


Writer = Callable[[list[Fact]], tuple[tuple[int, ...], float]]  # facts → layers, λ


def _on_base(editor: Editor, method: Method) -> Writer:
    def write(facts: list[Fact]) -> tuple[tuple[int, ...], float]:
        settings: Any = editor.rewrite_many(facts, method=method).settings
        return tuple(settings["layers"]), float(settings["lam"])

    return write


def _on_edited(bench: Bench, method: Method) -> Writer:
    """Writes go straight into the weights, past the ledger, which stays empty: what it says puts the base back."""
    editor = bench.editor
    _ = editor.contexts, editor.drift()  # both are asked of the base: once there, they are kept
    earlier: dict[str, Tensor] = {}  # keys of the batches before, by site

    def write(facts: list[Fact]) -> tuple[tuple[int, ...], float]:
        settings = bench.settings(method.name, len(facts))
        places = _places(editor, settings.layers)
        editor.progress.phase("contexts")
        requests = editor._requests(facts)
        editor.weights.remember([place.name for place in places])
        editor.progress.phase("moments")
        editor.weights.learn_old_keys(places)
        editor.progress.phase("targets")
        # The narrower copy of a search is of the weights as they stand; nothing is written yet: those of the base.
        search: Any = Search(editor.trunk, "the model as it stands") if earlier else bench.memory.targets
        wanted = search.find(
            settings.layers[-1], requests, settings.targets, KeptTargets(None), editor.progress.targets
        )
        editor.progress.phase("solve")
        lam = settings.lam

        def gain(place: Place, keys: Tensor) -> Tensor:
            nonlocal lam
            old = editor.weights.old[place.name]
            if lam is None:
                lam = suitable_lambda(keys, old.factored)
            return method.gain(keys, old, lam, earlier.get(place.name, keys[:0]))

        writes = spread(editor.trunk, places, requests, wanted.hidden, gain)
        for place in places:
            keys, values, found = (part.double() for part in writes[place.name].tensors())
            write_memory(place.module, Write(keys, values, found).apply(memory_of(place.module).double()))
            earlier[place.name] = torch.cat([earlier[place.name], keys]) if place.name in earlier else keys
        return settings.layers, float(lam or 0.0)

    return write


# Which rows, and in which order


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

    def needs(self, bench: Bench) -> Iterator[tuple[Settings, list[Fact]]]:
        """What is searched for on the base, with which settings. Made facts are not: they are many, and come last."""
        if impossible(bench.editor, get_method(self.method), self.size):
            return
        if self.protocol == "sequential":
            last = self.stops[-1] if self.found == "base" else min(self.size, self.stops[-1])
            for begin in range(0, last, self.size):
                facts = [one.fact for one in bench.records[begin : min(begin + self.size, last)]]
                yield bench.settings(self.method, len(facts)), facts
        elif self.size <= len(bench.records):
            groups = bench.facts(self.size)
            yield bench.settings(self.method, self.size), [one.fact for group in groups for one in group]


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
    """Those that say most first: many facts at once, sequences, few facts, made ones."""
    most = len(bench.records)
    stops = tuple(sorted({min(stop, most) for stop in at}))
    several = [method for method in methods if get_method(method).several_layers]

    def batches(some: Iterable[int]) -> list[Job]:
        chosen = sorted(some) if "batch" in protocols else []
        return [Job(method, "batch", "base", (n,), n) for n in chosen for method in methods]

    ways = [way for way in WAYS if way in found and "sequential" in protocols]
    return [
        *batches(n for n in numbers if n not in GROUPS and n <= most),
        *(
            Job(method, "sequential", way, stops, size)
            for way in ways
            for method in (methods if way == "base" else several)
        ),
        *batches(n for n in numbers if n in GROUPS and n <= most),
        *batches(n for n in numbers if n > most),
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


# What is told


def show(rows: Sequence[Row], console: Console) -> None:
    """A table for each protocol."""
    for protocol, found in dict.fromkeys((row.protocol, row.found) for row in rows):
        some = [row for row in rows if (row.protocol, row.found) == (protocol, found)]
        title = "in one edit" if protocol == "batch" else f"one batch after another, {WAYS[found]}"
        if protocol == "batch":  # rows come in the order of their weight
            some.sort(key=lambda row: (row.method != "before", row.facts))
        notes = [f"{row.method} at {row.facts:,}: {row.why}" for row in some if row.why]
        notes += [f"{row.method} at {row.facts:,} is {row.same}" for row in some if row.same]
        if any(row.made for row in some):
            notes.append("made: facts paired anew from the records; paraphrases and neighbours do not exist")
        console.print(_table(title, some, "; ".join(notes)))


def _table(title: str, rows: Sequence[Row], note: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption=note or None, caption_justify="left")
    for column in ("method", "facts", *SCORES, "perplexity", "drift", "growth", "layers", "λ"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        count = f"{row.groups} × {row.facts}" if row.groups > 1 else f"{row.facts:,}"
        scores = (_told(row.scores.get(name, {}).get("value"), ".3f") for name in SCORES)
        table.add_row(
            row.method + (", made" if row.made else ""),
            count,
            *scores,
            _told(row.perplexity, ".2f"),
            _told(row.drift, ".3f"),
            _told(row.growth, ".2f"),
            f"{row.layers[0]}-{row.layers[-1]}" if len(row.layers) > 1 else ",".join(map(str, row.layers)),
            _told(row.lam, ".0f"),
        )
    return table


def _told(value: float | None, how: str) -> str:
    return "—" if value is None else format(value, how)


def figure(rows: Sequence[Row], path: Path) -> None:
    """S and perplexity against the number of edits: solid on the base, dashed on the edited model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from rebind.lab.style import INK, legend_below, named, panels

    said = "solid: targets and keys found on the base model; dashed: on the model that holds the batches before"
    drawn, (left, middle, right) = panels(3, "Facts written batch after batch", said, width=3.9)
    before = [row for row in rows if row.method == "before"]
    lines = dict.fromkeys((row.method, row.found) for row in rows if row.protocol == "sequential")
    named_already: set[str] = set()
    highest = 0.0
    for method, found in lines:
        some = [row for row in rows if (row.method, row.protocol, row.found) == (method, "sequential", found)]
        look: dict[str, Any] = {
            "color": COLOURS.get(method, INK),
            "ls": "-" if found == "base" else (0, (4, 2)),
            "marker": "o",
        }
        for axes, score in ((left, "S"), (middle, "EA")):
            points = [(row.facts, row.scores[score]["value"]) for row in some if score in row.scores]
            label = None if method in named_already else method
            named_already.add(method)
            axes.plot(*zip(*points, strict=True), **look, ms=3.6, lw=1.8, label=label)
        held = [(0, before[0].perplexity)] if before else []
        held += [(row.facts, row.perplexity) for row in some]
        finite = [(facts, value) for facts, value in held if value is not None]
        highest = max(highest, *(value / finite[0][1] for _, value in finite))
        right.plot(*zip(*finite, strict=True), **look, ms=3.6, lw=1.8)
    for axes, title in ((left, "S"), (middle, "facts whose every token comes first"), (right, "perplexity, held text")):
        named(axes, title, "facts written", "")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    for axes in (left, middle):
        axes.set_ylim(-0.02, 1.02)
    if highest > 5:
        right.set_yscale("log")
        right.yaxis.set_major_formatter("{x:,.0f}")
        right.yaxis.set_minor_formatter("")
    legend_below(drawn, len(named_already))
    FigureCanvasAgg(drawn)
    data = io.BytesIO()
    drawn.savefig(data, format="png", metadata={"Software": None})
    write_atomically(path, data.getvalue())


# From the command line


@dataclass(eq=False)
class Results:
    """Rows, in a file that is written anew after each."""

    path: Path
    of: dict[str, Any]  # what the rows depend on: a file of something else is not gone on with
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, of: dict[str, Any]) -> Results:
        if not path.exists():
            return cls(path, of)
        stored = json.loads(path.read_bytes())
        if stored["of"] != json.loads(json.dumps(of)):
            raise SystemExit(f"{path} holds rows of {stored['of']}, expected {of}: remove it or name another --out")
        return cls(path, of, [Row(**(row | {"layers": tuple(row["layers"])})) for row in stored["rows"]])

    @cached_property
    def _machine(self) -> dict[str, Any]:
        return dict(machine("transformers"))

    def have(self, *names: tuple[str, str, str, int]) -> bool:
        return {*names} <= {row.name for row in self.rows}

    def add(self, row: Row) -> None:
        self.rows = [other for other in self.rows if other.name != row.name] + [row]
        content = {"machine": self._machine, "of": self.of, "rows": [asdict(one) for one in self.rows]}
        write_atomically(self.path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def run(
    bench: Bench,
    results: Results,
    ordered: Sequence[Job],
    told: Callable[[Row, float], None],
    *,
    seconds: float = math.inf,
) -> list[Job]:
    """Every row that is not there yet, in order; the jobs that were not begun within so many seconds."""
    begin = time.perf_counter()

    def add(rows: Iterable[Row]) -> None:
        before = time.perf_counter()
        for row in rows:
            results.add(row)
            told(row, time.perf_counter() - before)
            before = time.perf_counter()

    missing = [job for job in ordered if not results.have(*job.names)]
    everything = Row("before", "batch", "base", len(bench.records))
    if not results.have(everything.name):
        add(bench.measured(row, bench.records) for row in [everything])
    bench.prepare([need for job in missing for need in job.needs(bench)])
    for index, job in enumerate(missing):
        if time.perf_counter() - begin > seconds:
            return missing[index:]
        stops = [stop for stop, name in zip(job.stops, job.names, strict=True) if not results.have(name)]
        twins = [twin for stop in stops if (twin := same(job, stop, results.rows)) is not None]
        add(twins)
        if left := [stop for stop in stops if stop not in {twin.facts for twin in twins}]:
            add(job.run(bench, left))
    return []


def opened(options: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """The bench, and what its rows depend on."""
    editor = Editor(options.model, device=options.device, seed=options.seed, guard=None)
    everything = without_conflicts(read_records(options.facts, limit=options.read, skip_bad=True), skip_bad=True)
    whole = [index for index, one in enumerate(everything) if one.fact.old and one.paraphrases and one.neighbours]
    records = known(editor, everything.keep(whole))
    first = {comparable(record.fact.text): index for index, record in reversed(list(enumerate(records)))}
    records = records.keep(sorted(first.values())[: options.records])
    text = Path(options.text).read_text(encoding="utf-8")
    amount = Amount(options.around, options.neighbours, options.free, options.tokens)
    bench = Bench(editor, records, [record.fact for record in everything], text, amount)
    of = {
        "model": editor.loaded.name,
        "fingerprint": editor.fingerprint,
        "records": Records(tuple(records)).digest,
        "known": len(records),
        "read": len(everything),
        "text": hashlib.sha256(bench.held_text.encode()).hexdigest(),
        "batch": options.batch,
        "asked": asdict(amount),
        "seed": options.seed,
        "moments": editor._origin(),
    }
    return bench, of


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", required=True, help="CounterFact records, nested or flat")
    parser.add_argument("--text", required=True, help="held-out text for perplexity")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, nargs="*", default=[1, 10, 100, 1000], help="numbers of facts in one edit")
    several_first = sorted(METHODS, key=lambda name: not METHODS[name].several_layers)
    parser.add_argument("--methods", nargs="+", default=several_first, choices=several_first)
    parser.add_argument("--protocols", nargs="+", default=["batch", "sequential"], choices=["batch", "sequential"])
    parser.add_argument("--found", nargs="+", default=["base", "edited"], choices=list(WAYS), help="of sequences")
    parser.add_argument("--batch", type=int, default=100, help="facts an edit of a sequence")
    parser.add_argument("--at", type=int, nargs="+", default=[100, 300, 1000], help="facts of a sequence")
    parser.add_argument("--read", type=int, help="records of the file that are looked at; default: all")
    parser.add_argument("--records", type=int, default=1000, help="of them written; more facts than these are made")
    parser.add_argument("--around", type=int, default=Amount.around, help="facts that PS and NS are asked of")
    parser.add_argument("--neighbours", type=int, default=Amount.neighbours, help="of each, for NS")
    parser.add_argument("--free", type=int, default=Amount.free, help="facts that are decoded freely")
    parser.add_argument("--tokens", type=int, default=Amount.tokens, help="of held text, for perplexity")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no row is begun; default: none")
    parser.add_argument("--seed", type=int, default=0, help="of contexts and of sampled moments")
    parser.add_argument("--out", type=Path, default=RESULTS / "methods.json")
    parser.add_argument("--figure", type=Path, help="PNG of the sequences")
    options = parser.parse_args(arguments)
    if off := [stop for stop in options.at if stop % options.batch]:
        parser.error(f"--at has {off[0]}, expected multiples of --batch ({options.batch})")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options, console = parse(arguments), Console(width=130, highlight=False)
    bench, of = opened(options)
    results = Results.open(options.out, of)

    def told(row: Row, seconds: float) -> None:
        console.print(_table(f"{row.protocol}, {WAYS[row.found]}: {seconds:.1f} s", [row], row.why))

    ordered = jobs(
        bench,
        methods=options.methods,
        numbers=options.n,
        protocols=options.protocols,
        found=options.found,
        size=options.batch,
        at=options.at,
    )
    left = run(bench, results, ordered, told, seconds=options.seconds)
    show(results.rows, console)
    if options.figure is not None and any(row.protocol == "sequential" for row in results.rows):
        figure(results.rows, options.figure)
    if left:
        console.print(f"{len(left)} jobs were not begun, {left[0].names[0]} the first: the same command goes on")
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
