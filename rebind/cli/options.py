"""Options that several verbs take, written once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rebind.errors import InputError

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "smollm2"
METHODS = "memit, rome, emmet, alphaedit, recursive"
DTYPES = ("float64", "float32", "bfloat16", "float16")

_TALK, _PLACE = "Output", "Model"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.", rich_help_panel=_TALK)]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No tables, no bars: only the bare result.", rich_help_panel=_TALK)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and all warnings.", rich_help_panel=_TALK)]

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="smollm2 (built in), a Hub id, a model folder or a GGUF file.",
        rich_help_panel=_PLACE,
    ),
]
LedgerFolder = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        "-l",
        metavar="DIR",
        help="Folder the edits are kept in. Default: one for each model, under REBIND_LEDGERS.",
        rich_help_panel=_PLACE,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="cpu (the default), cuda, cuda:1, mps.", rich_help_panel=_PLACE),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)}. Default: as stored.", rich_help_panel=_PLACE),
]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts in the model's chat template.", rich_help_panel=_PLACE)]
CorpusFile = Annotated[
    Path | None,
    typer.Option(
        "--corpus",
        metavar="TEXT",
        help="Text file whose keys count as old. Default: the model's own samples.",
        rich_help_panel=_PLACE,
    ),
]
MomentTokens = Annotated[
    int | None,
    typer.Option("--moment-tokens", metavar="N", min=1, help="How many tokens of it to read.", rich_help_panel=_PLACE),
]


def typed(
    model: str = DEFAULT_MODEL,
    ledger: Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    chat: bool = False,
    corpus: Path | None = None,
    moment_tokens: int | None = None,
) -> str:
    """The options that were given, as they are typed again behind a command.

    >>> typed("smollm2", Path("my edits"), chat=True), typed()
    (" -l 'my edits' --chat", '')
    """
    named: dict[str, object] = {"-l": ledger, "--device": device, "--dtype": dtype, "--corpus": corpus}
    named = {"-m": None if model == DEFAULT_MODEL else model, **named, "--moment-tokens": moment_tokens}
    words = [word for name, value in named.items() if value is not None for word in (name, str(value))]
    return "".join(f" {shlex.quote(word)}" for word in [*words, *(["--chat"] if chat else [])])


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Layers as a person writes them.

    >>> parse_layers("2,3,4"), parse_layers("2-4, 7")
    ((2, 3, 4), (2, 3, 4, 7))
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or (dash and int(last) < int(first)):
            raise InputError(f"layers are {text!r}, expected numbers such as 2,3,4 or a range such as 2-6: correct it")
        found |= set(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(found))


def parse_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}: choose one of these")
    import torch

    chosen: torch.dtype = getattr(torch, name)
    return chosen
