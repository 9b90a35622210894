"""Where a command writes: results on standard output; progress, warnings and errors on standard error."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.control import Control
from rich.segment import Segment

from rebind.errors import as_argument
from rebind.storage import write_file

# Settings that a command has another name for; --keep has the prompts to keep, and `keep` is their weight.
PARAMETERS = {
    "paraphrases": "paraphrase",
    "neighbors": "neighbor",
    "questions": "question",
    "keep": "keep_weight",
}


CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]"
)  # also those that reorder text

LONG_WORD = re.compile(r"\S{1000,}")  # not even a path is that long


def visible(text: str) -> str:
    """Return a text with control characters spelled out: facts and files of others must not steer the terminal.

    >>> visible("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _shortened(word: re.Match[str]) -> str:
    return f"{word[0][:100]}…{word[0][-40:]}"


class _Visible:
    """Something to print, with every control character in its text spelled out."""

    def __init__(self, content: RenderableType) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.content, options):
            yield Segment(text if control else visible(text), style, control)


class _VisibleText(RenderHook):
    """Makes everything that a console prints visible."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Return what is printed instead."""
        return [one if isinstance(one, Control) else _Visible(one) for one in renderables]


class Terminal:
    """Tables and hints for people; one JSON document with --json; only the bare result with --quiet."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, debug: bool = False, writes: bool = True) -> None:
        for stream in (sys.stdout, sys.stderr):
            if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
                reconfigure(errors="replace")  # a character that the terminal cannot show is no reason to fail
        self.out, self.err = (
            Console(file=stream, markup=False, highlight=False, emoji=False) for stream in (sys.stdout, sys.stderr)
        )
        for console in (self.out, self.err):
            console.push_render_hook(_VisibleText())
        self.as_json, self.quiet, self.debug = as_json, quiet, debug
        self.writes = writes  # of several processes, one does
        self.options: Mapping[str, str] = {}  # of the command that runs: parameter name → how its option is typed
        self.written_edits: dict[str, str] = {}  # edits that stay however the command ends → the command that undoes it

    @property
    def verbose(self) -> bool:
        """Whether a person reads the output."""
        return self.writes and not (self.as_json or self.quiet)

    def print(self, *parts: RenderableType, style: str | None = None) -> None:
        """Print something for people to read; print nothing with --json or --quiet."""
        if self.verbose:
            for part in parts:
                self.out.print(part, style=style)

    def hint(self, text: str) -> None:
        """Print a line of lesser importance."""
        self.print(text, style="dim")

    def suggest(self, label: str, command: str) -> None:
        """Print a command to paste; it stays on one line, however long it is."""
        if self.verbose:
            self.out.print(f"{label}: {command}", style="dim", soft_wrap=True)

    def result(self, document: Mapping[str, Any], brief: str = "") -> None:
        """Print the document with --json; with --quiet print the one thing that a script needs."""
        if not self.writes:
            return
        if self.as_json:
            self.out.file.write(strict_json(document))
        elif self.quiet and brief:
            self.out.file.write((visible(brief) if self.out.is_terminal else brief) + "\n")
        self.out.file.flush()  # so that a full disk is reported here and not by the interpreter at its exit

    def save(self, document: Mapping[str, Any], path: Path, figures: Sequence[Path] = ()) -> list[str]:
        """Write a document beside its figures, print the paths of all files, and return them."""
        write_file(path, strict_json(document).encode())
        files = [str(file) for file in (*figures, path)]
        self.hint(f"wrote {', '.join(files)}")
        return files

    def report(self, kind: str, text: str, style: str = "yellow") -> None:
        """Print one line on standard error: an error, a warning, a skipped record."""
        if not self.writes:
            return
        with suppress(OSError):  # if standard error cannot be written, the exit code must do
            self.err.print(f"{kind}: {LONG_WORD.sub(_shortened, ' '.join(text.split()))}", style=style, soft_wrap=True)

    def as_option(self, name: str, value: object) -> str:
        """Spell a setting as an option of the command that runs, or as a Python argument if it has no such option."""
        option = self.options.get(PARAMETERS.get(name, name))
        if option is None:
            return as_argument(name, value) + ("" if value is None else " (in Python)")
        if value is None or value is True:
            return option
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return f"{option} {shlex.quote(text)}"

    @contextmanager
    def warnings_shown(self) -> Iterator[None]:
        """Show rebind's own warnings as one line each, and those of other libraries only with --debug."""

        def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            if category.__module__.startswith("rebind") or self.debug:
                self.report("warning", str(message))

        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = show
            yield


def strict_json(document: Mapping[str, Any]) -> str:
    """Return the document as JSON that every parser reads: null in place of NaN and infinity."""
    return json.dumps(_finite(document), indent=1, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def discard_output(stream: TextIO) -> None:
    """Discard what a stream has buffered; otherwise the interpreter fails when it flushes the stream at its exit."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor has no such problem
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
