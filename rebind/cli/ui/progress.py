"""Progress on standard error: bars on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rebind.cli.ui.terminal import Terminal

if TYPE_CHECKING:
    from rebind.edit.progress import Progress as EditProgress

DESCRIPTIONS = {
    "loading": "loading the model",
    "contexts": "sampling contexts",
    "moments": "collecting old keys",
    "targets": "searching targets",
    "solve": "solving",
    "asking": "asking the model",
}


class Phases(Progress):
    """The phases of a command, with one progress bar each; `seconds` has the duration of each phase.

    If standard error is not a terminal, a line is written at most every `log_every` seconds.
    """

    def __init__(self, terminal: Terminal, log_every: float = 30.0) -> None:
        super().__init__(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=terminal.err,
            disable=not (terminal.verbose and terminal.err.is_terminal),
            speed_estimate_period=120,
        )
        self.seconds: dict[str, float] = {}
        self.steps: int | None = None  # maximum number of steps of the target search
        self.facts = 0
        self._terminal, self._log_every, self._last_line = terminal, log_every, self.get_time()
        self._phase, self._task, self._start = "", TaskID(0), 0.0

    def begin(self, phase: str) -> None:
        """Begin a phase, unless it is the current one."""
        if phase != self._phase:
            self._finish()
            self._phase, self._start = phase, time.perf_counter()
            self._task = self.add_task(DESCRIPTIONS.get(phase, phase), total=None, note="")

    def count(self, phase: str, done: int, total: int | None, note: str = "") -> None:
        """Report the progress of a phase; the first report begins it."""
        self.begin(phase)
        self.update(self._task, completed=done, total=total, note=note)
        if self._terminal.verbose and not self.console.is_terminal:
            task = self._tasks[self._task]
            if self.get_time() - self._last_line >= self._log_every:
                self._last_line = self.get_time()
                state = [f"{done:,} of {total:,}" if total else "", note, f"{task.elapsed or 0.0:,.0f} s"]
                self._terminal.report(task.description, ", ".join(filter(None, state)), style="")

    def note(self, phase: str, note: str) -> None:
        """Show a note beside a phase."""
        self.begin(phase)
        self.update(self._task, note=note)

    def for_editor(self) -> EditProgress:
        """Return the callbacks for an `Editor`."""
        from rebind.edit.progress import Progress as EditProgress

        def moments(done: int, total: int) -> None:
            self.count("moments", done, total, f"{done:,} of {total:,} tokens")

        def targets(step: int, finished: int, loss: float) -> None:
            total = f" of {self.facts}" if self.facts else ""
            self.count("targets", step + 1, self.steps, f"{finished}{total} facts, mean loss {loss:.2f}")

        return EditProgress(phase=self.begin, moments=moments, targets=targets)

    def __exit__(self, *details: Any) -> None:
        self._finish()
        super().__exit__(*details)

    def _finish(self) -> None:
        if self._phase:
            duration = time.perf_counter() - self._start
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + duration
            total = self._tasks[self._task].total or 1
            self.update(self._task, completed=total, total=total)  # a search may end before its last step
            self._phase = ""
