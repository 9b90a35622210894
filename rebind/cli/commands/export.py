"""`rebind ledger export` and `rebind ledger replay`: write an edited model, or the change alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rebind.cli import options as opt
from rebind.cli.session import default_ledgers, find_ledger, no_ledger, open_editor
from rebind.cli.ui import Phases, Terminal, tables
from rebind.cli.ui.errors import FAILED_CHECK
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.storage import check_replaceable, check_writable

if TYPE_CHECKING:
    import torch

    from rebind.edit.editor import Editor
    from rebind.edit.export import ExportCheck

NAMES = {  # option → what it writes
    "peft": "adapter",
    "gguf": "GGUF adapter",
    "memory": "dense memory",
    "checkpoint": "checkpoint",
}
EXACT = 1e-6  # largest relative error of an adapter that counts as exact
EXPORT_EXAMPLES = opt.examples(
    "rebind ledger export --peft adapter/ --rank 16",
    "rebind ledger export --gguf adapter.gguf",
    "rebind ledger export --delta change.safetensors --checkpoint edited/",
)
REPLAY_EXAMPLES = opt.examples("rebind ledger replay --out edited/")

Overwrite = Annotated[bool, opt.flag("--overwrite", "Replace an earlier export.")]


def export(
    peft: Annotated[Path | None, opt.value("DIR", "Write a LoRA adapter for PEFT and vLLM into this folder.")] = None,
    gguf: Annotated[Path | None, opt.value("FILE", "Write a LoRA adapter for llama.cpp into this file.")] = None,
    rank: Annotated[
        int | None,
        opt.value("R", "Rank of the adapter.", default="the smallest of vLLM's that is exact", min=1),
    ] = None,
    delta: Annotated[Path | None, opt.value("FILE", "Write the change alone into this safetensors file.")] = None,
    memory: Annotated[Path | None, opt.value("DIR", "Write the dense memory into this folder, for attach.")] = None,
    checkpoint: Annotated[Path | None, opt.value("DIR", "Write the whole edited model into this folder.")] = None,
    checkpoint_dtype: Annotated[
        str | None, opt.value("NAME", "Dtype of the checkpoint.", default="the model's; 16 bits for a GGUF file")
    ] = None,
    no_check: Annotated[
        bool,
        opt.flag("--no-check", "Skip the check that the export says the facts, which needs memory for a second model."),
    ] = False,
    overwrite: Overwrite = False,
    *,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Write the active edits as a LoRA adapter, a delta file, a dense memory, or a whole model."""
    _require_output(peft, gguf, rank, delta, memory, checkpoint)
    dtype = opt.parse_dtype(checkpoint_dtype)
    for folder, kind in ((peft, "adapter"), (memory, "memory"), (checkpoint, "checkpoint")):
        if folder is not None:
            check_replaceable(folder.expanduser(), kind=kind, overwrite=overwrite)
    for file in (delta, gguf):
        if file is not None:
            check_writable(file.expanduser().parent)
    outputs = {"peft": peft, "gguf": gguf, "memory": memory, "checkpoint": checkpoint}
    failed = False
    with Phases(terminal) as phases:
        editor = open_edited(source, phases)
        from rebind.edit.export import require_changed_weights, require_dense_facts

        if any(path is not None for path in (peft, gguf, delta)):
            require_changed_weights(editor.ledger.active)
        if memory is not None:
            require_dense_facts(editor.ledger.active)
        document: dict[str, Any] = {"edits": [edit.id for edit in editor.ledger.active]}
        said_count: int | None = None  # by the editor; counted with the first check
        for field, path in ((field, path) for field, path in outputs.items() if path is not None):
            phases.begin(f"saving the {NAMES[field]}")
            document[field], description = _write(editor, field, path.expanduser(), rank, dtype, overwrite)
            terminal.print(f"✓ {NAMES[field]} {document[field]['path']}: {description}")
            suggest_attach(terminal, Path(document[field]["path"]))
            check = None if no_check else _check(editor, field, Path(document[field]["path"]), said_count, phases)
            document[field]["check"] = check and asdict(check)
            if check is not None:
                said_count = check.said_in_editor
                terminal.print(f"{'✓' if check.passed else '✗'} asked again: {check}")
                failed |= not check.passed
        if delta is not None:  # last: it may be in one of the folders
            document["delta"] = str(editor.save_delta(delta.expanduser(), overwrite=overwrite))
            terminal.print(f"✓ delta {document['delta']}")
    terminal.hint(f"{tables.counted(len(document['edits']), 'edit')}, {tables.seconds(sum(phases.seconds.values()))}")
    terminal.result(document)
    if failed:
        raise typer.Exit(FAILED_CHECK)


def _require_output(
    peft: Path | None,
    gguf: Path | None,
    rank: int | None,
    delta: Path | None,
    memory: Path | None,
    checkpoint: Path | None,
) -> None:
    """Raise if there is nothing to export, or a rank without an adapter."""
    if peft is not None or gguf is not None:
        return
    if rank is not None or (delta is None and memory is None and checkpoint is None):
        names = {"peft": "DIR", "gguf": "FILE", "delta": "FILE", "memory": "DIR", "checkpoint": "DIR", "rank": None}
        raise InputError(
            "There is nothing to export" if rank is None else "There is a rank, but no adapter to write",
            advice="Use {peft}, {gguf}, {delta}, {memory} or {checkpoint}; {rank} belongs to {peft} and {gguf}",
            settings=names,
            code="nothing_to_export",
        )


def _write(
    editor: Editor, field: str, path: Path, rank: int | None, dtype: torch.dtype | None, overwrite: bool
) -> tuple[dict[str, Any], str]:
    """Write an export, and return its properties as a document and as a description."""
    if field == "checkpoint":
        dtype = dtype or editor.checkpoint_dtype()
        saved, dtype_name = editor.save(path, dtype=dtype, overwrite=overwrite), str(dtype).removeprefix("torch.")
        return {"path": str(saved), "dtype": dtype_name}, dtype_name
    if field == "memory":
        saved, rows = editor.save_memory(path, overwrite=overwrite), editor.edited.dense.rows()
        return {"path": str(saved), "rows": rows}, tables.counted(rows, "row")
    write = editor.export_peft if field == "peft" else editor.export_gguf
    adapter = write(path, rank=rank, overwrite=overwrite)
    error = "exact to float32" if adapter.error < EXACT else f"relative error {percent(adapter.error)}"
    description = ", ".join(filter(None, [f"rank {adapter.rank}", error, adapter.note]))
    document = {"path": str(adapter.path), "rank": adapter.rank, "errors": adapter.errors, "description": description}
    return document, description


def _check(editor: Editor, field: str, path: Path, said_count: int | None, phases: Phases) -> ExportCheck:
    """Load an export as another program would, and count the facts that it says.

    `said_count` is the number of facts that the editor says; None counts them, too.
    """
    from rebind.edit import export as exports

    loaders = {
        "peft": exports.load_with_peft,
        "gguf": exports.load_with_gguf,
        "memory": exports.load_with_memory,
        "checkpoint": exports.load_checkpoint,
    }
    model, edits = editor.language_model, tuple(editor.ledger.active)
    if field == "memory":
        edits, said_count = tuple(edit for edit in edits if edit.has_rows), None
    phases.begin(f"loading the {NAMES[field]}")
    exported = loaders[field](model, path)
    phases.begin(f"asking the {NAMES[field]}")
    said_by_export = exports.count_said(exported, edits)
    said_count = exports.count_said(model, edits) if said_count is None else said_count
    return exports.ExportCheck(sum(len(edit.facts) for edit in edits), said_by_export, said_count)


def suggest_attach(terminal: Terminal, saved: Path) -> None:
    """Say how to attach the dense memory of an export, if it has one: transformers alone does not read it."""
    from rebind.edit.dense.files import HEADER, MEMORY_FOLDER

    for folder in (saved, saved / MEMORY_FOLDER):
        if (folder / HEADER).exists():
            terminal.suggest("transformers reads the memory after", f"rebind.attach(model, {str(folder)!r})")


def replay(
    out: Annotated[Path, opt.value("DIR", "Save the edited model into this folder.")],
    overwrite: Overwrite = False,
    *,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Apply the ledger to a fresh base model, ask it for every fact again, and save it."""
    check_replaceable(out.expanduser(), kind="checkpoint", overwrite=overwrite)
    with Phases(terminal) as phases:
        editor = open_edited(source, phases)
        from rebind.edit.export import score_facts

        phases.begin("asking")
        edits = editor.ledger.active
        facts = [(edit.id, fact) for edit in edits for fact in edit.facts]
        scores = [score.to_json() for score in score_facts(editor.language_model, edits)]
        phases.begin("saving")
        saved = editor.save(out.expanduser(), overwrite=overwrite)
    rows = [fact.to_json() | score | {"edit": id} for (id, fact), score in zip(facts, scores, strict=True)]
    exact = sum(score["exact"] for score in scores)
    grid = tables.table("edit", "fact", "probability", "rank", "says", right=("probability", "rank"))
    for (id, fact), score in list(zip(facts, scores, strict=True))[: tables.LISTED]:
        says = tables.first_words(score, fact.target)
        grid.add_row(id, f"{fact.text} → {fact.target}", percent(score["probability"]), str(score["rank"]), says)
    terminal.print(grid, f"✓ {saved}: {exact} of {len(rows)} facts answered with the whole target")
    suggest_attach(terminal, saved)
    document = {
        "ledger": str(editor.ledger.path),
        "saved": str(saved),
        "edits": [edit.id for edit in edits],
        "facts": rows,
        "exact": exact,
    }
    terminal.result(document, str(saved))


def open_edited(source: opt.EditorOptions, phases: Phases) -> Editor:
    """Load a model whose ledger has active edits."""
    if source.ledger is None and not default_ledgers(source.model):
        find_ledger(opt.LedgerOptions(source.model))  # raises before the model is loaded
    editor = open_editor(source, phases)
    if editor.ledger.path is None:
        raise no_ledger(f"There is no ledger of {source.model} with these weights and this dtype")
    if not editor.ledger.active:
        advice = "Write a fact, or redo an edit"
        raise InputError("The ledger has no active edits", advice=advice, code="no_active_edits")
    return editor
