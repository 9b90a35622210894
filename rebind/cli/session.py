"""From the options of a command line to an editor with its ledger."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rebind.cli.options import DEFAULT_MODEL, EditorOptions, LedgerOptions, ModelOptions, parse_dtype
from rebind.cli.ui.progress import Phases
from rebind.errors import InputError
from rebind.storage import check_writable, ledgers_dir

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.ledger.ledger import Ledger

LEDGER_FILE = "ledger.json"  # every ledger has one
LedgerUse: TypeAlias = Literal["read", "create", "preview"]


def load_editor(source: ModelOptions, phases: Phases, *, chat: bool = False) -> Editor:
    """Load the base model, without a ledger."""
    dtype = parse_dtype(source.dtype)
    if source.model == DEFAULT_MODEL or Path(source.model).expanduser().exists():
        phases.start("loading")  # not for a Hub id: its download shows bars of its own
    import transformers

    from rebind.edit.editor import Editor
    from rebind.edit.moments.corpus import Texts

    logging: Any = transformers.logging  # untyped
    logging.set_verbosity_error()
    return Editor(
        source.model,
        corpus=None if source.corpus is None else Texts.from_file(source.corpus),
        moment_tokens=source.moment_tokens,
        dtype=dtype,
        device=source.device,
        chat=chat,
        progress=phases.for_editor(),
    )


def open_editor(source: EditorOptions, phases: Phases, use: LedgerUse = "read", *, chat: bool = False) -> Editor:
    """Load the model and apply the edits of its ledger.

    A ledger that does not exist is created with `use="create"`. With "read" and "preview" a missing default ledger
    counts as empty, and nothing is written; a missing ledger that was named is an error with "read" alone.
    """
    check_ledger(source.ledger, use)
    editor = load_editor(source, phases, chat=chat)
    name, dtype = editor.language_model.name, str(editor.model.dtype).removeprefix("torch.")
    folder = (source.ledger or default_ledger(name, editor.fingerprint)).expanduser()
    if use == "create" or (folder / LEDGER_FILE).exists():
        from rebind.edit.ledger.ledger import Ledger

        ledger = Ledger.open(folder, editor.fingerprint, model_name=name, dtype=dtype)
        if source.corpus is None:
            _use_samples_of(ledger, editor, source.moment_tokens)
        editor.use(ledger)
    return editor


def check_ledger(folder: Path | None, use: LedgerUse) -> None:
    """Check, before minutes of loading, that a ledger that was named is one, or that one can be created there."""
    if use == "create":
        advice = "Choose another folder for {ledger}"
        check_writable((folder or ledgers_dir()).expanduser(), advice=advice, settings={"ledger": None})
    if folder is None:
        return
    folder = folder.expanduser()
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not ((folder / LEDGER_FILE).exists() or (is_free and use != "read")):
        raise InputError(
            f"There is no ledger in {folder}",
            advice="Check the folder given by {ledger}; `rebind edit` creates a ledger",
            settings={"ledger": None},
            code="no_ledger",
        )


def default_ledger(model_name: str, fingerprint: str) -> Path:
    """Return the folder of a model's default ledger."""
    return ledgers_dir() / f"{_as_file_name(model_name)}-{fingerprint[:8]}"


def find_ledger(source: LedgerOptions) -> Path:
    """Find a ledger without loading its model: the folder that was named, or the only default ledger of that name."""
    if source.ledger is not None:
        check_ledger(source.ledger, "read")
        return source.ledger.expanduser()
    folders = default_ledgers(source.model)
    if len(folders) == 1:
        return folders[0]
    if folders:
        raise InputError(
            f"There are {len(folders)} ledgers of models named {source.model}: {', '.join(map(str, folders))}",
            advice="Name one of them with {ledger}",
            settings={"ledger": None},
            code="several_ledgers",
        )
    raise no_ledger(source.model)


def default_ledgers(model: str) -> list[Path]:
    """Return the default ledgers of all models that have a model's name; their weights or dtypes differ."""
    path = Path(model).expanduser()
    name = (
        model
        if model == DEFAULT_MODEL or not path.exists()
        else path.resolve().stem
        if path.is_file()
        else path.resolve().name
    )
    pattern = re.compile(re.escape(_as_file_name(name)) + "-[0-9a-f]{8}")
    files = sorted(ledgers_dir().glob(f"*/{LEDGER_FILE}"))
    return [file.parent for file in files if pattern.fullmatch(file.parent.name)]


def no_ledger(model: str) -> InputError:
    """Return the error for a model without a ledger."""
    return InputError(
        f"There is no ledger of {model} in {ledgers_dir()}",
        advice="`rebind edit` creates one; {model} or {ledger} names another",
        settings={"model": None, "ledger": None},
        code="no_ledger",
    )


def check_positive(name: str, value: float | None, *, or_zero: bool = False) -> None:
    """Check the value of an option before a model is loaded."""
    if value is not None and not (0 < value < math.inf or (or_zero and value == 0)):
        raise InputError(
            f"{name} is {value:g}",
            expected="a number above 0",
            advice=f"Omit {{{name}}} to use the default",
            settings={name: None},
            code="not_positive",
        )


def _as_file_name(model_name: str) -> str:
    """Return a model's name as the name of a folder.

    >>> _as_file_name("Qwen/Qwen3-0.6B")
    'Qwen--Qwen3-0.6B'
    """
    return re.sub(r"[^\w.-]+", "--", model_name).strip(".-") or "model"


def _use_samples_of(ledger: Ledger, editor: Editor, tokens: int | None) -> None:
    """Let the editor use the same samples of the model as the ledger's edits, if these need them again.

    The default number of samples depends on the device, and an edit by a method that builds on earlier edits can
    only be applied with the moments it was solved with.
    """
    from rebind.edit.methods import get_method
    from rebind.edit.moments.corpus import OwnSamples

    for edit in ledger.active:
        if get_method(edit.method).remembers:
            moments: Any = edit.settings["moments"]
            if (samples := OwnSamples.from_digest(moments["corpus"])) is not None:
                editor.corpus, editor.moment_tokens = samples, tokens or moments["tokens"]
            return
