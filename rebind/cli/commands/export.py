"""`rebind ledger export` and `rebind ledger replay`: write an edited model, or the change alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rebind.cli.commands.edit import LISTED
from rebind.cli.options import EditorOptions, examples, flag, option
from rebind.cli.session import default_ledgers, no_ledger, open_editor
from rebind.cli.ui.progress import Phases
from rebind.cli.ui.tables import counted, first_words, seconds, table
from rebind.cli.ui.terminal import Terminal
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.storage import check_replaceable, check_writable

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

Overwrite = Annotated[bool, flag("Replace an earlier export.", "--overwrite")]

EXPORT_EXAMPLES = examples(
    "rebind ledger export --peft adapter/ --rank 8",
    "rebind ledger export --delta change.safetensors --checkpoint edited/",
)
REPLAY_EXAMPLES = examples("rebind ledger replay --out edited/")


def export(
    peft: Annotated[Path | None, option("DIR", "Write a LoRA adapter for PEFT into this folder.")] = None,
    rank: Annotated[
        int | None,
        option("R", "Rank of the adapter in each layer.", default="as high as needed to lose nothing", min=1),
    ] = None,
    delta: Annotated[Path | None, option("FILE", "Write the change alone into this safetensors file.")] = None,
    checkpoint: Annotated[Path | None, option("DIR", "Write the whole edited model into this folder.")] = None,
    overwrite: Overwrite = False,
    *,
    source: EditorOptions,
    terminal: Terminal,
) -> None:
    """Write the active edits as a LoRA adapter, as a delta file, or as a whole model."""
    if peft is None and delta is None and checkpoint is None:
        raise InputError(
            "There is nothing to export",
            advice="Use {peft}, {delta} or {checkpoint}",
            settings={"peft": "DIR", "delta": "FILE", "checkpoint": "DIR"},
            code="nothing_to_export",
        )
    if rank is not None and peft is None:
        raise InputError(
            "A rank was given, and no adapter to write",
            advice="Add {peft}, or omit {rank}",
            settings={"peft": "DIR", "rank": None},
            code="rank_without_adapter",
        )
    _check_places(peft, delta, checkpoint, source.model, overwrite)
    phases = Phases(terminal)
    with phases.shown():
        editor = _open_edited(source, phases)
        phases.start("saving")
        document: dict[str, Any] = {"edits": [edit.id for edit in editor.ledger.active]}
        if peft is not None:
            adapter = editor.export_peft(peft, rank=rank, overwrite=overwrite)
            document["peft"] = {"folder": str(adapter.folder), "ranks": adapter.ranks, "errors": adapter.errors}
        if checkpoint is not None:
            document["checkpoint"] = str(editor.save(checkpoint, overwrite=overwrite))
        if delta is not None:  # last: it may lie in one of the folders
            document["delta"] = str(editor.save_delta(delta, overwrite=overwrite))
    if peft is not None:
        ranks, worst = sorted(set(adapter.ranks.values())), max(adapter.errors.values())
        terminal.print(f"✓ adapter {adapter.folder}: rank {', '.join(map(str, ranks))}, relative error {worst:.1e}")
    for kind in ("delta", "checkpoint"):
        if kind in document:
            terminal.print(f"✓ {kind} {document[kind]}")
    terminal.hint(f"{counted(len(document['edits']), 'edit')}, {seconds(phases.total_seconds)}")
    terminal.result(document)


def replay(
    out: Annotated[Path, option("DIR", "Save the edited model into this folder.")],
    overwrite: Overwrite = False,
    *,
    source: EditorOptions,
    terminal: Terminal,
) -> None:
    """Apply the ledger to a fresh base model, ask it for every fact again, and save it."""
    _check_folder(out, "checkpoint", source.model, overwrite)
    phases = Phases(terminal)
    with phases.shown():
        editor = _open_edited(source, phases)
        phases.start("asking")
        rows = []
        for edit in editor.ledger.active:
            model = editor.language_model.with_chat(bool(edit.settings.get("chat")))  # as when the edit was made
            scores = model.score([fact.as_prompt() for fact in edit.facts])
            rows += [(edit.id, fact, score) for fact, score in zip(edit.facts, scores, strict=True)]
        phases.start("saving")
        saved = editor.save(out, overwrite=overwrite)
    made = table("edit", "fact", "probability", "rank", "says", right=("probability", "rank"))
    for id, fact, score in rows[:LISTED]:
        says = first_words(score.to_json(), fact.target)
        made.add_row(id, f"{fact.text} → {fact.target}", percent(score.probability), str(score.rank), says)
    exact = sum(score.exact for _, _, score in rows)
    terminal.print(made, f"✓ {saved}: {exact} of {len(rows)} facts answered with the whole target")
    document = {
        "ledger": str(editor.ledger.path),
        "saved": str(saved),
        "edits": [edit.id for edit in editor.ledger.active],
        "facts": [
            fact.to_json() | {"edit": id, "probability": score.probability, "rank": score.rank}
            for id, fact, score in rows
        ],
        "exact": exact,
    }
    terminal.result(document, str(saved))


def _open_edited(source: EditorOptions, phases: Phases) -> Editor:
    """Load a model whose ledger has active edits."""
    if source.ledger is None and not default_ledgers(source.model):
        raise no_ledger(source.model)  # before minutes of loading
    editor = open_editor(source, phases)
    if editor.ledger.path is None:
        raise no_ledger(f"{source.model} in {str(editor.model.dtype).removeprefix('torch.')}")
    if not editor.ledger.active:
        raise InputError(
            "The ledger has no active edits", advice="Write a fact, or redo an edit", code="no_active_edits"
        )
    return editor


def _check_places(peft: Path | None, delta: Path | None, checkpoint: Path | None, model: str, overwrite: bool) -> None:
    """Check before the model is loaded that everything can be written, so that all of it is written or nothing."""
    for folder, kind in ((peft, "adapter"), (checkpoint, "checkpoint")):
        if folder is not None:
            _check_folder(folder, kind, model, overwrite)
    folders = [folder.expanduser().resolve() for folder in (peft, checkpoint) if folder is not None]
    if len(folders) == 2 and (folders[0] in (folders[1], *folders[1].parents) or folders[1] in folders[0].parents):
        raise InputError(
            f"{peft} and {checkpoint} are the same folder, or one is in the other",
            expected="separate folders",
            code="folders_overlap",
        )
    if delta is not None:
        from rebind.edit.export.delta import delta_file

        file = delta_file(delta)
        check_writable(file.parent)
        if file.is_dir() or any(file.resolve() in (folder, *folder.parents) for folder in folders):
            raise InputError(f"{file} is a folder", expected="a file", code="folder_in_the_way")
        if file.exists() and not overwrite:
            raise InputError(
                f"{file} exists",
                advice="Choose another name, or use {overwrite} to replace it",
                settings={"overwrite": True},
                code="file_exists",
            )


def _check_folder(folder: Path, kind: str, model: str, overwrite: bool) -> None:
    folder, base = folder.expanduser(), Path(model).expanduser()
    if base.is_dir() and base.resolve() == folder.resolve():
        raise InputError(f"{folder} holds the base model", expected="another folder", code="base_model_in_the_way")
    check_replaceable(folder, kind=kind, overwrite=overwrite)
