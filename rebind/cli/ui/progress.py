"""Progress on standard error: bars on a terminal; elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rebind.cli.ui.terminal import Terminal

if TYPE_CHECKING:
    from rebind.edit.progress import Progress as EditProgress

PHASES = {
    "loading": "loading the model",
    "contexts": "sampling contexts",
    "moments": "collecting old keys",
    "targets": "searching targets",
    "solve": "solving",
    "writing": "writing",
    "asking": "asking the model",
    "saving": "saving",
}


class ProgressBar(Progress):
    """A bar with notes behind it on a terminal; in a log file or a pipe a line every `log_every` seconds instead."""

    def __init__(self, terminal: Terminal, *notes: str, log_every: float = 30.0) -> None:
        super().__init__(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            *(TextColumn(f"{{task.fields[{note}]}}", markup=False) for note in notes),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=terminal.err,
            disable=not (terminal.verbose and terminal.err.is_terminal),
            speed_estimate_period=120,
        )
        self._terminal, self._log_every = terminal, log_every
        self._last_line = self.get_time()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task's state, and write a line about it if one is due."""
        super().update(task_id, **changes)
        is_log = self._terminal.verbose and not self._terminal.err.is_terminal
        if is_log and self.get_time() - self._last_line >= self._log_every:
            self._last_line = self.get_time()
            task = self._tasks[task_id]
            self._terminal.report(task.description, _state(task), style="")


def _state(task: Task) -> str:
    count = "" if task.total is None else f"{task.completed:,.0f} of {task.total:,.0f}"
    return ", ".join(filter(None, [count, *task.fields.values(), f"{task.elapsed or 0.0:,.0f} s"]))


class Phases:
    """The phases of a command, a bar for each; `seconds` has the time that each one took."""

    def __init__(self, terminal: Terminal) -> None:
        self.seconds: dict[str, float] = {}
        self.steps: int | None = None  # of the target search, at most
        self.facts = 0
        self._bar = ProgressBar(terminal, "note")
        self._task: TaskID | None = None
        self._phase = ""
        self._start = 0.0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bars inside; the last phase ends at the end."""
        with self._bar:
            try:
                yield
            finally:
                self._finish()

    def start(self, phase: str) -> None:
        """Begin a phase, unless it is the current one."""
        if phase != self._phase:
            self._finish()
            self._phase, self._start = phase, time.perf_counter()
            self._task = self._bar.add_task(PHASES.get(phase, phase), total=None, note="")

    def count(self, phase: str, done: int, total: int | None, note: str = "") -> None:
        """Report how much of a phase is done; the first report begins it."""
        self.start(phase)
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)

    def collect(self, done: int, total: int) -> None:
        """Report how many tokens old keys have been collected from."""
        self.count("moments", done, total, f"{done:,} of {total:,} tokens")

    def search(self, step: int, done: int, loss: float) -> None:
        """Report a step of the target search."""
        self.count("targets", step + 1, self.steps, f"{done} of {self.facts} facts, mean loss {loss:.2f}")

    def for_editor(self) -> EditProgress:
        """Return what an `Editor` reports its progress to."""
        from rebind.edit.progress import Progress as EditProgress

        return EditProgress(phase=self.start, moments=self.collect, targets=self.search)

    @property
    def total_seconds(self) -> float:
        """The time that all phases took."""
        return sum(self.seconds.values())

    def _finish(self) -> None:
        if self._task is not None:
            spent = time.perf_counter() - self._start
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent
            total = next(task.total for task in self._bar.tasks if task.id == self._task) or 1
            self._bar.update(self._task, completed=total, total=total)  # a search may end before its last step
            self._phase, self._task = "", None
