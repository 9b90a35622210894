"""Run an evaluation: write records by a method and a protocol, and store the answers before and after.

    editor = Editor()
    result = evaluate(editor, bundled_records(10), EvalConfig(method="memit"), "results/memit")

The run folder contains

    config.json      everything needed to repeat the run: model, data, method, settings, seed, versions
    records.jsonl    the answers: one row per record in each state of the model, the base model (edits 0) first
    edits.jsonl      the settings of every edit: layers, λ and others
    drift.jsonl      the model as a whole: perplexity, canary prompts, growth of the weights
    baselines.jsonl  the answers of the baselines, if they are part of the run
    timings.jsonl    seconds; the only file that differs between two runs
    summary.json, table.md, report.png                           computed from the files above

The same seed on the same machine gives the same bytes. An interrupted run resumes when it is called again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from rebind.edit import DEFAULT_METHOD
from rebind.edit.editor import Editor, open_ledger
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import library_versions
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.methods import get_method
from rebind.edit.settings import EditSettings
from rebind.edit.targets.kept import subject_prompts
from rebind.errors import InputError
from rebind.evals.answers import BaseModel, QuestionSettings, answer_records
from rebind.evals.baselines import BASELINES, fine_tuned
from rebind.evals.drift import DriftMeter
from rebind.evals.figures import draw_runs
from rebind.evals.metrics import PARTS_OF_S
from rebind.evals.protocols import Protocol, Stage, get_protocol
from rebind.evals.records import Records, with_rivals
from rebind.evals.scores import Scores, score_record
from rebind.evals.stored import (
    DRIFT,
    EDITS,
    RECORDS,
    TIMINGS,
    append_unit,
    check_answers,
    check_drift,
    check_edits,
    drop_incomplete_units,
)
from rebind.evals.summary import markdown_report, summarize_run
from rebind.memory.checks import require_number
from rebind.parallel import OrderedUnits, alone, from_writer, open_run_folder, ranks, share
from rebind.storage import Row, RunFolder, seal_json, write_json

RUNS = Path("runs")
MAX_ROUNDS = 1_000_000  # bootstrap samples
BASELINE_ROWS = "baselines.jsonl"
WORK = "work"  # the subfolder for the ledger of an unfinished run
CPU_RECORDS, GPU_RECORDS = 64, 512  # records per unit of work


@dataclass(frozen=True)
class EvalConfig:
    """The method to evaluate, the protocol and the questions."""

    method: str = DEFAULT_METHOD
    protocol: Protocol = get_protocol("single")  # noqa: RUF009 - frozen
    layers: tuple[int, ...] | None = None
    lam: float | None = None
    steps: int | None = None  # maximum number of steps of target search; None: the method's default
    questions: QuestionSettings = QuestionSettings()  # noqa: RUF009 - frozen
    drift_edits: int = 3  # with the single protocol, drift is measured for this many edits
    rounds: int = 1000  # bootstrap samples
    unit_size: int | None = None  # records that are evaluated and stored together; None: chosen by device
    baselines: bool = False  # whether to evaluate the baselines as well
    figure: bool = True

    def __post_init__(self) -> None:
        get_method(self.method)  # raises an error for an unknown name
        require_number("drift_edits", self.drift_edits, whole=True)
        require_number("rounds", self.rounds, least=1, most=MAX_ROUNDS, whole=True)
        for name in ("steps", "unit_size"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), least=1, whole=True)
        if self.lam is not None:
            require_number("lam", self.lam, above=0.0, code="invalid_lambda")


@dataclass(frozen=True)
class EvalProgress:
    """Callbacks that report progress, for example to a progress bar; by default they do nothing."""

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

    The guard of the editor is off during the run: an evaluation measures what an edit breaks instead of rejecting it.

    Args:
        editor: an editor without active edits. Its weights are restored byte for byte.
        records: the facts and questions, from `read_records` or `bundled_records`.
        config: the method, the protocol and the questions.
        out: the run folder; by default one in `runs/` that belongs to this configuration.
        text: the text for perplexity; by default a text that comes with the package.
        progress: functions that receive progress reports.
    """
    config = config or EvalConfig()
    if editor.ledger.active:
        raise InputError(
            f"The editor has {len(editor.ledger.active)} active edits",
            expected="none",
            advice="Use an editor without a ledger",
            code="editor_has_edits",
        )
    run = _Run(editor, records, config, DriftMeter(editor, text), progress or EvalProgress())
    description = run.describe()
    path = Path(out).expanduser() if out is not None else default_folder(description)
    ledger, guard = editor.ledger, editor.guard
    with open_run_folder(path, "evaluation", description) as folder:
        editor.guard = None
        try:
            run.run(folder)
            if config.baselines:
                from_writer(lambda: run.run_baselines(folder), "baselines")
        finally:
            editor.guard = guard
            editor.use_ledger(ledger)
        summary = from_writer(lambda: _report(run, folder), "summary")
    return EvalResult(path, description, summary)


def _report(run: _Run, folder: RunFolder) -> dict[str, Any]:
    """Write the summary, the table and the figure of a finished run; return the summary."""
    shutil.rmtree(folder.file(WORK), ignore_errors=True)
    baselines = folder.rows(BASELINE_ROWS).read()
    summary = summarize_run(folder.config, run.records, run.rows, run.drift, baselines)
    write_json(folder.file("summary.json"), seal_json(summary))
    folder.write("table.md", markdown_report(summary).encode())
    if run.config.figure and find_spec("matplotlib"):
        draw_runs(folder.file("report.png"), [("after", summary)])
    return summary


def default_folder(config: dict[str, Any]) -> Path:
    """Return the folder of a configuration in `runs/`, so that the same call resumes the same run."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    return RUNS / f"{config['method']}-{config['protocol']['name']}-{config['data']['records']}-{digest}"


class _Run:
    """An evaluation in progress."""

    def __init__(
        self, editor: Editor, records: Records, config: EvalConfig, drift_meter: DriftMeter, progress: EvalProgress
    ) -> None:
        self.editor, self.source, self.config = editor, records, config
        self.records = with_rivals(records)
        self.drift_meter, self.progress = drift_meter, progress
        self.model = editor.language_model
        self.unit_size = config.unit_size or (GPU_RECORDS if self.model.device.type == "cuda" else CPU_RECORDS)
        batches = {batch for stage in config.protocol.stages(len(records)) for batch in stage.batches}
        # Settings are chosen once for each number of facts, so that they cannot change during the run.
        sizes = sorted({len(self._facts(batch)) for batch in batches})
        self.edit_settings = {facts: self._choose_settings(facts) for facts in sizes}
        self.running: list[Scores] = []  # scores of the current state, for progress
        self.seconds: dict[str, float] = {}  # timings of the current unit

    def _facts(self, batch: range) -> list[Fact]:
        return [fact for index in batch for fact in self.records[index].written_facts]

    def _choose_settings(self, facts: int) -> EditSettings:
        config = self.config
        settings = self.editor.settings(config.method, facts=facts, layers=config.layers, lam=config.lam)
        targets = settings.targets if config.steps is None else replace(settings.targets, steps=config.steps)
        return replace(settings, targets=targets)

    def describe(self) -> dict[str, Any]:
        """Return the config that is stored: everything needed to repeat the run."""
        editor, model, config, device = self.editor, self.model, self.config, self.model.device
        settings = self.edit_settings[max(self.edit_settings)]
        threads = torch.get_num_threads() if device.type == "cpu" else None  # they determine the order of sums
        return {
            "model": {
                "name": model.name,
                "fingerprint": model.fingerprint,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "threads": threads,
            },
            "data": {
                "name": self.source.name,
                "digest": self.source.digest,
                "records": len(self.records),
                "facts": len(self._facts(range(len(self.records)))),
                "skipped": list(self.source.skipped),
            },
            "method": config.method,
            "protocol": asdict(config.protocol),
            "settings": {"layers": config.layers and list(config.layers), "lam": config.lam, "steps": config.steps},
            "used": {  # what the settings resolve to on this model and machine, for the largest batch
                "layers": list(settings.layers),
                "lam": settings.lam,
                "targets": asdict(settings.targets),
                "framings": list(editor.framings),
                "search": editor.search_dtype,
            },
            "moments": {"corpus": editor.moments.corpus.digest, "tokens": editor.moments.tokens},
            "questions": {**asdict(config.questions), "unit_size": self.unit_size},
            "drift": {"edits": config.drift_edits, **self.drift_meter.config},
            "bootstrap": config.rounds,
            "seed": editor.seed,
            "versions": {**library_versions(), "numpy": np.__version__},
        }

    def run(self, folder: RunFolder) -> None:
        """Run the units that are not stored yet; afterwards `rows` and `drift` are those of the whole run.

        Units are divided between processes. All processes make the edits of a sequence.
        """
        units = self.config.protocol.units(len(self.records), self.unit_size, self.config.drift_edits)
        self.folder, self.rows = folder, list[Row]()
        stored_units = OrderedUnits(folder, partial(drop_incomplete_units, folder, units), partial(append_unit, folder))
        finished = stored_units.open()
        rows, self.drift, edits = (folder.rows(name).read() for name in (RECORDS, DRIFT, EDITS))
        states = [{"edits": unit.edits, "record": index} for unit in units for index in unit.records]
        check_answers(folder.file(RECORDS), rows, self.records, states)
        check_drift(folder.file(DRIFT), self.drift, [unit.edits for unit in units if unit.drift])
        check_edits(folder.file(EDITS), edits, self.records)
        self.logged_edits = len(edits)  # of a sequence: how many have a row
        self._count(rows)
        missing = [number for number in range(len(units)) if number not in finished]
        self._load_old_keys(units[number] for number in missing)
        assigned = set(share(missing))
        for number in missing:
            unit = units[number]
            if unit.alone and number not in assigned:
                continue
            with alone() if unit.alone else nullcontext():
                results = self._run_unit(unit, is_assigned=number in assigned)
            if results is not None:
                stored_units.add(number, results)
                self._count(results[RECORDS])
                self.progress.unit(number + 1, len(units), unit, self._running_scores())
        stored_units.merge()
        self.rows, self.drift = (folder.rows(name).read() for name in (RECORDS, DRIFT))

    def _run_unit(self, unit: Stage, *, is_assigned: bool) -> dict[str, list[Row]] | None:
        """Bring the model to the state of a unit; return the unit's rows by file, if it is assigned to this process."""
        self.seconds.clear()
        with self._timed("edit"):
            edits = self._prepare(unit)
        if not is_assigned:
            return None
        new_edits = edits if unit.alone else edits[self.logged_edits :]
        self.logged_edits = len(edits)
        with alone():
            drift = [self._measure_drift(unit)] if unit.drift else []
            self.progress.phase("asking")
            with self._timed("ask"):
                base = self.editor.base_model if unit.edits else None
                rows = self._answer(unit.records, {"edits": unit.edits}, self.config.questions, base)
        seconds = {name: round(value, 4) for name, value in self.seconds.items()}
        timings: list[Row] = [{"edits": unit.edits, "records": len(unit.records), **seconds}]
        # In the order in which they are stored: with the rows of its records, a unit counts as complete.
        return {EDITS: new_edits, DRIFT: drift, RECORDS: rows, TIMINGS: timings}

    def _load_old_keys(self, units: Iterable[Stage]) -> None:
        """Let all processes load the old keys for single edits together, before each makes its own edits."""
        if ranks().count > 1 and any(unit.alone and unit.edits for unit in units):
            layers = {
                layer
                for settings in self.edit_settings.values()
                if not settings.method.dense
                for layer in settings.layers
            }
            self.editor.weights.load_old_keys([self.editor.sites[layer].name for layer in sorted(layers)])

    def _prepare(self, stage: Stage) -> list[Row]:
        """Bring the model to a stage, with exactly its batches; return the rows of its edits."""
        model, editor = self.model, self.editor
        if stage.alone or not stage.batches:
            editor.use_ledger(Ledger.in_memory(model.fingerprint, model.name))
        else:  # edits accumulate in a ledger on disk
            path = self.folder.file(f"{WORK}/ledger")
            if editor.ledger.path != path:
                editor.use_ledger(open_ledger(path, model.fingerprint, model_name=model.name))
        for batch in stage.batches[len(editor.ledger.edits) :]:
            facts = self._facts(batch)
            settings = self.edit_settings[len(facts)]
            editor.rewrite_many(
                facts, method=self.config.method, layers=settings.layers, lam=self.config.lam, targets=settings.targets
            )
        return [
            {"records": [batch.start, batch.stop], "sites": list(edit.sites), **edit.settings}
            for batch, edit in zip(stage.batches, editor.ledger.edits, strict=False)
        ]

    def _measure_drift(self, unit: Stage) -> Row:
        self.progress.phase("drift")
        with self._timed("drift"):
            records = [unit.records.start, unit.records.stop] if unit.alone and unit.edits else None
            return {"edits": unit.edits, "records": records, **self.drift_meter.measure()}

    def _answer(
        self,
        indices: range,
        state: Row,
        questions: QuestionSettings,
        base: BaseModel | None,
        *,
        in_prompt: bool = False,
    ) -> list[Row]:
        records = [self.records[index] for index in indices]
        probes = [] if base is None else [self.probes[index] for index in indices]
        answers = answer_records(
            self.model, records, questions, base=base, probes=probes, in_prompt=in_prompt, seed=self.editor.seed
        )
        return [
            {**state, "record": index, "id": self.records[index].id, **row}
            for index, row in zip(indices, answers, strict=True)
        ]

    @cached_property
    def probes(self) -> list[tuple[str, ...]]:
        """Prompts about other relations of each record's subject, held out from target search."""
        with self.editor.base_model():
            prompts = subject_prompts(self.model, [record.written_facts[0] for record in self.records])
        return [prompt.held_out for prompt in prompts]

    def run_baselines(self, folder: RunFolder) -> None:
        """Evaluate the baselines on the records that are not stored yet."""
        self.editor.use_ledger(Ledger.in_memory(self.model.fingerprint, self.model.name))
        questions, everything = replace(self.config.questions, texts=0), range(len(self.records))
        layers = self.edit_settings[max(self.edit_settings)].layers
        rows, sites = folder.rows(BASELINE_ROWS), [self.editor.sites[layer] for layer in layers]
        states = [{"baseline": name, "record": index} for name in BASELINES for index in everything]
        check_answers(rows.path, rows.read(), self.records, states)
        row_count = len(rows.read())
        _ = self.probes  # computed now, on the unedited model
        if not row_count:
            self.progress.phase(BASELINES["prompt"])
            rows.append(self._answer(everything, {"baseline": "prompt"}, questions, nullcontext, in_prompt=True))
        size = 1 if self.config.protocol.alone else len(self.records)
        for batch in (
            everything[begin : begin + size] for begin in everything[max(0, row_count - len(everything)) :: size]
        ):
            self.progress.phase(BASELINES["lora"])
            with fine_tuned(self.model, self._facts(batch), sites, seed=self.editor.seed) as base:
                rows.append(self._answer(batch, {"baseline": "lora"}, questions, base))

    def _count(self, rows: Sequence[Row]) -> None:
        """Add rows, and their scores to the running scores of the current state."""
        self.rows += rows
        for row in rows:
            if row["edits"]:
                if row["record"] == 0:  # a new state
                    self.running.clear()
                self.running.append(score_record(self.records[row["record"]], row))

    def _running_scores(self) -> dict[str, float]:
        columns = {name: [scores[name] for scores in self.running] for name in PARTS_OF_S}
        values = {name: [value for value in column if value is not None] for name, column in columns.items()}
        return {name: fmean(column) for name, column in values.items() if column}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.seconds[name] = time.perf_counter() - begin
