"""`rebind ledger export` and `rebind ledger replay`: write an edited model, or the change alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rebind.cli import options as opt
from rebind.cli.session import default_ledgers, find_ledger, no_ledger, open_editor
from rebind.cli.ui import Phases, Terminal, tables
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.storage import check_replaceable, check_writable

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

EXPORT_EXAMPLES = opt.examples(
    "rebind ledger export --peft adapter/ --rank 8",
    "rebind ledger export --delta change.safetensors --checkpoint edited/",
)
REPLAY_EXAMPLES = opt.examples("rebind ledger replay --out edited/")

Overwrite = Annotated[bool, opt.flag("--overwrite", "Replace an earlier export.")]


def export(
    peft: Annotated[Path | None, opt.value("DIR", "Write a LoRA adapter for PEFT into this folder.")] = None,
    rank: Annotated[int | None, opt.value("R", "Rank of the adapter.", default="enough to be exact", min=1)] = None,
    delta: Annotated[Path | None, opt.value("FILE", "Write the change alone into this safetensors file.")] = None,
    checkpoint: Annotated[Path | None, opt.value("DIR", "Write the whole edited model into this folder.")] = None,
    overwrite: Overwrite = False,
    *,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Write the active edits as a LoRA adapter, as a delta file, or as a whole model."""
    if peft is None and (rank is not None or (delta is None and checkpoint is None)):
        raise InputError(
            "There is nothing to export" if rank is None else "A rank was given without an adapter to write",
            advice="Use {peft}, {delta} or {checkpoint}; {rank} belongs to {peft}",
            settings={"peft": "DIR", "delta": "FILE", "checkpoint": "DIR", "rank": None},
            code="nothing_to_export",
        )
    for folder, kind in ((peft, "adapter"), (checkpoint, "checkpoint")):
        if folder is not None:
            check_replaceable(folder.expanduser(), kind=kind, overwrite=overwrite)
    if delta is not None:
        check_writable(delta.expanduser().parent)
    with Phases(terminal) as phases:
        editor = _open_edited(source, phases)
        phases.begin("saving")
        document: dict[str, Any] = {"edits": [edit.id for edit in editor.ledger.active]}
        if peft is not None:
            adapter = editor.export_peft(peft.expanduser(), rank=rank, overwrite=overwrite)
            summary = f"rank {max(adapter.ranks.values())}, relative error {max(adapter.errors.values()):.1e}"
            document["peft"] = {"folder": str(adapter.folder), "ranks": adapter.ranks, "errors": adapter.errors}
            document["peft"]["description"] = summary
            terminal.print(f"✓ adapter {adapter.folder}: {summary}")
        if checkpoint is not None:
            document["checkpoint"] = str(editor.save(checkpoint.expanduser(), overwrite=overwrite))
            terminal.print(f"✓ checkpoint {document['checkpoint']}")
        if delta is not None:  # last: it may lie in one of the folders
            document["delta"] = str(editor.save_delta(delta.expanduser(), overwrite=overwrite))
            terminal.print(f"✓ delta {document['delta']}")
    terminal.hint(f"{tables.counted(len(document['edits']), 'edit')}, {tables.seconds(sum(phases.seconds.values()))}")
    terminal.result(document)


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
        phases.begin("asking")
        rows = []
        for edit in editor.ledger.active:
            model = editor.language_model.with_chat(bool(edit.settings.get("chat")))  # as when the edit was written
            scores = model.score([fact.as_prompt() for fact in edit.facts])
            rows += [(edit.id, fact, score) for fact, score in zip(edit.facts, scores, strict=True)]
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
        "edits": [edit.id for edit in editor.ledger.active],
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
