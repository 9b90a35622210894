"""`rebind ledger export` and `rebind ledger replay`: write an edited model, or the change alone."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
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
    from rebind.edit.editor import Editor
    from rebind.edit.export import AdapterExport

EXACT = 1e-6  # the relative error of an adapter that holds all of a change
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
    checkpoint: Annotated[Path | None, opt.value("DIR", "Write the whole edited model into this folder.")] = None,
    checkpoint_dtype: Annotated[
        str | None, opt.value("NAME", "Dtype of the checkpoint.", default="the model's; 16 bits for a GGUF file")
    ] = None,
    no_check: Annotated[
        bool,
        opt.flag("--no-check", "Do not ask the export for the facts, which takes the memory of a second model."),
    ] = False,
    overwrite: Overwrite = False,
    *,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Write the active edits as a LoRA adapter, as a delta file, or as a whole model."""
    adapters = peft is not None or gguf is not None
    if not adapters and (rank is not None or (delta is None and checkpoint is None)):
        raise InputError(
            "There is nothing to export" if rank is None else "A rank was given without an adapter to write",
            advice="Use {peft}, {gguf}, {delta} or {checkpoint}; {rank} belongs to {peft} and {gguf}",
            settings={"peft": "DIR", "gguf": "FILE", "delta": "FILE", "checkpoint": "DIR", "rank": None},
            code="nothing_to_export",
        )
    dtype = opt.parse_dtype(checkpoint_dtype)
    for folder, kind in ((peft, "adapter"), (checkpoint, "checkpoint")):
        if folder is not None:
            check_replaceable(folder.expanduser(), kind=kind, overwrite=overwrite)
    for file in (delta, gguf):
        if file is not None:
            check_writable(file.expanduser().parent)
    with Phases(terminal) as phases:
        editor = _open_edited(source, phases)
        document: dict[str, Any] = {"edits": [edit.id for edit in editor.ledger.active]}
        checks = None if no_check else _Checks(editor, phases, terminal)
        if peft is not None:
            phases.begin("saving the adapter")
            adapter = editor.export_peft(peft.expanduser(), rank=rank, overwrite=overwrite)
            document["peft"] = _describe_adapter("adapter", adapter, terminal)
            document["peft"]["check"] = checks and checks.ask("adapter", adapter.path)
        if gguf is not None:
            phases.begin("saving the GGUF adapter")
            adapter = editor.export_gguf(gguf.expanduser(), rank=rank, overwrite=overwrite)
            document["gguf"] = _describe_adapter("GGUF adapter", adapter, terminal)
            document["gguf"]["check"] = checks and checks.ask("GGUF adapter", adapter.path)
        if checkpoint is not None:
            phases.begin("saving the checkpoint")
            dtype = dtype or editor.checkpoint_dtype()
            saved = editor.save(checkpoint.expanduser(), dtype=dtype, overwrite=overwrite)
            dtype_name = str(dtype).removeprefix("torch.")
            terminal.print(f"✓ checkpoint {saved}: {dtype_name}")
            document["checkpoint"] = {"path": str(saved), "dtype": dtype_name}
            document["checkpoint"]["check"] = checks and checks.ask("checkpoint", saved)
        if delta is not None:  # last: it may lie in one of the folders
            document["delta"] = str(editor.save_delta(delta.expanduser(), overwrite=overwrite))
            terminal.print(f"✓ delta {document['delta']}")
    terminal.hint(f"{tables.counted(len(document['edits']), 'edit')}, {tables.seconds(sum(phases.seconds.values()))}")
    terminal.result(document)
    if checks and checks.failed:
        raise typer.Exit(FAILED_CHECK)


def _describe_adapter(name: str, adapter: AdapterExport, terminal: Terminal) -> dict[str, Any]:
    """Print where an adapter is and how exact, and return the same for programs."""
    error = "exact to float32" if adapter.error < EXACT else f"relative error {adapter.error:.1e}"
    summary = ", ".join(filter(None, [f"rank {adapter.rank}", error, adapter.note]))
    terminal.print(f"✓ {name} {adapter.path}: {summary}")
    return {"path": str(adapter.path), "rank": adapter.rank, "errors": adapter.errors, "description": summary}


class _Checks:
    """Loads each export as another program would, and asks it for the facts."""

    def __init__(self, editor: Editor, phases: Phases, terminal: Terminal) -> None:
        self.editor, self.phases, self.terminal = editor, phases, terminal
        self.failed = False

    @cached_property
    def said_in_editor(self) -> int:
        from rebind.edit.export import count_said

        return count_said(self.editor.language_model, self.editor.ledger.active)

    def ask(self, kind: str, path: Path) -> dict[str, int]:
        """Print and return how many facts the export at a path says."""
        from rebind.edit import export as exports

        edits = self.editor.ledger.active
        loaders = {
            "adapter": exports.load_with_peft,
            "GGUF adapter": exports.load_with_gguf,
            "checkpoint": exports.load_checkpoint,
        }
        self.phases.begin(f"loading the {kind}")
        exported = loaders[kind](self.editor.language_model, path)
        self.phases.begin(f"asking the {kind}")
        said = exports.count_said(exported, edits)
        result = exports.ExportCheck(sum(len(edit.facts) for edit in edits), said, self.said_in_editor)
        self.terminal.print(f"{'✓' if result.passed else '✗'} asked again: {result}")
        self.failed |= not result.passed
        return asdict(result)


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
        editor = _open_edited(source, phases)
        from rebind.edit.export import ask_facts

        phases.begin("asking")
        edits = editor.ledger.active
        facts = [(edit.id, fact) for edit in edits for fact in edit.facts]
        scores = ask_facts(editor.language_model, edits)
        rows = [(id, fact, score) for (id, fact), score in zip(facts, scores, strict=True)]
        phases.begin("saving")
        saved = editor.save(out.expanduser(), overwrite=overwrite)
    grid = tables.table("edit", "fact", "probability", "rank", "says", right=("probability", "rank"))
    for id, fact, score in rows[: tables.LISTED]:
        says = tables.first_words(score.to_json(), fact.target)
        grid.add_row(id, f"{fact.text} → {fact.target}", percent(score.probability), str(score.rank), says)
    exact = sum(score.exact for _, _, score in rows)
    terminal.print(grid, f"✓ {saved}: {exact} of {len(rows)} facts answered with the whole target")
    document = {
        "ledger": str(editor.ledger.path),
        "saved": str(saved),
        "edits": [edit.id for edit in edits],
        "facts": [fact.to_json() | score.to_json() | {"edit": id} for id, fact, score in rows],
        "exact": exact,
    }
    terminal.result(document, str(saved))


def _open_edited(source: opt.EditorOptions, phases: Phases) -> Editor:
    """Load a model whose ledger has active edits."""
    if source.ledger is None and not default_ledgers(source.model):
        find_ledger(opt.LedgerOptions(source.model))  # raises before minutes of loading
    editor = open_editor(source, phases)
    if editor.ledger.path is None:
        raise no_ledger(f"There is no ledger of {source.model} with these weights and this dtype")
    if not editor.ledger.active:
        advice = "Write a fact, or redo an edit"
        raise InputError("The ledger has no active edits", advice=advice, code="no_active_edits")
    return editor
