"""Options that several commands share, and functions that declare, parse and format options."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rebind.cli import completion
from rebind.errors import InputError
from rebind.limits import MAX_SEED

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "smollm2"
MAX_LAYER = 9_999  # far more than any model has, and few enough to list
LAYER_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
MAX_QUOTE_LENGTH = 60  # characters of an option in an error
DTYPES = ("float64", "float32", "bfloat16", "float16")
MODEL, OUTPUT = "Model", "Output"  # headings in the help


def value(metavar: str, help: str, *names: str, default: str = "", panel: str = "", **limits: Any) -> Any:
    """Declare an option that takes a value; `default` describes the value that applies without it."""
    note = f" [dim]\\[default: {default}][/dim]" if default else ""  # styled as typer's own defaults
    return typer.Option(*names, metavar=metavar, help=help + note, rich_help_panel=panel or None, **limits)


def seed_value(help: str) -> Any:
    """Declare the option --seed."""
    return value("N", help, min=0, max=MAX_SEED)


def flag(name: str, help: str, *names: str, panel: str = "") -> Any:
    """Declare an option without a value."""
    return typer.Option(name, *names, help=help, rich_help_panel=panel or None)


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Declare a positional argument."""
    return typer.Argument(metavar=metavar, help=help, **settings)


def examples(*commands: str, note: str = "") -> str:
    """Return the end of a command's help: commands to copy, and a note."""
    title = "Example" if len(commands) == 1 else "Examples"
    return "\n\n".join([f"[bold]{title}[/bold]", *commands, *([note] if note else [])])


model_value = partial(value, panel=MODEL)
ModelName = Annotated[
    str,
    model_value(
        "MODEL",
        "Model: smollm2 (built in), a Hub id, a folder or a GGUF file.",
        "--model",
        "-m",
        autocompletion=completion.model_names,
    ),
]
LedgerFolder = Annotated[
    Path | None,
    model_value("DIR", "Folder of the ledger that holds the edits.", "--ledger", "-l", default="one per model"),
]
Device = Annotated[
    str | None,
    model_value(
        "NAME",
        "Device: cpu, cuda, cuda:1 or mps.",
        default="cpu",
        autocompletion=completion.one_of(*completion.DEVICES),
    ),
]
DeviceMap = Annotated[
    str | None, model_value("NAME", "Spread the model over all devices: auto, balanced or sequential.")
]
Dtype = Annotated[
    str | None,
    model_value(
        "NAME",
        f"Dtype of the weights: {', '.join(DTYPES)}.",
        default="as stored",
        autocompletion=completion.one_of(*DTYPES),
    ),
]
Chat = Annotated[bool, flag("--chat", "Put prompts into the model's chat template.", panel=MODEL)]
Method = Annotated[
    str,
    value(
        "NAME",
        "Editing method: memit, rome, emmet, alphaedit, recursive or dense.",
        autocompletion=completion.one_of(*completion.METHODS),
    ),
]
Layers = Annotated[str | None, value("LIST", "Layers to edit, such as 2,3,4 or 2-6.", default="chosen for the model")]
Lambda = Annotated[float | None, value("X", "Weight of old keys against new ones (λ).", default="chosen from the keys")]
Limit = Annotated[int | None, value("N", "Use only the first N records.", default="all", min=1)]
Subject = Annotated[str | None, value("TEXT", "The subject, if the prompt has no braces.")]
Force = Annotated[bool, flag("--force", "Write the edit even if a check fails; the ledger records it.")]
SkipBad = Annotated[bool, flag("--skip-bad", "Skip invalid records instead of stopping at the first one.")]


@dataclass(frozen=True)
class OutputOptions:
    """How to print the result."""

    as_json: Annotated[bool, flag("--json", "Print one JSON document and nothing else.", panel=OUTPUT)] = False
    quiet: Annotated[bool, flag("--quiet", "Print only the bare result.", "-q", panel=OUTPUT)] = False
    debug: Annotated[bool, flag("--debug", "Show tracebacks and all warnings.", panel=OUTPUT)] = False


@dataclass(frozen=True)
class LedgerOptions:
    """The ledger to open, without loading its model."""

    model: ModelName = DEFAULT_MODEL
    ledger: LedgerFolder = None


@dataclass(frozen=True)
class ModelOptions:
    """The model to load, its device, and the text that its old keys come from."""

    model: ModelName = DEFAULT_MODEL
    device: Device = None
    device_map: DeviceMap = None
    dtype: Dtype = None
    corpus: Annotated[
        Path | None, model_value("FILE", "Text file to collect old keys from.", default="samples of the model")
    ] = None
    moment_tokens: Annotated[
        int | None, model_value("N", "Number of tokens to collect old keys from.", default="8192; GPU: 100000", min=1)
    ] = None


@dataclass(frozen=True)
class EditorOptions(ModelOptions):
    """The model to load, and the ledger of its edits."""

    ledger: LedgerFolder = None


def as_typed(options: ModelOptions | LedgerOptions, **flags: bool) -> str:
    """Return the options that differ from their defaults, and the flags that are set, as they are typed.

    >>> as_typed(LedgerOptions("smollm2", Path("my edits")), chat=True)
    "--ledger 'my edits' --chat"
    """
    words = []
    for field in fields(options):
        if (setting := getattr(options, field.name)) != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(setting)]
    return shlex.join([*words, *(f"--{name}" for name, is_set in flags.items() if is_set)])


def command_line(command: str, *arguments: str, options: str = "") -> str:
    """Return a command that can be pasted.

    >>> command_line("ask", "It is", options="--chat")
    "rebind ask 'It is' --chat"
    """
    return " ".join(filter(None, [f"rebind {command}", shlex.join(arguments), options]))


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Return the names in a text.

    >>> parse_names("start, chat")
    ('start', 'chat')
    """
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InputError(f"{text!r} names nothing", expected="one or more, separated by commas", code="empty_list")
    return names


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the layers in a text.

    >>> parse_layers("2,3,4"), parse_layers("2-4, 7")
    ((2, 3, 4), (2, 3, 4, 7))
    """
    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        match = LAYER_RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last <= MAX_LAYER:
            quote = text if len(text) <= MAX_QUOTE_LENGTH else f"{text[:MAX_QUOTE_LENGTH]}…"
            expected = f"numbers such as 2,3,4 or a range such as 2-6, up to {MAX_LAYER}"
            raise InputError(f"{quote!r} is not a list of layers", expected=expected, code="invalid_layers")
        layers |= set(range(first, last + 1))
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
