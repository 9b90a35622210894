"""Progress on the error stream: bars on a terminal, and where there is none a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rebind.cli.ui.terminal import Screen

if TYPE_CHECKING:
    from rebind.edit.progress import Progress as Told

LABELS = {
    "unpacking": "unpacking the model (once)",
    "loading": "loading the model",
    "contexts": "sampling contexts",
    "moments": "reading old keys",
    "targets": "finding targets",
    "solve": "solving",
    "writing": "writing",
    "asking": "asking the model",
    "saving": "saving",
}


EVERY = 30.0  # seconds between two lines of a log


class Drawn(Progress):
    """A bar with notes behind it. A file or a pipe, which somebody may be reading too, gets lines instead."""

    def __init__(self, screen: Screen, *notes: str, counted: bool = False) -> None:
        super().__init__(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            *([MofNCompleteColumn()] if counted else []),
            *(TextColumn(f"{{task.fields[{note}]}}", markup=False) for note in notes),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=screen.err,
            disable=not (screen.for_people and screen.err.is_terminal),
            speed_estimate_period=120,
        )
        self._screen, self._logged = screen, screen.for_people and not screen.err.is_terminal
        self._said = self.get_time()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self._logged and self.get_time() - self._said >= EVERY:
            self._said = self.get_time()
            self._screen.tell(_line(self._tasks[task_id]))


def _line(task: Task) -> str:
    far = "" if task.total is None else f"{task.completed:,.0f} of {task.total:,.0f}"
    told = [far, *task.fields.values(), f"{task.elapsed or 0.0:,.0f} s"]
    return f"{task.description}: {', '.join(filter(None, told))}"


class Bars:
    """What an editor tells, a bar for each phase; `seconds` has each phase's time."""

    def __init__(self, screen: Screen) -> None:
        self.seconds: dict[str, float] = {}
        self.steps: int | None = None  # how many steps targets may take
        self.facts = 0
        self._progress = Drawn(screen, "note")
        self._task: TaskID | None = None
        self._phase: str | None = None
        self._begun = 0.0

    @contextmanager
    def drawn(self) -> Iterator[Bars]:
        """Bars while inside; the last phase ends with it."""
        with self._progress:
            try:
                yield self
            finally:
                self._finish()

    def phase(self, name: str) -> None:
        if name == self._phase:
            return
        self._finish()
        self._phase, self._begun = name, time.perf_counter()
        total = self.steps if name == "targets" else None
        self._task = self._progress.add_task(LABELS.get(name, name), total=total, note="")

    def moments(self, done: int, wanted: int) -> None:
        if self._phase != "moments":  # a ledger that is replayed may need them too
            self.phase("moments")
        self._update(done, wanted, f"{done:,} of {wanted:,} tokens")

    def targets(self, step: int, done: int, loss: float) -> None:
        self._update(step + 1, self.steps, f"{done} of {self.facts} facts, mean loss {loss:.2f}")

    def count(self, phase: str, done: int, wanted: int, note: str = "") -> None:
        """So much of a phase is done; it begins with the first of these."""
        self.phase(phase)
        self._update(done, wanted, note)

    def told(self) -> Told:
        """What an `Editor` wants to be given."""
        from rebind.edit.progress import Progress as Told

        return Told(phase=self.phase, moments=self.moments, targets=self.targets)

    def _update(self, done: int, total: int | None, note: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, note=note)

    def _finish(self) -> None:
        if self._phase is None or self._task is None:
            return
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + time.perf_counter() - self._begun
        task = next(task for task in self._progress.tasks if task.id == self._task)
        self._progress.update(self._task, completed=task.total or 1, total=task.total or 1)  # early stops are ends too
        self._phase = self._task = None
