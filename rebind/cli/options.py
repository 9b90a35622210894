"""Options that several commands share, declared once."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rebind.errors import InputError

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "smollm2"
METHODS = "memit, rome, emmet, alphaedit or recursive"
DTYPES = ("float64", "float32", "bfloat16", "float16")
MODEL, OUTPUT = "Model", "Output"  # headings in the help


def option(metavar: str, help: str, *names: str, default: str = "", panel: str | None = None, **limits: float) -> Any:
    """Declare an option that takes a value; `default` says in words what happens without it."""
    shown = f" [dim]\\[default: {default}][/dim]" if default else ""  # as typer shows a default that is a value
    return typer.Option(*names, metavar=metavar, help=help + shown, rich_help_panel=panel, **limits)


def flag(help: str, *names: str, panel: str | None = None) -> Any:
    """Declare an option that is either there or not."""
    return typer.Option(*names, help=help, rich_help_panel=panel)


def argument(metavar: str, help: str) -> Any:
    """Declare a positional argument."""
    return typer.Argument(metavar=metavar, help=help)


ModelName = Annotated[
    str, option("MODEL", "smollm2 (built in), a Hub id, a model folder or a GGUF file.", "--model", "-m", panel=MODEL)
]
LedgerFolder = Annotated[
    Path | None,
    option("DIR", "Ledger folder.", "--ledger", "-l", default="one per model, in the data folder", panel=MODEL),
]
Device = Annotated[str | None, option("NAME", "cpu, cuda, cuda:1 or mps.", default="cpu", panel=MODEL)]
Dtype = Annotated[str | None, option("NAME", f"{', '.join(DTYPES)}.", default="as stored", panel=MODEL)]
Chat = Annotated[bool, flag("Put prompts into the model's chat template.", "--chat", panel=MODEL)]
Layers = Annotated[str | None, option("LIST", "Layers to edit, such as 2,3,4 or 2-6.", default="chosen for the model")]
Lambda = Annotated[
    float | None,
    option("X", "Weight of old keys against new ones (λ).", "--lam", default="chosen from the keys"),
]
Method = Annotated[str, option("NAME", f"Editing method: {METHODS}.")]
SkipBad = Annotated[bool, flag("Skip invalid records instead of stopping at the first one.", "--skip-bad")]


@dataclass(frozen=True)
class OutputOptions:
    """How to print the result."""

    as_json: Annotated[bool, flag("Print one JSON document and nothing else.", "--json", panel=OUTPUT)] = False
    quiet: Annotated[bool, flag("Print only the bare result.", "--quiet", "-q", panel=OUTPUT)] = False
    debug: Annotated[bool, flag("Show tracebacks and all warnings.", "--debug", panel=OUTPUT)] = False


@dataclass(frozen=True)
class LedgerOptions:
    """Which ledger to open, without its model."""

    model: ModelName = DEFAULT_MODEL
    ledger: LedgerFolder = None


@dataclass(frozen=True)
class ModelOptions:
    """Which model to load, where, and which text its old keys come from."""

    model: ModelName = DEFAULT_MODEL
    device: Device = None
    dtype: Dtype = None
    corpus: Annotated[
        Path | None,
        option("FILE", "Text that old keys are collected from.", default="text that the model samples", panel=MODEL),
    ] = None
    moment_tokens: Annotated[
        int | None,
        option(
            "N", "Number of tokens of that text to read.", default="8192 on a CPU, 100000 on a GPU", panel=MODEL, min=1
        ),
    ] = None


@dataclass(frozen=True)
class EditorOptions(ModelOptions):
    """Which model to load, and the ledger of its edits."""

    ledger: LedgerFolder = None


def as_typed(options: ModelOptions | LedgerOptions, **flags: bool) -> str:
    """Return the options that are not at their defaults, and flags that are set, the way they are typed.

    >>> as_typed(LedgerOptions("smollm2", Path("my edits")), chat=True)
    "--ledger 'my edits' --chat"
    """
    words = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join([*words, *(f"--{name}" for name, is_set in flags.items() if is_set)])


def command_line(command: str, *arguments: str, options: str = "") -> str:
    """Return a command that can be pasted.

    >>> command_line("ask", "It is", options="--chat"), command_line("ask", "-5 is", options="--chat")
    ("rebind ask 'It is' --chat", "rebind ask --chat -- '-5 is'")
    """
    words = [f"rebind {command}", shlex.join(arguments), options]
    if any(one.startswith("-") for one in arguments):
        words = [f"rebind {command}", options, "--", shlex.join(arguments)]
    return " ".join(filter(None, words))


def examples(*commands: str, note: str = "") -> str:
    """Return the end of a command's help: commands to copy, and a remark."""
    title = "Example" if len(commands) == 1 else "Examples"
    return "\n\n".join([f"[bold]{title}[/bold]", *commands, *([note] if note else [])])


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the layers in a text.

    >>> parse_layers("2,3,4"), parse_layers("2-4, 7")
    ((2, 3, 4), (2, 3, 4, 7))
    """
    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or (dash and int(last) < int(first)):
            raise InputError(
                f"{text!r} is not a list of layers",
                expected="numbers such as 2,3,4 or a range such as 2-6",
                code="invalid_layers",
            )
        layers |= set(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(layers))


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype with a name."""
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(f"There is no dtype {name!r}", expected=", ".join(DTYPES), code="unknown_dtype")
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
