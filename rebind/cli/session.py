"""Open an editor and its ledger from the options of a command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer

from rebind.cli.options import DEFAULT_MODEL, EditorOptions, LedgerOptions, ModelOptions, parse_dtype
from rebind.cli.ui import Phases
from rebind.errors import InputError
from rebind.storage import check_writable, ledgers_dir

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.ledger.ledger import Ledger

LEDGER_FILE = "ledger.json"  # every ledger has one
LedgerUse: TypeAlias = Literal["read", "create", "preview"]


def load_editor(
    source: ModelOptions,
    phases: Phases,
    *,
    chat: bool = False,
    framings: Sequence[str] | None = None,
    contexts: int | None = None,
) -> Editor:
    """Load the base model, without a ledger.

    With `chat`, prompts go into the chat template. `framings` and the number of `contexts` apply to edits.
    """
    dtype = parse_dtype(source.dtype)
    if source.model == DEFAULT_MODEL or Path(source.model).expanduser().exists():
        phases.begin("loading")  # not for a Hub id, whose download has its own progress bars
    import transformers

    from rebind.edit.editor import Editor
    from rebind.edit.moments import Texts
    from rebind.edit.targets import ContextSettings
    from rebind.parallel import local_device, ranks

    logging: Any = transformers.logging  # untyped
    logging.set_verbosity_error()
    if source.device_map is not None and ranks().count > 1:
        advice = "Start one process, or leave out {device_map}, so that each process has its own device"
        settings = {"device_map": None}
        problem = f"A device map cannot be shared by {ranks().count} processes"
        raise InputError(problem, advice=advice, settings=settings, code="device_map_with_processes")
    editor = Editor(
        source.model,
        corpus=None if source.corpus is None else Texts.from_file(source.corpus),
        moment_tokens=source.moment_tokens,
        dtype=dtype,
        device=local_device(source.device),
        device_map=source.device_map,
        framings=framings,
        contexts=ContextSettings() if contexts is None else ContextSettings.of(contexts),
        progress=phases.for_editor(),
    )
    editor.language_model = editor.language_model.with_chat(chat)
    return editor


def open_editor(
    source: EditorOptions,
    phases: Phases,
    use: LedgerUse = "read",
    *,
    chat: bool = False,
    framings: Sequence[str] | None = None,
    contexts: int | None = None,
) -> Editor:
    """Load the model and apply the edits of its ledger.

    With `use="create"`, a missing ledger is created. With "read" and "preview" nothing is written, and a missing
    default ledger counts as empty; a missing ledger that `source` names is an error with "read".
    """
    if use == "create":
        check_writable((source.ledger or ledgers_dir()).expanduser())
    if source.ledger is not None:
        require_ledger(source.ledger, or_empty=use != "read")
    editor = load_editor(source, phases, chat=chat, framings=framings, contexts=contexts)
    model = editor.language_model
    folder = (source.ledger or ledgers_dir() / f"{_as_file_name(model.name)}-{model.fingerprint[:8]}").expanduser()
    if use == "create" or (folder / LEDGER_FILE).exists():
        from rebind.edit.editor import open_ledger

        dtype = str(model.dtype).removeprefix("torch.")
        ledger = open_ledger(folder, model.fingerprint, model_name=model.name, dtype=dtype)
        if source.corpus is None:
            _use_samples_of(ledger, editor, source.moment_tokens)
        editor.use_ledger(ledger)
    return editor


def describe(editor: Editor) -> dict[str, Any]:
    """Return the model and the edits of a result, for its document."""
    path = editor.ledger.path
    return {
        "model": editor.language_model.name,
        "fingerprint": editor.fingerprint,
        "ledger": None if path is None else str(path),
        "active": editor.ledger.active.ids,
    }


def require_ledger(folder: Path, *, or_empty: bool = False) -> Path:
    """Check, before a model is loaded, that a folder has a ledger, or with `or_empty` that one can be created there."""
    folder = folder.expanduser()
    if (folder / LEDGER_FILE).exists():
        return folder
    if or_empty:
        from rebind.edit.ledger.creation import is_unfinished

        if not folder.exists() or is_unfinished(folder):
            return folder
    raise no_ledger(f"There is no ledger in {folder}")


def find_ledger(source: LedgerOptions) -> Path:
    """Find a ledger without loading its model: the named folder, or the only default ledger with the model's name."""
    if source.ledger is not None:
        return require_ledger(source.ledger)
    folders = default_ledgers(source.model)
    if len(folders) > 1:
        names = ", ".join(map(str, folders))
        raise no_ledger(f"There are {len(folders)} ledgers of models named {source.model}: {names}", "several_ledgers")
    if not folders:
        raise no_ledger(f"There is no ledger of {source.model} in {ledgers_dir()}")
    return folders[0]


def default_ledgers(model: str) -> list[Path]:
    """Return the default ledgers of all models with this name; their weights or dtypes differ."""
    path = Path(model).expanduser()
    if model != DEFAULT_MODEL and path.exists():  # the name that `locate` gives to a model
        model = path.resolve().name if path.is_dir() else path.stem
    pattern = f"{_as_file_name(model)}-{'[0-9a-f]' * 8}/{LEDGER_FILE}"
    return [file.parent for file in sorted(ledgers_dir().glob(pattern))]


def complete_edit_id(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the id of an edit, from the files of the ledger: reading its log would load torch."""
    ledger, model = context.params.get("ledger"), context.params.get("model") or DEFAULT_MODEL
    folders = [Path(ledger).expanduser()] if ledger else default_ledgers(model)
    files = [file for folder in folders for file in sorted(folder.glob("edits/*.safetensors"))]
    return [file.stem for file in files if file.stem.startswith(incomplete)]


def no_ledger(problem: str, code: str = "no_ledger") -> InputError:
    """Return the error for a ledger that cannot be found."""
    advice = "Check {model} and {ledger}; `rebind edit` creates a ledger"
    return InputError(problem, advice=advice, settings={"model": None, "ledger": None}, code=code)


def _as_file_name(model_name: str) -> str:
    """Return a model's name as the name of a folder.

    >>> _as_file_name("Qwen/Qwen3-0.6B")
    'Qwen--Qwen3-0.6B'
    """
    return re.sub(r"[^\w.-]+", "--", model_name).strip(".-") or "model"


def _use_samples_of(ledger: Ledger, editor: Editor, tokens: int | None) -> None:
    """Let the editor use the same samples of the model as the edits in the ledger, if those need them.

    The default number of samples depends on the device. An edit by a method that builds on earlier edits, or in the
    dense memory, can only be applied with the moments that it was computed with.
    """
    from rebind.edit.methods import get_method
    from rebind.edit.moments import OwnSamples

    dependent = ledger.active.where(lambda kind: get_method(kind.method).remembers or kind.has_rows)
    if len(dependent):
        moments: Any = dependent[0].settings["moments"]
        if (samples := OwnSamples.from_digest(moments["corpus"])) is not None:
            editor.moments.corpus, editor.moments.tokens = samples, tokens or moments["tokens"]
