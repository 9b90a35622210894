"""`Studio`: the model behind the page, the queue of all work on it, and the folder for exports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rebind.errors import InputError
from rebind.studio.jobs import Job, JobControl, JobQueue, Work

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

OpenEditor: TypeAlias = "Callable[[str], Editor]"  # from the name of a model to an editor with its ledger

STAGES = {
    "contexts": "sampling contexts",
    "moments": "collecting old keys",
    "targets": "searching the target",
    "solve": "solving for the weights",
    "writing": "writing the edit",
    "checks": "asking the edited model",
}


class Studio:
    """One model with its ledger, and everything that may be done to it.

    Routes never touch the model themselves: they `submit` a function, which runs alone, on the ledger as it is at that
    moment, including what other processes wrote.

    Args:
        open_editor: loads a model by name and opens its ledger.
        model: the name of the model to begin with; it is loaded by the first job.
        export_folder: exports are written into new folders in here and nowhere else.
        models: names that the page offers.
    """

    def __init__(self, open_editor: OpenEditor, *, model: str, export_folder: Path, models: Sequence[str] = ()) -> None:
        self.jobs = JobQueue()
        self.model_name = model
        self.models = tuple(dict.fromkeys([model, *models]))
        self.export_folder = export_folder
        self._open_editor = open_editor
        self._editor: Editor | None = None
        self._load_problem: dict[str, Any] | None = None
        self.ready = threading.Event()  # set once a model is loaded

    @property
    def editor(self) -> Editor:
        """The editor of the loaded model. Use it only inside a job."""
        if self._editor is None:
            raise InputError("No model is loaded", advice="Choose a model at the top of the page", code="no_model")
        return self._editor

    @property
    def loaded(self) -> bool:
        return self._editor is not None

    def submit(self, name: str, function: Work) -> Job:
        """Run a function in the worker thread, on the model as the ledger has it now; it returns JSON.

        The editor's own progress becomes stages of the job, and each of them is a point at which it can be cancelled.
        """

        def work(control: JobControl) -> Any:
            if self._editor is None:
                return function(control)
            from rebind.edit.progress import Progress

            before, self._editor.progress = self._editor.progress, _as_progress(control)
            try:
                self._editor.refresh()
                return function(control)
            finally:
                if self._editor is not None:
                    self._editor.progress = before or Progress()

        return self.jobs.submit(name, work)

    def load(self, model: str) -> Job:
        """Load another model; if that fails, the present one stays."""

        def work(control: JobControl) -> dict[str, str]:
            control.stage(f"loading {model}")
            editor = self._open_editor(model)
            control.raise_if_cancelled()
            self._editor, self.model_name = editor, model
            self.ready.set()
            return {"model": model}

        return self.jobs.submit("load", work)

    def close(self) -> None:
        """End the worker; the ledger is on disk already."""
        self.jobs.close()


def _as_progress(control: JobControl) -> Any:
    """Return what an `Editor` reports its progress to."""
    from rebind.edit.progress import Progress

    def moments(done: int, total: int) -> None:
        control.stage(STAGES["moments"], done / total if total else None)

    def targets(step: int, done: int, loss: float) -> None:
        control.stage(STAGES["targets"], None)

    return Progress(phase=lambda name: control.stage(STAGES.get(name, name)), moments=moments, targets=targets)
