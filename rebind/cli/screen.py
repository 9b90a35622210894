"""What a verb says and how it ends: tables for people, one document for programs, one line for an error."""

from __future__ import annotations

import errno
import json
import math
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType

from rebind.errors import InputError, RebindError

BAD_INPUT, FAILED, UNEXPECTED, STOPPED = 2, 3, 1, 130


@dataclass(frozen=True)
class Screen:
    """Results go to `out`, everything else (progress, warnings, errors) to `err`."""

    out: Console
    err: Console
    json: bool
    quiet: bool
    debug: bool
    kept: dict[str, str] = field(default_factory=dict)  # edits that stay whatever happens now, and what to do with them

    @property
    def for_people(self) -> bool:
        return not (self.json or self.quiet)

    def show(self, *lines: RenderableType, style: str | None = None) -> None:
        """Something for a person to read; nothing with --json or --quiet."""
        if self.for_people:
            for line in lines:
                self.out.print(line, style=style)

    def hint(self, text: str) -> None:
        self.show(text, style="dim")

    def result(self, document: dict[str, Any], brief: str = "") -> None:
        """The document with --json; with --quiet the one thing a script would want of it."""
        if self.json:
            self.out.file.write(strict_json(document))
        elif self.quiet and brief:
            self.out.file.write(brief + "\n")
        self.out.file.flush()  # what cannot be written is told here, not by the interpreter's end

    def keep(self, edit: str, ledger: Path | None) -> None:
        """From here on an edit is in the ledger: whatever ends the command must say so."""
        undo = f"rebind ledger undo {edit}" + (f" --ledger {shlex.quote(str(ledger))}" if ledger else "")
        self.kept[edit] = f"edit {edit} is in the ledger, do not run the command again; to take it back: {undo}"

    def complain(self, kind: str, text: str) -> None:
        style = "bold red" if kind == "error" else "yellow"
        self.err.print(f"{kind}: {' '.join(text.split())}", style=style, soft_wrap=True)


@contextmanager
def screen(as_json: bool, quiet: bool, debug: bool) -> Iterator[Screen]:
    """A screen to work before. Whatever is raised inside becomes one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="replace")  # a terminal without a letter is no reason to fail
    shown = Screen(
        Console(file=sys.stdout, markup=False, highlight=False, emoji=False),
        Console(file=sys.stderr, markup=False, highlight=False, emoji=False),
        as_json,
        quiet,
        debug,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _teller(shown)
        try:
            yield shown
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            again = "nothing was left half done, run the same command again to go on"
            _end(shown, f"stopped: {'; '.join(shown.kept.values()) or again}", STOPPED)
        except SystemExit:
            _tell_kept(shown)  # the reader of a pipe went away, and rich ends quietly
            raise
        except Exception as problem:
            if isinstance(problem, OSError) and problem.errno == errno.EPIPE:
                _tell_kept(shown)
                raise  # typer ends quietly
            _end(shown, "; ".join([_described(problem), *shown.kept.values()]), exit_code(problem))


def exit_code(problem: BaseException) -> int:
    if isinstance(problem, InputError):
        return BAD_INPUT
    if isinstance(problem, (RebindError, OSError)) or _out_of_memory(problem):
        return FAILED
    return UNEXPECTED


def _end(shown: Screen, text: str, code: int) -> None:
    if shown.debug:
        shown.err.print(traceback.format_exc(), soft_wrap=True)
    if code == STOPPED:
        shown.err.print(text, style="yellow", soft_wrap=True)
    else:
        shown.complain("error", text)
    kept = {"edits": list(shown.kept)} if shown.kept else {}
    with suppress(OSError):  # if this is what failed, the line above says so
        shown.result({"error": " ".join(text.split()), "code": code, **kept})
    raise typer.Exit(code) from None


def _tell_kept(shown: Screen) -> None:
    for text in shown.kept.values():
        shown.complain("warning", text)


def strict_json(document: dict[str, Any]) -> str:
    """The document as every JSON parser reads it."""
    return json.dumps(_finite(document), indent=1, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same with nothing where a number is NaN or infinite: JSON has no word for these."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _described(problem: Exception) -> str:
    if isinstance(problem, RebindError):
        return str(problem)
    if _out_of_memory(problem):
        return "out of memory: ask for less at once (fewer facts, a smaller batch, model or dtype), or another --device"
    if isinstance(problem, OSError):
        where = problem.filename or "a file"
        return f"cannot use {where} ({problem.strerror or problem}): check that it is there and that you may write it"
    return f"unexpected {type(problem).__name__}: {problem} (run again with --debug and report what it shows)"


def _out_of_memory(problem: BaseException) -> bool:
    return isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"


def _teller(shown: Screen) -> Any:
    """Our own warnings as one line each; other libraries' are for --debug."""

    def tell(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if category.__module__.startswith("rebind") or shown.debug:
            shown.complain("warning", str(message))

    return tell
