"""Run an evaluation: write records by a method and a protocol, ask everything before and after, store all of it.

    editor = Editor()
    result = evaluate(editor, bundled_records(10), EvalConfig(method="memit"), "results/memit")

The run folder holds

    config.json      everything needed to repeat the run: model, data, method, settings, seed, versions
    records.jsonl    the answers: one row per record in each state of the model, the base model (edits 0) first
    edits.jsonl      the settings of every edit: layers, λ and the rest
    drift.jsonl      the model as a whole: perplexity, canary prompts, growth of the weights
    timings.jsonl    seconds; the only file that differs between two runs
    summary.json, table.md, *.png                                made from the files above

The same seed on the same machine gives the same bytes. A killed run resumes when it is called again.
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
from rebind.edit.ledger.edit import Edit, library_versions
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.methods import get_method
from rebind.edit.settings import EditSettings
from rebind.errors import InputError, RebindError
from rebind.evals import report
from rebind.evals.answers import QuestionSettings, answer_records
from rebind.evals.drift import DriftMeter
from rebind.evals.protocols import Protocol, Stage, WorkUnit, get_protocol
from rebind.evals.records import Records
from rebind.evals.scores import PARTS_OF_S, compute_scores
from rebind.models.fingerprint import fingerprint
from rebind.models.sites import module_at
from rebind.storage import JsonLines, Row, RunFolder

RECORDS, EDITS, DRIFT, TIMINGS = "records.jsonl", "edits.jsonl", "drift.jsonl", "timings.jsonl"
RUNS = Path("runs")
WORK = "work"  # the ledger of a run that is not finished
CPU_RECORDS, GPU_RECORDS = 64, 512  # records per unit of work


@dataclass(frozen=True)
class EvalConfig:
    """Which method is evaluated, and how."""

    method: str = "memit"
    protocol: Protocol = get_protocol("single")  # noqa: RUF009 - frozen
    layers: tuple[int, ...] | None = None
    lam: float | None = None
    steps: int | None = None  # maximum number of steps of target search; None: the method's default
    questions: QuestionSettings = QuestionSettings()  # noqa: RUF009 - frozen
    drift_edits: int = 3  # with the single protocol, drift is measured for this many edits
    rounds: int = 1000  # of the bootstrap
    unit_size: int | None = None  # records that are asked about and stored together; None: by device
    figures: bool = True


@dataclass(frozen=True)
class EvalProgress:
    """Call-backs that report progress; each may be replaced by one that draws a bar."""

    unit: Callable[[int, int, Stage, dict[str, float]], None] = lambda done, total, stage, scores: None
    phase: Callable[[str], None] = lambda name: None  # "asking", "drift" or a phase of the editor


@dataclass(frozen=True)
class EvalResult:
    """A finished run: its folder, config and summary."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]


def evaluate(
    editor: Editor,
    records: Records,
    config: EvalConfig | None = None,
    out: str | Path | None = None,
    *,
    text: str | None = None,
    progress: EvalProgress | None = None,
) -> EvalResult:
    """Evaluate a method on the editor's base model, and return the summary.

    Args:
        editor: an editor without active edits. Its weights are the same bytes afterwards.
        records: what to write and to ask, from `read_records` or `bundled_records`.
        config: the method, the protocol and how much to ask.
        out: the run folder; by default one in `runs/` that belongs to this configuration.
        text: text for perplexity; by default one that comes with the package.
        progress: where to report progress.
    """
    config = config or EvalConfig()
    get_method(config.method)
    if not records:
        raise InputError("There are no records", expected="at least one", code="no_records")
    if editor.ledger.active:
        raise InputError(
            f"The editor has {len(editor.ledger.active)} active edits",
            expected="none",
            advice="Use an editor without a ledger",
            code="editor_has_edits",
        )
    run = _Run(editor, records, config, DriftMeter(editor, text), progress or EvalProgress())
    described = run.describe()
    path = Path(out).expanduser() if out is not None else default_folder(described)
    with RunFolder.open(path, "evaluation", described) as folder, _without_guard(editor):
        rows, drift = run.run(folder)
        shutil.rmtree(folder.file(WORK), ignore_errors=True)
        summary = report.write(folder, records, rows, drift, figures=config.figures)
    return EvalResult(path, described, summary)


def default_folder(config: dict[str, Any]) -> Path:
    """Return a folder in `runs/` for each configuration, so that the same call resumes the same run."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    return RUNS / f"{config['method']}-{config['protocol']['name']}-{config['data']['records']}-{digest}"


@contextmanager
def _without_guard(editor: Editor) -> Iterator[None]:
    """Turn the guard off: an evaluation measures what an edit breaks instead of refusing it."""
    guard, editor.guard = editor.guard, None
    try:
        yield
    finally:
        editor.guard = guard


@dataclass
class _Run:
    editor: Editor
    records: Records
    settings: EvalConfig
    drift_meter: DriftMeter
    progress: EvalProgress
    base_digest: str = ""  # of the sites' weights before the first edit
    edit_settings: dict[int, EditSettings] = field(default_factory=dict)  # by number of facts
    running: dict[str, list[float]] = field(default_factory=dict)  # scores so far, for progress
    seconds: dict[str, float] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the config that is stored: everything needed to repeat the run."""
        editor, settings = self.editor, self.settings
        model = editor.language_model
        return {
            "model": {
                "name": model.name,
                "fingerprint": model.fingerprint,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": _device_name(model.device),
                "threads": torch.get_num_threads() if model.device.type == "cpu" else None,  # they order sums
                "chat": model.chat,
            },
            "data": {
                "name": self.records.name,
                "digest": self.records.digest,
                "records": len(self.records),
                "facts": len(self._facts(range(len(self.records)))),
                "skipped": list(self.records.skipped),
            },
            "method": settings.method,
            "protocol": asdict(settings.protocol),
            "settings": {
                "layers": settings.layers and list(settings.layers),
                "lam": settings.lam,
                "steps": settings.steps,
            },
            "used": self._used_settings(),
            "moments": {"corpus": editor.moments.corpus.digest, "tokens": editor.moments.tokens},
            "questions": {**asdict(settings.questions), "unit_size": self.unit_size},
            "drift": {"edits": settings.drift_edits, **self.drift_meter.config},
            "bootstrap": settings.rounds,
            "seed": editor.seed,
            "versions": {**library_versions(), "numpy": np.__version__},
        }

    def _used_settings(self) -> dict[str, Any]:
        """Return what the settings resolve to on this model and machine, for the largest batch."""
        batches = {batch for stage in self.settings.protocol.stages(len(self.records)) for batch in stage.batches}
        settings = [self._edit_settings(size) for size in sorted({len(self._facts(batch)) for batch in batches})][-1]
        return {
            "layers": list(settings.layers),
            "lam": settings.lam,
            "targets": asdict(settings.targets),
            "search": self.editor.search_dtype,
        }

    def _facts(self, batch: range) -> list[Fact]:
        return [fact for index in batch for fact in self.records[index].facts]

    def _edit_settings(self, facts: int) -> EditSettings:
        """Return the settings of an edit of this many facts; chosen once, so that a run cannot mix two choices."""
        if facts not in self.edit_settings:
            chosen = self.settings
            settings = self.editor.settings(chosen.method, facts=facts, layers=chosen.layers, lam=chosen.lam)
            targets = settings.targets if chosen.steps is None else replace(settings.targets, steps=chosen.steps)
            self.edit_settings[facts] = replace(settings, targets=targets)
        return self.edit_settings[facts]

    @property
    def unit_size(self) -> int:
        by_device = GPU_RECORDS if self.editor.language_model.device.type == "cuda" else CPU_RECORDS
        return self.settings.unit_size or by_device

    def run(self, folder: RunFolder) -> tuple[list[Row], list[Row]]:
        """Do the units of work that are not stored yet, and return all rows of answers and of drift."""
        self.folder = folder
        units = self.settings.protocol.units(len(self.records), self.unit_size, self.settings.drift_edits)
        self.answers, self.drift, self.edits = folder.rows(RECORDS), folder.rows(DRIFT), folder.rows(EDITS)
        done = _finished_units(units, len(self.answers.read()))
        self.rows = self.answers.truncate(sum(len(unit.records) for unit in units[:done]))
        self.drift_rows = self.drift.truncate(sum(unit.drift for unit in units[:done]))
        self.edit_rows = self.edits.read()
        # The base model's rows come first, one per record: later ones are compared with them.
        for row in self.rows[len(self.records) :]:
            self._count([row], [self.rows[row["record"]]])
        own_ledger = self.editor.ledger
        try:
            for number, unit in enumerate(units[done:], start=done):
                with self._timed("edit"):
                    self._prepare(unit.stage)
                self._measure(unit)
                self._store_timings(folder.rows(TIMINGS), unit)
                self.progress.unit(number + 1, len(units), unit.stage, self._mean_scores())
        finally:
            self.editor.use_ledger(self._new_ledger())
            restored = fingerprint(self.editor.model) == self.editor.language_model.fingerprint
            self.editor.use_ledger(own_ledger)
        if not restored:
            raise _not_restored()
        return self.rows, self.drift_rows

    # The model

    def _prepare(self, stage: Stage) -> None:
        """Write the stage's batches, and nothing else, into the model."""
        if stage.batches and not stage.alone:
            self._continue_sequence(stage)
            return
        self.editor.use_ledger(self._new_ledger())
        self._require_base_weights()
        for batch in stage.batches:
            self._write(batch)

    def _continue_sequence(self, stage: Stage) -> None:
        """Write the batches that the ledger on disk does not hold yet, and log those that it holds."""
        path = self.folder.file(f"{WORK}/ledger")
        model = self.editor.language_model
        if self.editor.ledger.path != path:
            self.editor.use_ledger(Ledger.open(path, model.fingerprint, model_name=model.name))
        written = self.editor.ledger.edits
        if len(written) > len(stage.batches):
            raise RebindError(
                f"{path} has {len(written)} edits",
                expected=f"at most {len(stage.batches)}, as {RECORDS} was cut short",
                advice=f"Remove {self.folder.path} and run again",
                code="run_folder_damaged",
            )
        for batch, edit in zip(stage.batches, written, strict=False):
            self._log_edit(batch, edit)  # the run may have been killed between the ledger and the log
        for batch in stage.batches[len(written) :]:
            self._write(batch)

    def _write(self, batch: range) -> None:
        facts = self._facts(batch)
        settings = self._edit_settings(len(facts))
        edit = self.editor.rewrite_many(
            facts,
            method=self.settings.method,
            layers=settings.layers,
            lam=self.settings.lam,
            targets=settings.targets,
        )
        self._log_edit(batch, edit)

    def _log_edit(self, batch: range, edit: Edit) -> None:
        if self.edit_rows and self.edit_rows[-1]["records"][0] >= batch.start:
            return
        row = {"records": [batch.start, batch.stop], "sites": list(edit.sites), **edit.settings}
        self.edits.append(row)
        self.edit_rows.append(row)

    def _new_ledger(self) -> Ledger:
        model = self.editor.language_model
        return Ledger.in_memory(model.fingerprint, model.name)

    def _require_base_weights(self) -> None:
        """Check that every matrix that edits can touch has the bytes of the base model."""
        modules = [module_at(self.editor.model, site.name) for site in self.editor.language_model.sites]
        digest = fingerprint(nn.ModuleList(modules))
        self.base_digest = self.base_digest or digest
        if digest != self.base_digest:
            raise _not_restored()

    # The questions

    def _measure(self, unit: WorkUnit) -> None:
        stage = unit.stage
        drift: Row = {}
        if unit.drift:
            self.progress.phase("drift")
            with self._timed("drift"):
                alone = [unit.records.start, unit.records.stop] if stage.alone and stage.edits else None
                drift = {"edits": stage.edits, "records": alone, **self.drift_meter.measure()}
        self.progress.phase("asking")
        records = [self.records[index] for index in unit.records]
        with self._timed("ask"):
            answers = answer_records(
                self.editor.language_model, records, self.settings.questions, seed=self.editor.seed
            )
        rows = [
            {"edits": stage.edits, "record": index, "id": self.records[index].id, **row}
            for index, row in zip(unit.records, answers, strict=True)
        ]
        if unit.drift:
            self.drift.append(drift)
            self.drift_rows.append(drift)
        self.answers.append(rows)
        self.rows += rows
        if stage.edits:
            self._count(rows, [self.rows[index] for index in unit.records])

    # Progress

    def _count(self, rows: Sequence[Row], base: Sequence[Row]) -> None:
        if not self.settings.protocol.alone and self.running and rows[0]["record"] == 0:
            self.running.clear()  # a new checkpoint
        columns = compute_scores([self.records[row["record"]] for row in rows], rows, base)
        for name in PARTS_OF_S:
            self.running.setdefault(name, []).extend(value for value in columns[name] if value is not None)

    def _mean_scores(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.running.items() if values}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        device = self.editor.language_model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def _store_timings(self, timings: JsonLines, unit: WorkUnit) -> None:
        seconds = {name: round(value, 4) for name, value in self.seconds.items()}
        timings.append({"edits": unit.stage.edits, "records": len(unit.records), **seconds})
        self.seconds.clear()


def _finished_units(units: Sequence[WorkUnit], rows: int) -> int:
    """Return how many units are stored completely."""
    done = 0
    for unit in units:
        rows -= len(unit.records)
        if rows < 0:
            break
        done += 1
    return done


def _not_restored() -> RebindError:
    return RebindError(
        "The model's weights differ from those of the base model after an undo",
        expected="the same bytes",
        advice="Load the model again, and report this with the command that led to it",
        code="base_not_restored",
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
