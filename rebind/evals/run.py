"""An evaluation: write records by a method and a protocol, ask everything before and after, keep it all in a folder.

    editor = Editor()
    result = evaluate(editor, bundled(10), Trial(method="memit"), "results/memit")

The folder holds

    config.json      everything needed to repeat the run: model, data, method, settings given and used, seed, versions
    records.jsonl    what the model said: a line for each record in each state of the model, the base (edits 0) first
    edits.jsonl      what was written: layers, λ and the rest for each edit
    drift.jsonl      the model as a whole: perplexity, canaries, growth of the weights
    timings.jsonl    seconds, the one file that differs from run to run
    summary.json, table.md, figures                              made from the files above

Same seed, same machine, same bytes. A run that was killed goes on where it stopped when it is called again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.ledger.lock import Lock
from rebind.edit.ledger.versions import versions
from rebind.edit.methods import Settings, get_method
from rebind.errors import InputError, RebindError
from rebind.evals import report
from rebind.evals.answers import Asking, answer_all
from rebind.evals.asking import Model
from rebind.evals.drift import Held
from rebind.evals.protocols import Protocol, Stage, Unit, get_protocol
from rebind.evals.records import Records
from rebind.evals.scores import S_OF, scores_of
from rebind.evals.store import Lines, Row, read_json, write_json
from rebind.models.fingerprint import fingerprint
from rebind.models.sites import module_at

FORMAT = "rebind-eval-1"
CONFIG, RECORDS, EDITS, DRIFT, TIMINGS = "config.json", "records.jsonl", "edits.jsonl", "drift.jsonl", "timings.jsonl"
RUNS = Path("runs")
WORK = "work"  # the ledger and the lock of a run that is not finished
CPU_RECORDS, GPU_RECORDS = 64, 512  # asked at once


@dataclass(frozen=True)
class Trial:
    """What is tried, and how it is measured."""

    method: str = "memit"
    protocol: Protocol = get_protocol("single")  # noqa: RUF009 - frozen
    layers: tuple[int, ...] | None = None
    lam: float | None = None
    steps: int | None = None  # most steps of the search for targets; None: the method's
    asking: Asking = Asking()  # noqa: RUF009 - frozen
    drifts: int = 3  # single edits of which drift is measured
    rounds: int = 1000  # of the bootstrap


@dataclass(frozen=True)
class Progress:
    """What an evaluation tells of its work."""

    unit: Callable[[int, int, Stage, dict[str, float]], None] = lambda done, total, stage, scores: None
    doing: Callable[[str], None] = lambda what: None  # "asking", "drift" or what the editor says


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, and what is in it in short."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]


def evaluate(
    editor: Editor,
    records: Records,
    trial: Trial,
    out: str | Path | None = None,
    *,
    text: str | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run a trial on the editor's base model and write its folder: `out`, or one of its own in `runs`.

    `text` is held text for the perplexity, in place of ours.
    """
    get_method(trial.method)
    if not records:
        raise InputError("got no records, expected at least one: check the file")
    if editor.ledger.active:
        raise InputError(
            f"the editor has {len(editor.ledger.active)} active edits, expected none: open it without a ledger"
        )
    run = _Run(editor, records, trial, Held(editor, text), progress or Progress())
    config = run.config()
    run.out = Path(out).expanduser() if out is not None else default_folder(config)
    _claim(run.out, config)
    work = run.out / WORK
    work.mkdir(exist_ok=True)
    with Lock(work / "lock").held(0), _unguarded(editor):
        rows, drift = run.go()
        shutil.rmtree(work, ignore_errors=True)
    return Result(run.out, config, report.write(run.out, config, records, rows, drift))


def default_folder(config: dict[str, Any]) -> Path:
    """One for each configuration: the same call goes on with the same run."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    return RUNS / f"{config['method']}-{config['protocol']['name']}-{config['data']['records']}-{digest}"


@contextmanager
def _unguarded(editor: Editor) -> Iterator[None]:
    """No guard: what an edit breaks is to be measured, not refused."""
    guard, editor.guard = editor.guard, None
    try:
        yield
    finally:
        editor.guard = guard


def _claim(out: Path, config: dict[str, Any]) -> None:
    """Make the folder this run's, or see that it is."""
    found = _config_at(out)
    if found is not None:
        if found != config:
            names = ", ".join(_differences(found, config))
            raise InputError(
                f"{out} holds a run that differs in {names}, expected the same run to go on with: name another --out"
            )
        return
    if out.exists() and (not out.is_dir() or not all(path.match(".*.tmp") for path in out.iterdir())):
        raise InputError(f"{out} is there already and holds no evaluation: name another --out")
    write_json(out / CONFIG, config)


def _config_at(out: Path) -> dict[str, Any] | None:
    """That of the evaluation in a folder; a model's, or another program's, is none."""
    if not (out / CONFIG).exists():
        return None
    found = read_json(out / CONFIG)
    return found if isinstance(found, dict) and str(found.get("format", "")).startswith("rebind-eval") else None


def _differences(one: Any, other: Any, prefix: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted(one.keys() | other.keys())
        return [diff for name in names for diff in _differences(one.get(name), other.get(name), f"{prefix}{name}.")]
    return [] if one == other else [f"{prefix.rstrip('.')} ({_short(one)}, now {_short(other)})"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


@dataclass
class _Run:
    editor: Editor
    records: Records
    trial: Trial
    held: Held
    progress: Progress
    out: Path = Path()
    clean: str = ""  # of the sites' weights before anything was written
    settled: dict[int, Settings] = field(default_factory=dict)  # for edits of so many facts
    running: dict[str, list[float]] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = Model.of(self.editor)

    def config(self) -> dict[str, Any]:
        editor, trial = self.editor, self.trial
        device = editor.trunk.device
        facts = len(self._facts(range(len(self.records))))
        return {
            "format": FORMAT,
            "model": {
                "name": editor.loaded.name,
                "fingerprint": editor.fingerprint,
                "dtype": str(editor.model.dtype).removeprefix("torch."),
                "device": _device(device),
                "threads": torch.get_num_threads() if device.type == "cpu" else None,  # they order a CPU's sums
                "chat": editor.chat,
            },
            "data": {
                "name": self.records.name,
                "digest": self.records.digest,
                "records": len(self.records),
                # Where records have several. A run that lacks this asked of each the first only: another run than this.
                **({"facts": facts} if facts > len(self.records) else {}),
                "skipped": list(self.records.skipped),
            },
            "method": trial.method,
            "protocol": asdict(trial.protocol),
            "settings": {"layers": trial.layers and list(trial.layers), "lam": trial.lam, "steps": trial.steps},
            "used": self._used(),
            "moments": {"corpus": editor.corpus.digest, "tokens": editor.moment_tokens},
            "asking": {**asdict(trial.asking), "records_at_once": self.at_once},
            "drift": {"edits": trial.drifts, **self.held.described},
            "bootstrap": trial.rounds,
            "seed": editor.seed,
            "versions": {**versions(), "numpy": np.__version__},
        }

    def _used(self) -> dict[str, Any]:
        """What those settings come to on this model and machine, in the batch of most facts."""
        batches = {batch for stage in self.trial.protocol.stages(len(self.records)) for batch in stage.batches}
        sizes = sorted({len(self._facts(batch)) for batch in batches})
        settings = [self._settings(size) for size in sizes][-1]
        return {
            "layers": list(settings.layers),
            "lam": settings.lam,
            "targets": asdict(settings.targets),
            "search": self.editor.searched_in,
        }

    def _facts(self, batch: range) -> list[Fact]:
        return [fact for index in batch for fact in self.records[index].facts]

    def _settings(self, facts: int) -> Settings:
        """For an edit of so many facts; asked for once, as the choice of layers on the machine may change meanwhile."""
        if facts not in self.settled:
            trial = self.trial
            _, settings = self.editor.settings(trial.method, facts=facts, layers=trial.layers, lam=trial.lam)
            targets = settings.targets if trial.steps is None else replace(settings.targets, steps=trial.steps)
            self.settled[facts] = replace(settings, targets=targets)
        return self.settled[facts]

    @property
    def at_once(self) -> int:
        return GPU_RECORDS if self.editor.trunk.device.type == "cuda" else CPU_RECORDS

    def go(self) -> tuple[list[Row], list[Row]]:
        """Ask what is not on disk yet; all rows, and those of the drift."""
        units = self.trial.protocol.units(len(self.records), self.at_once, self.trial.drifts)
        rows, edits, drift, timings = (Lines(self.out / name) for name in (RECORDS, EDITS, DRIFT, TIMINGS))
        done = _done(units, len(rows.rows))
        rows.keep(sum(len(unit.asked) for unit in units[:done]))
        drift.keep(sum(unit.drift for unit in units[:done]))
        edits.keep(len(edits.rows))
        timings.keep(len(timings.rows))
        # The base model's rows come first, one for each record: later ones are compared with them.
        for row in rows.rows[len(self.records) :]:
            self._count([row], [rows.rows[row["record"]]])
        own = self.editor.ledger
        try:
            for number, unit in enumerate(units[done:], start=done):
                with self._timed("edit"):
                    self._prepare(unit.stage, edits)
                self._measure(unit, rows, drift)
                timings.append([{"edits": unit.stage.edits, "records": len(unit.asked), **self._seconds()}])
                self.progress.unit(number + 1, len(units), unit.stage, self._means())
        finally:
            self.editor.use(self._fresh_ledger())
            clean = fingerprint(self.editor.model) == self.editor.fingerprint
            self.editor.use(own)
        if not clean:
            raise RebindError(
                f"the model is not what it was before the evaluation (fingerprint {self.editor.fingerprint[:12]}), "
                f"expected the same bytes: load it again, and report this with the command that led to it"
            )
        return rows.rows, drift.rows

    # The model

    def _prepare(self, stage: Stage, edits: Lines) -> None:
        """Have the stage's batches, and nothing else, in the model."""
        if stage.batches and not stage.alone:
            self._go_on(stage, edits)
            return
        self.editor.use(self._fresh_ledger())
        self._require_clean()
        for batch in stage.batches:
            self._write(batch, edits)

    def _go_on(self, stage: Stage, edits: Lines) -> None:
        """Write the batches that the ledger on disk does not have yet, and tell those that it has."""
        folder = self.out / WORK / "ledger"
        if self.editor.ledger.path != folder:
            self.editor.use(Ledger.open(folder, self.editor.fingerprint, model_name=self.editor.loaded.name))
        if len(self.editor.ledger.edits) > len(stage.batches):
            raise RebindError(
                f"{folder} has {len(self.editor.ledger.edits)} edits where {len(stage.batches)} come next, expected no "
                f"more: {RECORDS} was cut short, so remove {self.out} and run again"
            )
        for batch, edit in zip(stage.batches, self.editor.ledger.edits, strict=False):
            self._tell(batch, edit, edits)  # a kill may have come between the ledger and the line
        for batch in stage.batches[len(self.editor.ledger.edits) :]:
            self._write(batch, edits)

    def _write(self, batch: range, edits: Lines) -> None:
        facts = self._facts(batch)
        settings = self._settings(len(facts))
        edit = self.editor.rewrite_many(
            facts, method=self.trial.method, layers=settings.layers, lam=self.trial.lam, targets=settings.targets
        )
        self._tell(batch, edit, edits)

    def _tell(self, batch: range, edit: Edit, edits: Lines) -> None:
        """Say what was written, unless a run that was killed got so far."""
        told = len(edits.rows) and edits.rows[-1]["records"][0] >= batch.start
        if not told:
            edits.append([{"records": [batch.start, batch.stop], "sites": list(edit.sites), **edit.settings}])

    def _fresh_ledger(self) -> Ledger:
        return Ledger.in_memory(self.editor.fingerprint, self.editor.loaded.name)

    def _require_clean(self) -> None:
        """See that nothing of an earlier edit is left, in any matrix that edits can touch."""
        modules = [module_at(self.editor.model, site.name) for site in self.editor.sites]
        found = fingerprint(nn.ModuleList(modules))
        self.clean = self.clean or found
        if found != self.clean:
            raise RebindError(
                "the model still holds something of the edit before, expected the base model's bytes: report this "
                "with the command that led to it"
            )

    # The questions

    def _measure(self, unit: Unit, rows: Lines, drift: Lines) -> None:
        stage = unit.stage
        if unit.drift:
            self.progress.doing("drift")
            with self._timed("drift"):
                alone = [unit.asked.start, unit.asked.stop] if stage.alone and stage.edits else None
                where = {"edits": stage.edits, "records": alone}
                found = self.held.measure()
        self.progress.doing("asking")
        asked = [self.records[index] for index in unit.asked]
        with self._timed("ask"):
            answers = answer_all(self.model, asked, self.trial.asking, seed=self.editor.seed)
        told = [
            {"edits": stage.edits, "record": index, "id": self.records[index].id, **row}
            for index, row in zip(unit.asked, answers, strict=True)
        ]
        if unit.drift:
            drift.append([where | found])
        rows.append(told)
        if stage.edits:
            self._count(told, [rows.rows[index] for index in unit.asked])

    # What is told meanwhile

    def _count(self, rows: Sequence[Row], base: Sequence[Row]) -> None:
        if not self.trial.protocol.alone and self.running and rows[0]["record"] == 0:
            self.running.clear()  # a new checkpoint
        columns = scores_of([self.records[row["record"]] for row in rows], rows, base)
        for name in S_OF:
            self.running.setdefault(name, []).extend(value for value in columns[name] if value is not None)

    def _means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.running.items() if values}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.editor.trunk.device.type == "cuda":
            torch.cuda.synchronize(self.editor.trunk.device)
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin

    def _seconds(self) -> dict[str, float]:
        told = {name: round(value, 4) for name, value in self.spent.items()}
        self.spent.clear()
        return told


def _done(units: Sequence[Unit], rows: int) -> int:
    """How many units are on disk whole."""
    done = 0
    for unit in units:
        rows -= len(unit.asked)
        if rows < 0:
            break
        done += 1
    return done


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
