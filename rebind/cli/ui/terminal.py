"""What a verb says and how it ends: tables for people, one document for programs, one line for an error."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console, RenderableType

from rebind.errors import InputError, RebindError, StorageError

BAD_INPUT, FAILED, UNEXPECTED, STOPPED, UNREAD = 2, 3, 1, 130, 141

OPTIONS = (  # what the library's messages call an argument, and a command line an option
    (r"pass overwrite=True", "give --overwrite"),
    (r"\(force=True, --force\)", "(--force)"),
    (r"editor\.undo\('\w+'\) or ", ""),
    (r" \(from Python, or pass tokenizer=\)", ""),
    (r"(?s)\A(prompt .*), or name it as subject\Z", r"\1, or name it with --subject"),  # not of a file's record
    (r"leave chat out", "leave out --chat"),
)
BARE = re.compile(r"rebind ledger undo e\d+\b(?! -)")  # as the library has it, which knows no options


@dataclass(frozen=True)
class Screen:
    """Results go to `out`, everything else (progress, warnings, errors) to `err`."""

    out: Console
    err: Console
    json: bool
    quiet: bool
    debug: bool
    place: str = ""  # the options that say which model and which ledger, as they were given
    skips: bool = False  # whether the verb takes --skip-bad
    kept: dict[str, str] = field(default_factory=dict)  # edits that stay whatever happens now, and what to do with them

    @property
    def for_people(self) -> bool:
        return not (self.json or self.quiet)

    def show(self, *lines: RenderableType, style: str | None = None) -> None:
        """Something for a person to read; nothing with --json or --quiet."""
        if self.for_people:
            for line in lines:
                with output_named():
                    self.out.print(line, style=style)

    def hint(self, text: str) -> None:
        self.show(text, style="dim")

    def command(self, *words: str, more: str = "") -> str:
        """A command that can be pasted: about this one's model and ledger; `more` are further options."""
        verb, *rest = words
        if any(word.startswith("-") for word in rest):  # and no option
            return f"rebind {verb}{self.place}{more} -- {shlex.join(rest)}"
        return f"rebind {shlex.join(words)}{self.place}{more}"

    def suggest(self, label: str, command: str) -> None:
        """A command on a line of its own, however long: one that is broken cannot be pasted."""
        if self.for_people:
            with output_named():
                self.out.print(f"{label}: {command}", style="dim", soft_wrap=True)

    def result(self, document: dict[str, Any], brief: str = "") -> None:
        """The document with --json; with --quiet the one thing a script would want of it."""
        with output_named():
            if self.json:
                self.out.file.write(strict_json(document))
            elif self.quiet and brief:
                self.out.file.write(brief + "\n")
            self.out.file.flush()  # what cannot be written is told here, not by the interpreter's end

    def keep(self, edit: str, ledger: Path | None) -> None:
        """From here on an edit is in the ledger: whatever ends the command must say so.

        The ledger is given where it was not named: its model's name may not tell it apart from another.
        """
        undo = self.command("ledger", "undo", edit) + (f" -l {shlex.quote(str(ledger))}" if ledger else "")
        self.kept[edit] = f"edit {edit} is in the ledger, do not run the command again; to take it back: {undo}"

    def complain(self, kind: str, text: str) -> None:
        self.tell(f"{kind}: {' '.join(text.split())}", style="bold red" if kind == "error" else "yellow")

    def tell(self, text: str, style: str | None = None) -> None:
        """Something on the error stream. Where that cannot be written, the exit code must do."""
        try:
            self.err.print(text, style=style, soft_wrap=True)
        except OSError:
            drop_output(sys.stderr)


@contextmanager
def screen(as_json: bool, quiet: bool, debug: bool, place: str = "", *, skips: bool = False) -> Iterator[Screen]:
    """A screen to work before. Whatever is raised inside becomes one line and an exit code.

    `place` is what commands that are suggested must end with to be about the same model and ledger; `skips` says that
    the verb takes --skip-bad.
    """
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="replace")  # a terminal without a letter is no reason to fail
    shown = Screen(
        Console(file=sys.stdout, markup=False, highlight=False, emoji=False),
        Console(file=sys.stderr, markup=False, highlight=False, emoji=False),
        as_json,
        quiet,
        debug,
        place,
        skips,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _teller(shown)
        try:
            yield shown
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            _stop(shown)
        except (Exception, SystemExit) as problem:
            if is_unread(problem):
                _tell_kept(shown)
                raise typer.Exit(UNREAD) from None
            if isinstance(problem, SystemExit):
                _tell_kept(shown)
                raise
            if not isinstance(problem, (RebindError, OSError)) and from_interrupt(problem):
                _stop(shown)
            _end(shown, "; ".join([_described(problem, shown), *shown.kept.values()]), exit_code(problem))


@contextmanager
def output_named() -> Iterator[None]:
    """Say that it is the output that cannot be written: a bare `No space left on device` names nothing."""
    try:
        yield
    except OSError as problem:
        drop_output()
        if is_unread(problem):
            raise
        raise StorageError(
            f"the output cannot be written ({problem.strerror or problem}), expected a terminal, a pipe or a file with "
            f"room: free some space, or send it elsewhere"
        ) from problem


def is_unread(problem: BaseException) -> bool:
    """Whether the reader of a pipe went away, as `head` does when it has enough."""
    if isinstance(problem, SystemExit):
        return isinstance(problem.__context__, BrokenPipeError)  # rich ends so
    return isinstance(problem, OSError) and problem.errno == errno.EPIPE


def drop_output(stream: TextIO | None = None) -> None:
    """Send what is still to be written nowhere: else the interpreter fails with it at its end."""
    with suppress(OSError, ValueError):  # a stream without a handle keeps its words
        handle, nowhere = (stream or sys.stdout).fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        os.close(nowhere)


def exit_code(problem: BaseException) -> int:
    if isinstance(problem, InputError):
        return BAD_INPUT
    if isinstance(problem, (RebindError, OSError)) or _out_of_memory(problem):
        return FAILED
    return UNEXPECTED


def from_interrupt(problem: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: some libraries make another error of it while they are imported."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = problem.__cause__ or problem.__context__
    return problem is not None


def _stop(shown: Screen) -> None:
    again = "nothing was left half done, run the same command again to go on"
    _end(shown, f"stopped: {'; '.join(shown.kept.values()) or again}", STOPPED)


def _end(shown: Screen, text: str, code: int) -> None:
    if shown.debug:
        shown.tell(traceback.format_exc())
    if code == STOPPED:
        shown.tell(text, style="yellow")
    else:
        shown.complain("error", text)
    kept = {"edits": list(shown.kept)} if shown.kept else {}
    with suppress(OSError):  # if this is what failed, the line above says so
        shown.result({"error": " ".join(text.split()), "code": code, **kept})
    raise typer.Exit(code) from None


def _tell_kept(shown: Screen) -> None:
    for text in shown.kept.values():
        shown.complain("warning", text)


def counted(number: int, name: str) -> str:
    """So many of something.

    >>> counted(1, "edit"), counted(2, "edit")
    ('1 edit', '2 edits')
    """
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


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


def _described(problem: Exception, shown: Screen) -> str:
    if isinstance(problem, RebindError):
        return _as_typed(str(problem), shown) + (_about_cache(problem) if isinstance(problem, StorageError) else "")
    if _out_of_memory(problem):
        return "out of memory: ask for less at once (fewer facts, a smaller batch, model or dtype), or another --device"
    if isinstance(problem, OSError):
        where = problem.filename or "a file"
        return f"cannot use {where} ({problem.strerror or problem}): check that it is there and that you may write it"
    return f"unexpected {type(problem).__name__}: {problem} (run again with --debug and report what it shows)"


def _about_cache(problem: StorageError) -> str:
    """How to have the cache elsewhere, if that is what could not be written."""
    from rebind.edit.cache import cache_folder

    told = str(problem)
    return " (REBIND_CACHE names it)" if str(cache_folder()) in told and "REBIND_CACHE" not in told else ""


def _as_typed(text: str, shown: Screen) -> str:
    """A message of the library in the words of the command line."""
    text = text.replace("skip bad records", "give --skip-bad" if shown.skips else "leave the record out")
    for argument, option in OPTIONS:
        text = re.sub(argument, option, text)
    return BARE.sub(lambda found: found[0] + shown.place, text)


def _out_of_memory(problem: BaseException) -> bool:
    return isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"


def _teller(shown: Screen) -> Any:
    """Our own warnings as one line each; other libraries' are for --debug."""

    def tell(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if category.__module__.startswith("rebind") or shown.debug:
            shown.complain("warning", _as_typed(str(message), shown))

    return tell
