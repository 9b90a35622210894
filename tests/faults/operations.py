"""What is under fire: operations that write, what a reader sees of their results, and how to run them again.

An operation works in a folder, its home. `prepare` makes the home as it is before the operation. `inspect` returns a
digest of what a reader sees: it is the same as before the operation, or as after it, and never anything else.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rebind.analysis.layer_search import Candidate, LayerChoice
from rebind.edit.dense.attach import attach
from rebind.edit.editor import Editor
from rebind.edit.export.adapter import read_peft
from rebind.edit.export.change import load_delta
from rebind.edit.facts import Fact
from rebind.edit.ledger import Ledger, verify_folder
from rebind.edit.moments import Moments
from rebind.edit.settings import measured_layers, save_measured_layers
from rebind.lab import run_experiment
from rebind.memory import LowRank
from rebind.memory.associative import Memory
from rebind.models.language_model import LanguageModel
from rebind.nn.training import train
from rebind.storage import read_json_object
from rebind.storage.exports import MANIFEST
from tests import tiny
from tests.edit import editors
from tests.evals import runs as evaluations
from tests.faults.children import Acknowledge
from tests.lab.test_run import Norms
from tests.nn import training_runs

UNFINISHED = "nothing"
SAID = Fact.parse("The answer is {Dante}", "and")  # the edited model says it, so a consolidation moves it
PROMPTS = [fact.text for fact in (*editors.FACTS, SAID)]
FINGERPRINT = "a" * 64  # of a model that is not there
LEDGER, CACHE, DATA, EXPORT, RUN = "ledger", "cache", "data", "export", "run"


@dataclass(frozen=True)
class Operation:
    """One operation under fire."""

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path, Acknowledge], None]
    inspect: Callable[[Path], str]
    problems: Callable[[Path], list[str]] = lambda home: []  # what a check of the stored files finds
    is_run: bool = False  # whether the same command, given again, only tidies up


def in_home(home: Path) -> None:
    """Let this process keep its caches and keys in the home."""
    os.environ |= {"REBIND_CACHE": str(home / CACHE), "REBIND_DATA": str(home / DATA)}
    warnings.simplefilter("ignore")


# Edits


def editor_in(home: Path) -> Editor:
    in_home(home)
    return editors.open_editor(ledger=home / LEDGER)


def digest_of(parts: Iterable[object]) -> str:
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]


def digest_of_tensors(tensors: dict[str, torch.Tensor]) -> str:
    parts = sorted(tensors.items())
    return digest_of((name, list(part.shape), part.contiguous().numpy().tobytes()) for name, part in parts)


def state_of(editor: Editor) -> str:
    """Return a digest of the edits, of all weights, and of what the model computes, its dense memory included."""
    states = [(edit.id, editor.ledger.is_active(edit.id)) for edit in editor.ledger.edits]
    logits = editor.language_model.next_token_log_probs(PROMPTS)
    return digest_of([states, tiny.weights(editor.model), logits.numpy().tobytes()])


def inspect_ledger(home: Path) -> str:
    return state_of(editor_in(home))


def problems_of_ledger(home: Path) -> list[str]:
    return verify_folder(home / LEDGER)


def with_edits(home: Path) -> None:
    """Make a ledger with an active edit, an edit in the dense memory, and an edit that is undone."""
    editor = editor_in(home)
    editors.rewrite(editor, editors.FACTS[0])
    editors.rewrite(editor, SAID, method="dense")
    editors.rewrite(editor, editors.FACTS[2])
    editor.undo("e0003")


def editing(name: str, change: Callable[[Editor], object]) -> Operation:
    """Return an operation on a ledger with some edits; it is acknowledged when `change` returns."""

    def run(home: Path, acknowledge: Acknowledge) -> None:
        change(editor_in(home))
        acknowledge(name)

    return Operation(name, with_edits, run, inspect_ledger, problems_of_ledger)


def undo_with_snapshots(home: Path, acknowledge: Acknowledge) -> None:
    """Undo an edit, and store snapshots although the ledger is small."""
    editor = editor_in(home)
    assert editor.ledger.snapshots is not None
    editor.ledger.snapshots.worth_seconds = 0.0
    editor.undo("e0001")
    acknowledge("undo")


def compact(home: Path, acknowledge: Acknowledge) -> None:
    """Seal the active edits and drop the undone one; a second time there is nothing to do."""
    ledger = editor_in(home).ledger
    if len(ledger.sealed) != len(ledger.edits):
        ledger.compact(keep_last=0)
    acknowledge("compact")


def problems_after_a_writer(home: Path) -> list[str]:
    """Let a writer remove what a compaction that was killed has left, and check the ledger."""
    with Ledger.open(home / LEDGER).locked():
        return problems_of_ledger(home)


def create_ledger(home: Path, acknowledge: Acknowledge) -> None:
    editors.rewrite(editor_in(home), editors.FACTS[0])
    acknowledge("e0001")


def inspect_new_ledger(home: Path) -> str:
    """A ledger that is not there yet, and one without edits, are the same to a reader."""
    return inspect_ledger(home) if (home / LEDGER / "ledger.json").exists() else state_of(editors.open_editor())


def moments_only(home: Path) -> None:
    in_home(home)
    editors.rewrite(editors.open_editor(), editors.FACTS[0])


CREATE = Operation("create", moments_only, create_ledger, inspect_new_ledger, problems_of_ledger)


# Exports


def exporting(
    name: str, save: Callable[[Editor, Path], object], read: Callable[[Path], str], *, old: bool
) -> Operation:
    """Return an export of a ledger with edits; if `old`, over an earlier export with one edit fewer."""

    def prepare(home: Path) -> None:
        with_edits(home)
        if old:
            save(editor_in(home), home / EXPORT)
            editor_in(home).redo("e0003")
            editors.rewrite(editor_in(home), editors.FACTS[2], method="dense")

    def run(home: Path, acknowledge: Acknowledge) -> None:
        save(editor_in(home), home / EXPORT)
        acknowledge(name)

    def inspect(home: Path) -> str:
        in_home(home)
        return read(home / EXPORT) if (home / EXPORT).exists() else UNFINISHED

    return Operation(name, prepare, run, inspect, problems_of_ledger)


def read_checkpoint(folder: Path) -> str:
    model = LanguageModel.load(folder)
    with attach(model.model, folder / "memory", check=False):
        logits = model.next_token_log_probs(PROMPTS)
    return digest_of([tiny.weights(model.model), logits.numpy().tobytes(), _names(folder)])


def read_adapter(folder: Path) -> str:
    return digest_of([_digest_of_changes(read_peft(folder)), _names(folder)])


def read_memory(folder: Path) -> str:
    model = tiny.llama()
    with attach(model, folder):
        logits = LanguageModel(model, tiny.tokenizer()).next_token_log_probs(PROMPTS)
    return digest_of([logits.numpy().tobytes(), _names(folder)])


def read_delta(folder: Path) -> str:
    return _digest_of_changes(load_delta(folder))


def _digest_of_changes(changes: dict[str, LowRank]) -> str:
    return digest_of_tensors({site: change.dense() for site, change in changes.items()})


def _names(folder: Path) -> list[str]:
    names = (file.relative_to(folder).as_posix() for file in folder.rglob("*"))
    return sorted(name for name in names if name != MANIFEST)


# Caches, memories and runs


def collect_moments(home: Path, acknowledge: Acknowledge) -> None:
    in_home(home)
    model = LanguageModel(tiny.llama(), tiny.tokenizer())
    moments = Moments(model, tiny.texts(), 1500, checkpoint_seconds=0.0)
    moments.collect([site.name for site in model.sites])
    acknowledge("moments")


def inspect_moments(home: Path) -> str:
    """Return what a reader gets, which must not depend on what is in the cache."""
    in_home(home)
    model = LanguageModel(tiny.llama(), tiny.tokenizer())
    moments = Moments(model, tiny.texts(), 1500).collect([site.name for site in model.sites])
    return digest_of_tensors({name: moment.total / moment.tokens for name, moment in moments.items()})


def save_layers(home: Path, acknowledge: Acknowledge) -> None:
    in_home(home)
    candidate = Candidate((3, 4), "by depth", 0.1, 0.9, None, 0.8, 0.1, 0.7)
    choice = LayerChoice("tiny", FINGERPRINT, (3, 4), (candidate,), (0.1, 0.2), known=3, facts=4)
    save_measured_layers(FINGERPRINT, [3, 4], choice.to_json())
    acknowledge("layers")


def inspect_layers(home: Path) -> str:
    in_home(home)
    return repr(measured_layers(FINGERPRINT))


def save_memory(home: Path, acknowledge: Acknowledge, seed: int = 1) -> None:
    memory = Memory(6, 4)
    draw = torch.Generator().manual_seed(seed)
    memory.bind(torch.randn(3, 6, generator=draw), torch.randn(3, 4, generator=draw))
    memory.save(home / "memory.safetensors")
    acknowledge("memory")


def inspect_memory(home: Path) -> str:
    return digest_of_tensors({"weights": Memory.load(home / "memory.safetensors").weights})


def evaluate(home: Path, acknowledge: Acknowledge) -> None:
    in_home(home)
    evaluations.run(home / RUN, "sequential", raw=evaluations.RAW[1:3])
    acknowledge("evaluation")


def inspect_evaluation(home: Path) -> str:
    if read_json_object(home / RUN / "summary.json") is None or not (home / RUN / "table.md").exists():
        return UNFINISHED
    contents = evaluations.contents(home / RUN)
    config = read_json_object(home / RUN / "config.json")
    return digest_of([config, *sorted(item for item in contents.items() if item[0] != "config.json")])


def train_model(home: Path, acknowledge: Acknowledge) -> None:
    in_home(home)
    source = str(Path(os.environ["REBIND_FAULTS"]) / "corpus.txt")
    run = training_runs.config(source, steps=6, save_every=2, evaluate_every=3)
    train(run, home / RUN, cache=home / CACHE / "tokens")
    acknowledge("training")


def inspect_training(home: Path) -> str:
    if read_json_object(home / RUN / "result.json") is None:
        return UNFINISHED
    return digest_of(sorted(training_runs.outcome(home / RUN).items()))


@dataclass(frozen=True)
class Plain(Norms):
    """The experiment of the tests, without its figure, which takes seconds."""

    def figure(self, rows: Any) -> Any:
        raise ValueError("no figure")


def run_lab(home: Path, acknowledge: Acknowledge) -> None:
    in_home(home)
    run_experiment(Plain(), home / RUN)
    acknowledge("experiment")


def inspect_lab(home: Path) -> str:
    files = [home / RUN / name for name in ("points.jsonl", "table.md")]
    if not files[1].exists():
        return UNFINISHED
    return digest_of([read_json_object(home / RUN / "config.json"), *(file.read_bytes() for file in files)])


def nothing(home: Path) -> None:
    """Begin with an empty home."""


def all_operations() -> dict[str, Operation]:
    """Return every operation by its name."""
    rewrite, facts = editors.rewrite, editors.FACTS
    save = lambda editor, folder: editor.save(folder, overwrite=True)
    peft = lambda editor, folder: editor.export_peft(folder, overwrite=True)
    memory = lambda editor, folder: editor.save_memory(folder, overwrite=True)
    delta = lambda editor, folder: editor.save_delta(folder, overwrite=True)
    operations = [
        CREATE,
        editing("edit", lambda editor: rewrite(editor, facts[2])),
        editing("edit-dense", lambda editor: rewrite(editor, facts[2], method="dense")),
        editing("edit-recursive", lambda editor: rewrite(editor, facts[2], method="recursive")),
        editing("undo", lambda editor: editor.undo("e0001")),
        editing("redo", lambda editor: editor.redo("e0003")),
        editing("undo-two", lambda editor: editor.ledger.switch(["e0001", "e0002"], on=False)),
        editing("consolidate", lambda editor: editor.consolidate(targets=editors.QUICK)),
        Operation("undo-snapshots", with_edits, undo_with_snapshots, inspect_ledger, problems_of_ledger),
        Operation("compact", with_edits, compact, inspect_ledger, problems_after_a_writer),
        exporting("checkpoint", save, read_checkpoint, old=False),
        exporting("checkpoint-again", save, read_checkpoint, old=True),
        exporting("adapter", peft, read_adapter, old=False),
        exporting("adapter-again", peft, read_adapter, old=True),
        exporting("memory", memory, read_memory, old=False),
        exporting("memory-again", memory, read_memory, old=True),
        exporting("delta-again", delta, read_delta, old=True),
        Operation("moments", nothing, collect_moments, inspect_moments),
        Operation("layers", nothing, save_layers, inspect_layers),
        Operation("matrix", lambda home: save_memory(home, print, seed=0), save_memory, inspect_memory),
        Operation("evaluation", nothing, evaluate, inspect_evaluation, is_run=True),
        Operation("training", nothing, train_model, inspect_training, is_run=True),
        Operation("experiment", nothing, run_lab, inspect_lab),
    ]
    return {operation.name: operation for operation in operations}
