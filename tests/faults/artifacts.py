"""What is tampered with: stored things, and what a reader makes of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebind.analysis import saved_layer_choice
from rebind.cli.app import app  # noqa: F401 - imported before the fork, for the readers
from rebind.edit.ledger import verify_folder
from rebind.evals.summary import compare
from rebind.lab import run_experiment
from rebind.models.language_model import LanguageModel
from rebind.nn.training import TrainingProgress, train
from tests import tiny
from tests.edit import editors
from tests.evals import runs as evaluations
from tests.faults import operations as ops
from tests.faults.operations import CACHE, EXPORT, LEDGER, RUN
from tests.nn import training_runs


class StopEarlyError(BaseException):
    """Ends a run in the middle, as a kill would."""


@dataclass(frozen=True)
class Artifact:
    """Something stored."""

    name: str
    build: Callable[[Path], object]
    read: Callable[[Path], str]  # a digest of what a reader gets; what was damaged must be refused or made anew
    under: tuple[str, ...]  # the folders of the home that are tampered with
    reported: Callable[[Path], list[str]] = lambda home: []  # what a check of the stored files finds
    is_model: bool = False  # whether it is a model folder: any weights are some model, and the Hub's cache has links


def read_ledger(home: Path) -> str:
    """Open a ledger with its model, look at every edit, and undo and redo one, as a user would."""
    editor = ops.editor_in(home)
    state = ops.state_of(editor)
    for edit in editor.ledger.edits:
        edit.to_json()
    editor.undo("e0001")
    editor.redo("e0001")
    return ops.digest_of([state, ops.state_of(editor)])


def with_snapshots(home: Path) -> None:
    ops.with_edits(home)
    ops.undo_with_snapshots(home, print)
    ops.editor_in(home).redo("e0001")


def compacted(home: Path) -> None:
    ops.with_edits(home)
    ops.compact(home, print)


def read_compacted(home: Path) -> str:
    editor = ops.editor_in(home)
    return ops.digest_of([ops.state_of(editor), *(edit.to_json() for edit in editor.ledger.edits)])


def edit_interrupted(home: Path) -> None:
    """Leave the targets of an edit that did not come to its end."""
    editor = ops.editor_in(home)

    def stop(name: str) -> None:
        if name == "writing":
            raise StopEarlyError

    editor.progress = type(editor.progress)(phase=stop)
    try:
        editors.rewrite(editor, editors.FACTS[0])
    except StopEarlyError:
        return
    raise AssertionError("the edit came to its end")


def finish_edit(home: Path) -> str:
    editor = ops.editor_in(home)
    editors.rewrite(editor, editors.FACTS[0])
    return ops.state_of(editor)


def exported(save: Callable[[Any, Path], object]) -> Callable[[Path], None]:
    def build(home: Path) -> None:
        ops.with_edits(home)
        save(ops.editor_in(home), home / EXPORT)

    return build


def reading(read: Callable[[Path], str]) -> Callable[[Path], str]:
    def look(home: Path) -> str:
        ops.in_home(home)
        return read(home / EXPORT)

    return look


def save_model(home: Path) -> None:
    (home / EXPORT).mkdir()
    tiny.llama().save_pretrained(home / EXPORT)
    tiny.tokenizer().save_pretrained(home / EXPORT)


def load_model(home: Path) -> str:
    ops.in_home(home)
    model = LanguageModel.load(home / EXPORT)
    model.generate(["The capital of France is"], 2)
    return "loaded"


def _training(home: Path) -> Any:
    ops.in_home(home)
    source = str(Path(os.environ["REBIND_FAULTS"]) / "corpus.txt")
    return training_runs.config(source, steps=6, save_every=2, evaluate_every=3)


def train_half(home: Path) -> None:
    def stop(update: Any) -> None:
        if update.step == 5:
            raise StopEarlyError

    try:
        train(_training(home), home / RUN, cache=home / CACHE / "tokens", progress=TrainingProgress(step=stop))
    except StopEarlyError:
        return
    raise AssertionError("the run came to its end")


def train_on(home: Path) -> str:
    result = train(_training(home), home / RUN, cache=home / CACHE / "tokens")
    return ops.digest_of([ops.inspect_training(home), result.summary])


def train_whole(home: Path) -> None:
    train(_training(home), home / RUN, cache=home / CACHE / "tokens")


def read_training(home: Path) -> str:
    """Run a finished training again, which only reads."""
    return ops.digest_of([train(_training(home), home / RUN, cache=home / CACHE / "tokens").summary])


def evaluate_half(home: Path) -> None:
    ops.in_home(home)

    def stop(*_: Any) -> None:
        raise StopEarlyError

    try:
        evaluations.run(home / RUN, "sequential", raw=evaluations.RAW[1:3], on_unit=stop)
    except StopEarlyError:
        return
    raise AssertionError("the run came to its end")


def evaluate_on(home: Path) -> str:
    ops.evaluate(home, print)
    return ops.inspect_evaluation(home)


def read_comparison(home: Path) -> str:
    return compare([home / RUN, home / "other"]).markdown


def evaluate_twice(home: Path) -> None:
    for name in (RUN, "other"):
        ops.in_home(home)
        evaluations.run(home / name, "sequential", raw=evaluations.RAW[1:2], steps=2 if name == RUN else 3)


def experiment_half(home: Path) -> None:
    def stop(done: int, total: int, point: Any) -> None:
        if done:
            raise StopEarlyError

    try:
        run_experiment(ops.Plain(), home / RUN, progress=stop)
    except StopEarlyError:
        return
    raise AssertionError("the run came to its end")


def experiment_on(home: Path) -> str:
    ops.run_lab(home, print)
    return ops.inspect_lab(home)


def export_again(home: Path) -> str:
    """Write an adapter over whatever is there, as `--overwrite` does."""
    ops.editor_in(home).export_peft(home / EXPORT, overwrite=True)
    return ops.read_adapter(home / EXPORT)


def all_artifacts() -> dict[str, Artifact]:
    """Return everything that is tampered with, by its name."""
    memory = exported(lambda editor, folder: editor.save_memory(folder))
    delta = exported(lambda editor, folder: editor.save_delta(folder))
    peft = exported(lambda editor, folder: editor.export_peft(folder))
    checkpoint = exported(lambda editor, folder: editor.save(folder))
    quiet: Callable[[str], None] = lambda text: None
    artifacts = [
        Artifact("ledger", ops.with_edits, read_ledger, (LEDGER,), lambda home: verify_folder(home / LEDGER)),
        Artifact("snapshots", with_snapshots, read_ledger, (f"{LEDGER}/snapshots",)),
        Artifact("compacted", compacted, read_compacted, (LEDGER,), lambda home: verify_folder(home / LEDGER)),
        Artifact("targets", edit_interrupted, finish_edit, (f"{LEDGER}/work",)),
        Artifact("memory", memory, reading(ops.read_memory), (EXPORT,)),
        Artifact("delta", delta, reading(ops.read_delta), (EXPORT,)),
        Artifact("matrix", lambda home: ops.save_memory(home, quiet), ops.inspect_memory, ("",)),
        Artifact("export", peft, export_again, (EXPORT,)),
        Artifact("checkpoint", checkpoint, reading(ops.read_checkpoint), (EXPORT,), is_model=True),
        Artifact("model", save_model, load_model, (EXPORT,), is_model=True),
        Artifact("moments", lambda home: ops.collect_moments(home, quiet), ops.inspect_moments, (CACHE,)),
        Artifact("layers", lambda home: ops.save_layers(home, quiet), inspect_layers, (CACHE,)),
        Artifact("tokens", train_half, train_on, (CACHE,)),
        Artifact("training", train_half, train_on, (RUN,)),
        Artifact("trained", train_whole, read_training, (RUN,)),
        Artifact("evaluation", evaluate_half, evaluate_on, (RUN,)),
        Artifact("comparison", evaluate_twice, read_comparison, (RUN,)),
        Artifact("experiment", experiment_half, experiment_on, (RUN,)),
    ]
    return {artifact.name: artifact for artifact in artifacts}


def inspect_layers(home: Path) -> str:
    """Layers that were measured are used or not, but no others are."""
    measured, choice = ops.inspect_layers(home), saved_layer_choice(ops.FINGERPRINT)
    is_right = measured in ("(3, 4)", "None") and (choice is None or choice.layers == (3, 4))
    return "used" if is_right else "other layers"
