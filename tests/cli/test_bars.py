"""Progress: drawn on a terminal, told in lines elsewhere, and neither where a program reads."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rebind.cli.ui import progress as bars
from rebind.cli.ui.progress import Bars, Drawn
from rebind.cli.ui.terminal import Screen


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def screen(clock: Clock, *, terminal: bool = False, as_json: bool = False) -> Screen:
    err = Console(file=io.StringIO(), force_terminal=terminal, width=120, markup=False, get_time=clock)
    return Screen(Console(file=io.StringIO()), err, as_json, quiet=False, debug=False)


def said(shown: Screen) -> list[str]:
    return shown.err.file.getvalue().splitlines()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(bars, "EVERY", 30.0)
    return Clock()


def told(shown: Screen, clock: Clock) -> None:
    drawn = Drawn(shown, "note")
    with drawn:
        task = drawn.add_task("finding targets", total=None, note="")
        for step in range(1, 8):
            clock.now += 10
            drawn.update(task, completed=step, total=25, note=f"{step} of 90 facts")


def test_a_log_gets_a_line_now_and_then(clock):
    shown = screen(clock)
    told(shown, clock)
    assert said(shown) == [
        "finding targets: 3 of 25, 3 of 90 facts, 30 s",
        "finding targets: 6 of 25, 6 of 90 facts, 60 s",
    ]


def test_what_has_no_end_and_no_note_is_told_too(clock):
    shown = screen(clock)
    drawn = Drawn(shown, "note")
    with drawn:
        task = drawn.add_task("loading the model", total=None, note="")
        clock.now += 31
        drawn.update(task, note="")
    assert said(shown) == ["loading the model: 31 s"]


def test_a_terminal_gets_the_bar_and_a_program_nothing(clock):
    drawn, silent = screen(clock, terminal=True), screen(clock, as_json=True)
    told(drawn, clock)
    assert "━" in drawn.err.file.getvalue()
    assert not any(line.startswith("finding targets: ") for line in said(drawn))
    told(silent, clock)
    assert said(silent) == []


def test_an_editors_phases_are_told(clock):
    shown = screen(clock)
    made = Bars(shown)
    made.steps, made.facts = 25, 90
    with made.drawn():
        made.phase("targets")
        clock.now += 40
        made.targets(4, 12, 1.5)
    assert said(shown) == ["finding targets: 5 of 25, 12 of 90 facts, mean loss 1.50, 40 s"]


def test_a_log_that_cannot_be_written_ends_nothing(clock):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    shown = Screen(Console(), Console(file=Full(), markup=False, get_time=clock), json=False, quiet=False, debug=False)
    told(shown, clock)
