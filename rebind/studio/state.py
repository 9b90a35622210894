"""`Studio`: the model behind the page, the queue of all work on it, and the folder for exports."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from rebind.edit.editor import Editor
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.progress import Progress
from rebind.errors import InputError, RebindWarning
from rebind.studio.jobs import Job, JobControl, JobQueue, Work
from rebind.studio.replies import describe

OpenEditor: TypeAlias = Callable[[str], Editor]  # from the name of a model to an editor with its ledger

STAGES = {
    "contexts": "sampling contexts",
    "moments": "collecting old keys",
    "targets": "searching the target state",
    "solve": "solving for the weights",
    "writing": "writing the edit",
    "checks": "checking the edited model",
}


class Studio:
    """One model with its ledger, and everything that may be done to it.

    Routes never touch the model themselves: they `submit` a function, which runs alone, on the ledger as it is at that
    moment, including what other processes wrote.

    Args:
        open_editor: loads a model by name and opens its ledger.
        model: the name of the model to begin with; `load` loads it.
        export_folder: exports are written into new folders in here and nowhere else.
        models: names that the page offers.
    """

    def __init__(self, open_editor: OpenEditor, *, model: str, export_folder: Path, models: Sequence[str] = ()) -> None:
        self.jobs = JobQueue()
        self.model_name = model
        self.models = tuple(dict.fromkeys([model, *models]))
        self.export_folder = export_folder
        self.load_problem: dict[str, Any] | None = None  # why the last model could not be loaded
        self._open_editor = open_editor
        self._editor: Editor | None = None

    @property
    def editor(self) -> Editor:
        """The editor of the loaded model. Use it only inside a job."""
        if self._editor is None:
            advice = "Wait until it is loaded, or choose another one at the top of the page"
            raise InputError("No model is loaded", advice=advice, code="no_model")
        return self._editor

    @property
    def ledger(self) -> Ledger:
        """The ledger of the loaded model, which any thread may read."""
        return self.editor.ledger

    @property
    def ledger_digest(self) -> str:
        """A text that changes whenever an edit is written, undone or redone, by whomever."""
        edits, active = self.ledger.edits, self.ledger.active
        return f"{len(edits)}-{hash(tuple(edit.id for edit in active)):x}"

    @property
    def loaded(self) -> bool:
        """Whether there is a model to work on."""
        return self._editor is not None

    def submit(self, name: str, function: Work) -> Job:
        """Run a function in the worker thread, on the model as the ledger has it now; it returns JSON.

        The editor's own progress becomes stages of the job, and each of them is a point at which it can be cancelled.
        Warnings of rebind become notes of the job.
        """

        def work(control: JobControl) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("always", RebindWarning)
                warnings.showwarning = lambda message, *_: control.note(str(message))
                if self._editor is None:
                    return function(control)
                self._editor.progress = editor_progress(control)
                try:
                    self._editor.refresh()
                    return function(control)
                finally:
                    self._editor.progress = Progress()

        return self.jobs.submit(name, work)

    def load(self, model: str) -> Job:
        """Load another model; if that fails or is cancelled, the present one stays."""

        def work(control: JobControl) -> dict[str, str]:
            control.stage(f"loading {model}")
            try:
                editor = control.abandonable(lambda: self._open_editor(model))
            except Exception as problem:
                self.load_problem = describe(problem, "model")
                raise
            self._editor, self.model_name, self.load_problem = editor, model, None
            return {"model": model}

        return self.jobs.submit("load", work)

    def close(self) -> None:
        """End the worker; the ledger is on disk already."""
        self.jobs.close()


def editor_progress(control: JobControl, steps: int | None = None) -> Progress:
    """Return what an `Editor` reports its progress to; `steps` is the most that a target search takes."""

    def moments(done: int, total: int) -> None:
        control.stage(STAGES["moments"], done / total if total else None)

    def targets(step: int, done: int, loss: float) -> None:
        control.stage(STAGES["targets"], min(1.0, (step + 1) / steps) if steps else None)

    return Progress(phase=lambda name: control.stage(STAGES.get(name, name)), moments=moments, targets=targets)


@contextmanager
def all_or_nothing(editor: Editor, control: JobControl) -> Iterator[list[str]]:
    """Run a block that writes edits and lists their ids; whatever ends it early, those are undone.

    An edit that the editor has not finished is not in the ledger, and nothing is to be undone for it. After the block
    the job can no longer be cancelled.
    """
    written: list[str] = []
    try:
        yield written
        control.raise_if_cancelled()
    except BaseException:
        control.commit()  # undoing must not be cancelled in its turn
        for id in reversed(written):
            editor.undo(id)
        raise
    control.commit()
