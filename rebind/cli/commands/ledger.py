"""`rebind ledger`: list, show, undo, redo, compare, verify and compact edits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from rebind.cli import options as opt
from rebind.cli.command import add_command, new_app
from rebind.cli.commands import export
from rebind.cli.commands.edit import uses_lambda
from rebind.cli.commands.learn import is_terminal
from rebind.cli.session import complete_edit_id, find_ledger, require_ledger
from rebind.cli.ui import Terminal, tables
from rebind.cli.ui.errors import FAILED_CHECK
from rebind.cli.ui.tables import counted, table
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.ledger.compact import Compaction
    from rebind.edit.ledger.edit import Edit
    from rebind.edit.ledger.ledger import Ledger

Ids = Annotated[
    list[str],
    opt.argument("IDS", "Ids of edits such as e0001, or unique beginnings of them.", autocompletion=complete_edit_id),
]
Force = Annotated[bool, opt.flag("--force", "Redo edits even if they contradict an active edit.")]


def list_edits(
    last: Annotated[int | None, opt.value("N", "List only the last N edits.")] = None,
    *,
    source: opt.LedgerOptions,
    terminal: Terminal,
) -> None:
    """List all edits, active and undone. With --quiet, print the ids of the active edits."""
    ledger = _open(source)
    edits = ledger.edits
    sealed, active = set(ledger.sealed.ids), set(ledger.active.ids)
    recent = edits if last is None else edits[max(0, len(edits) - max(last, 0)) :]
    rows = [_summary(edit, active=edit.id in active, compacted=edit.id in sealed) for edit in recent]
    grid = table("edit", "", "created (UTC)", "method", "facts", "first", right=("facts",))
    for column in grid.columns[:2]:
        column.no_wrap = True
    for row in rows:
        state = "compacted" if row["compacted"] else "active" if row["active"] else "undone"
        state += ", forced" if row["forced"] else ""
        date, style = row["created"][:16].replace("T", " "), None if row["active"] else "dim"
        grid.add_row(row["id"], state, date, row["method"], str(row["facts"]), row["first"], style=style)
    terminal.print(grid)
    selection = "" if last is None else f"the last {len(rows)} of {counted(len(edits), 'edit')}; "
    terminal.hint(
        f"{selection}{len(active)} of {counted(len(edits), 'edit')} active, model {ledger.model_name}, {ledger.path}"
    )
    document = {"ledger": str(ledger.path), "model": ledger.model_name, "fingerprint": ledger.model, "edits": rows}
    terminal.result(document, "\n".join(row["id"] for row in rows if row["active"]))


def show(
    id: Annotated[str, opt.argument("ID", "Id of an edit, such as e0001.", autocompletion=complete_edit_id)],
    *,
    source: opt.LedgerOptions,
    terminal: Terminal,
) -> None:
    """Show one edit: its facts, scores, settings and software versions."""
    from rebind.edit.ledger.edit import ROWS

    ledger = _open(source)
    edit = ledger.get(id)
    is_active, is_compacted = ledger.is_active(edit.id), edit.id in ledger.sealed.ids
    scores: Any = edit.scores
    answers = [
        {"text": fact.text, "target": fact.target, "before": before, "after": after}
        for fact, before, after in zip(edit.facts, scores.get("before", ()), scores.get("after", ()), strict=False)
    ]
    if answers:
        tables.print_answers(terminal, answers)
    else:  # compaction drops the scores before and after
        terminal.print("\n".join(f"{fact.text} → {fact.target}" for fact in edit.facts))
    settings: Any = edit.settings
    hidden = (ROWS,) if uses_lambda(edit.method) else ("lam", ROWS)
    outcome = scores.get("outcome")
    rows = [
        ("edit", f"{edit.id}, {'compacted' if is_compacted else 'active' if is_active else 'undone'}"),
        ("created", edit.created),
        ("method", f"{edit.method} (forced)" if edit.forced else edit.method),
        *tables.earlier_rows(settings),
        *(tables.outcome_rows(outcome, settings["framings"]) if outcome else []),
        *tables.drift_rows(scores),
        *tables.memory_rows(scores),
        *[(name, _format(value)) for name, value in settings.items() if name not in hidden],
        *([("sites", ", ".join(edit.sites))] if edit.sites else []),
        *([("versions", _format(edit.versions))] if edit.versions else []),
    ]
    terminal.print(tables.pairs(rows))
    document = {"id": edit.id, "active": is_active, "ledger": str(ledger.path)} | edit.to_json()
    terminal.result(document, "\n".join(f"{fact.text} → {fact.target}" for fact in edit.facts))


def undo(ids: Ids, *, source: opt.LedgerOptions, terminal: Terminal) -> None:
    """Undo edits. The other edits stay, and an undone edit can be redone."""
    _switch(terminal, source, ids, on=False)


def redo(ids: Ids, force: Force = False, *, source: opt.LedgerOptions, terminal: Terminal) -> None:
    """Redo undone edits, each at its original position."""
    _switch(terminal, source, ids, on=True, force=force)


def diff(
    other: Annotated[Path, opt.argument("OTHER", "Folder of the ledger to compare with.")],
    *,
    source: opt.LedgerOptions,
    terminal: Terminal,
) -> None:
    """Compare the active edits of two ledgers by their facts, methods and settings."""
    from rebind.edit.ledger.ledger import Ledger

    here, there = _open(source), Ledger.open(require_ledger(other))
    difference = here.diff(there)
    groups = {"only_here": difference.only_here, "only_there": difference.only_there, "both": difference.both}
    grid = table("", "edit", "method", "facts", "first", right=("facts",))
    for name, edits in groups.items():
        for edit in edits:
            text = f"{edit.facts[0].text} → {edit.facts[0].target}"
            grid.add_row(name.replace("_", " "), edit.id, edit.method, str(len(edit.facts)), text)
    terminal.print(grid)
    terminal.hint(f"here: {here.path}; there: {there.path}")
    ids = {name: [edit.id for edit in edits] for name, edits in groups.items()}
    brief = [f"-{id}" for id in ids["only_here"]] + [f"+{id}" for id in ids["only_there"]]
    terminal.result({"here": str(here.path), "there": str(there.path), **ids}, "\n".join(brief))


def compact(
    before: Annotated[str | None, opt.value("ID", "Compact the edits before this one.")] = None,
    keep_last: Annotated[int | None, opt.value("N", "Compact all edits but the last N.")] = None,
    yes: Annotated[bool, opt.flag("--yes", "Compact without asking.", "-y")] = False,
    *,
    source: opt.LedgerOptions,
    terminal: Terminal,
) -> None:
    """Squash old edits that need not be undone one by one any more; the model does not change."""
    ledger = _open(source)
    plan = ledger.compact(before=before, keep_last=keep_last, dry_run=True)
    if not yes and not _is_confirmed(terminal, plan):
        terminal.hint("nothing was changed")
        return
    compaction = ledger.compact(before=before, keep_last=keep_last)
    after = compaction.bytes_after or 0
    if yes:
        terminal.print(_consequences(compaction, "can no longer be undone one by one", "gone"))
    terminal.print(f"log and tensors: {decimal(compaction.bytes_before)} before, {decimal(after)} now")
    document = {"ledger": str(ledger.path), "sealed": list(compaction.sealed), "dropped": list(compaction.dropped)}
    terminal.result({**document, "bytes_before": compaction.bytes_before, "bytes_after": after}, str(after))


def _is_confirmed(terminal: Terminal, plan: Compaction) -> bool:
    """Print the consequences of a compaction, and ask for confirmation."""
    if terminal.quiet or terminal.as_json or not is_terminal():
        raise InputError(
            "The compaction cannot be confirmed without a terminal",
            advice="Compact without asking with {yes}",
            settings={"yes": True},
            code="cannot_ask",
        )
    terminal.print(_consequences(plan, "will no longer be undoable one by one", "will be gone"))
    return terminal.out.input("Compact them? [y/N] ", markup=False).strip().lower() in ("y", "yes")


def _consequences(plan: Compaction, sealed: str, dropped: str) -> str:
    """Return a description of what a compaction gives up."""
    lines = []
    if plan.sealed:
        span = f"{plan.sealed[0]} to {plan.sealed[-1]}" if len(plan.sealed) > 1 else plan.sealed[0]
        lines.append(
            f"{counted(len(plan.sealed), 'active edit')} ({span}) {sealed}; scores and versions go, facts stay"
        )
    if plan.dropped:
        lines.append(f"{counted(len(plan.dropped), 'undone edit')} {dropped}")
    return "\n".join(lines)


def verify(
    full: Annotated[
        bool, opt.flag("--full", "Read all files, including those that were intact before and have not changed.")
    ] = False,
    *,
    source: opt.LedgerOptions,
    terminal: Terminal,
) -> None:
    """Check that nothing in a ledger was altered, damaged or lost."""
    folder = find_ledger(source)
    from rebind.edit.ledger import verify_folder

    problems = verify_folder(folder, full=full)
    for problem in problems:
        terminal.print(f"✗ {problem}", style="red")
    if not problems:
        terminal.print(f"✓ {folder} is intact", style="green")
    terminal.result({"ledger": str(folder), "intact": not problems, "problems": problems}, "\n".join(problems))
    if problems:
        raise typer.Exit(FAILED_CHECK)


def _open(source: opt.LedgerOptions) -> Ledger:
    """Open the ledger alone; no model is loaded."""
    folder = find_ledger(source)
    from rebind.edit.ledger.ledger import Ledger

    return Ledger.open(folder)


def _summary(edit: Edit, *, active: bool, compacted: bool) -> dict[str, Any]:
    scores: Any = edit.scores.get("after") or ()
    return {
        "id": edit.id,
        "active": active,
        "compacted": compacted,
        "created": edit.created,
        "method": edit.method,
        "facts": len(edit.facts),
        "first": f"{edit.facts[0].text} → {edit.facts[0].target}",
        "exact": sum(bool(score["exact"]) for score in scores),
        "forced": edit.forced,
    }


def _format(value: Any) -> str:
    """Format nested settings on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _switch(terminal: Terminal, source: opt.LedgerOptions, ids: list[str], *, on: bool, force: bool = False) -> None:
    """Undo or redo all of the edits, or none of them."""
    ledger = _open(source)
    with ledger.locked():
        contradictions = _contradictions(ledger, ids, force) if on else []
        edits = ledger.switch(ids, on=on, forced=contradictions)
        active = ledger.active.ids
    action, opposite = ("redone", "undo") if on else ("undone", "redo")
    for edit in edits:
        first, others = edit.facts[0], len(edit.facts) - 1
        terminal.print(f"{action} {edit.id}: {first.text} → {first.target}" + (f" and {others} more" if others else ""))
    terminal.hint(f"{len(active)} of {counted(len(ledger.edits), 'edit')} active")
    changed = [edit.id for edit in edits]
    terminal.suggest(opposite, opt.command_line(f"ledger {opposite}", *changed, options=opt.as_typed(source)))
    terminal.result({"ledger": str(ledger.path), action: changed, "active": active}, "\n".join(active))


def _contradictions(ledger: Ledger, ids: list[str], force: bool) -> list[str]:
    """Return the edits that contradict an active edit, or one that is redone before them."""
    from rebind.edit.dense.rows import unrelated
    from rebind.edit.guard import check_earlier_edits, find_earlier_edits

    active, contradictions = ledger.active, []
    for edit in map(ledger.get, ids):
        others = unrelated(edit, active.with_facts_like(edit.facts))
        if clashes := [earlier for earlier in find_earlier_edits(edit.facts, others) if earlier.clashes]:
            check_earlier_edits(clashes, force=force)
            contradictions.append(edit.id)
        active += (edit,)
    return contradictions


app = new_app(
    help="List, show, undo, redo, compare, verify, compact, export and replay edits.",
    epilog=opt.examples("rebind ledger list", "rebind ledger undo e0001"),
    no_args_is_help=True,
)
COMPACT_EXAMPLES = opt.examples(
    "rebind ledger compact --keep-last 100",
    "rebind ledger compact --before e0500 --yes",
    note="The edits before ID, or all but the last N, are stored together. Active edits among them can no longer be "
    "undone one by one, and undone edits are removed. Facts, keys and values stay, so the model and its exports do not "
    "change, to the last bit. The command shows what it will do and asks for confirmation. To be able to go back, copy "
    "the folder first.",
)
VERIFY_NOTE = (
    "Exits with 1 if there is a problem: a change of the header, the log or an edit's tensors, or anything missing "
    "before the last line of the log. Lines removed from the end of the log, and a ledger rewritten with matching "
    "digests, cannot be detected; compare it with a copy (rebind ledger diff). A later check reads only files that are "
    "new or have changed since, judged by their times and sizes."
)
add_command(app, "list", list_edits, opt.examples("rebind ledger list --model Qwen/Qwen3-0.6B"))
add_command(app, "show", show, opt.examples("rebind ledger show e0001 --json"))
add_command(app, "undo", undo, opt.examples("rebind ledger undo e0001"))
add_command(app, "redo", redo, opt.examples("rebind ledger redo e0001"))
add_command(app, "diff", diff, opt.examples("rebind ledger diff backup/ --ledger edits/"))
add_command(app, "verify", verify, opt.examples("rebind ledger verify --ledger backup/", note=VERIFY_NOTE))
add_command(app, "compact", compact, COMPACT_EXAMPLES)
add_command(app, "export", export.export, export.EXPORT_EXAMPLES)
add_command(app, "replay", export.replay, export.REPLAY_EXAMPLES)
