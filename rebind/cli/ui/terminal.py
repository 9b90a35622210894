"""The output of a command: results on standard output; progress, warnings and errors on standard error."""

from __future__ import annotations

import json
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
from rebind.storage import without_nan, write_file

# Settings with another name on the command line. There, --keep has prompts, and the setting `keep` is their weight.
PARAMETERS = {
    "paraphrases": "paraphrase",
    "neighbors": "neighbor",
    "questions": "question",
    "targets.keep": "keep_weight",
}
# Control characters, including those that reorder text
CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")
LONG_WORD = re.compile(r"\S{1000,}")  # longer than any path


def visible(text: str) -> str:
    """Return a text with control characters spelled out, so that facts and files cannot control the terminal.

    >>> visible("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _shortened(word: re.Match[str]) -> str:
    return f"{word[0][:100]}…{word[0][-40:]}"


class _Visible:
    """A renderable whose control characters are spelled out."""

    def __init__(self, content: RenderableType) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.content, options):
            yield Segment(text if control else visible(text), style, control)


class _VisibleText(RenderHook):
    """A hook that spells out the control characters in everything a console prints."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Return the renderables to print."""
        return [part if isinstance(part, Control) else _Visible(part) for part in renderables]


class Terminal:
    """Tables and hints for people; one JSON document with --json; only the bare result with --quiet."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, debug: bool = False, writes: bool = True) -> None:
        for stream in (sys.stdout, sys.stderr):
            if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
                reconfigure(errors="replace")  # do not fail on characters that the terminal cannot show
        self.out, self.err = (
            Console(file=stream, markup=False, highlight=False, emoji=False) for stream in (sys.stdout, sys.stderr)
        )
        for console in (self.out, self.err):
            console.push_render_hook(_VisibleText())
        self.as_json, self.quiet, self.debug = as_json, quiet, debug
        self.writes = writes  # True in only one of several processes
        self.options: Mapping[str, str] = {}  # of the running command: parameter name → its option
        self.written_edits: dict[str, str] = {}  # ids of edits that are in the ledger → the command that undoes them

    @property
    def verbose(self) -> bool:
        """Whether a person reads the output."""
        return self.writes and not (self.as_json or self.quiet)

    def print(self, *parts: RenderableType, style: str | None = None) -> None:
        """Print for a person; with --json or --quiet, print nothing."""
        if self.verbose:
            for part in parts:
                self.out.print(part, style=style)

    def hint(self, text: str) -> None:
        """Print a less important line."""
        self.print(text, style="dim")

    def suggest(self, label: str, command: str) -> None:
        """Print a command to paste, on one line."""
        if self.verbose:
            self.out.print(f"{label}: {command}", style="dim", soft_wrap=True)

    def result(self, document: Mapping[str, Any], brief: str = "") -> None:
        """Print the document with --json, and with --quiet only `brief`, the one value that a script needs."""
        if not self.writes:
            return
        if self.as_json:
            self.out.file.write(strict_json(document))
        elif self.quiet and brief:
            self.out.file.write((visible(brief) if self.out.is_terminal else brief) + "\n")
        self.out.file.flush()  # a full disk must be reported here, not when the interpreter exits

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
        with suppress(OSError):  # if standard error cannot be written, there is still the exit code
            self.err.print(f"{kind}: {LONG_WORD.sub(_shortened, ' '.join(text.split()))}", style=style, soft_wrap=True)

    def as_option(self, name: str, value: object) -> str:
        """Spell a setting as an option of the running command, or as a Python argument if there is no such option."""
        option = self.options.get(PARAMETERS.get(name, name.rpartition(".")[2]))
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
    """Return the document as strict JSON, with null in place of NaN and infinity."""
    return json.dumps(without_nan(document), indent=1, default=str, allow_nan=False) + "\n"


def discard_output(stream: TextIO) -> None:
    """Discard the buffer of a stream, which the interpreter would fail to flush when it exits."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor needs nothing
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
