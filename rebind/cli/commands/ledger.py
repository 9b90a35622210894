"""`rebind ledger`: list, show, undo, redo, compare and verify edits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rebind.cli.command import add_command, new_app
from rebind.cli.commands import export
from rebind.cli.commands.edit import LISTED, uses_lambda
from rebind.cli.options import LedgerOptions, argument, as_typed, command_line, examples, flag
from rebind.cli.session import check_ledger, find_ledger
from rebind.cli.ui.errors import FAILED_CHECK
from rebind.cli.ui.tables import add_answer, answers_table, counted, drift_rows, first_words, pairs, table
from rebind.cli.ui.terminal import Terminal
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.ledger.edit import Edit
    from rebind.edit.ledger.ledger import Ledger

DATE_WIDTH = 72  # columns of a terminal on which the list shows dates

Ids = Annotated[list[str], argument("IDS", "Ids of edits such as e0001, or unique beginnings of them.")]


def list_edits(*, source: LedgerOptions, terminal: Terminal) -> None:
    """List all edits, active and undone. With --quiet, print the ids of the active ones."""
    ledger = _open(source)
    rows = [_summary(ledger, edit) for edit in ledger.edits]
    dates = ("created (UTC)",) if terminal.out.width >= DATE_WIDTH else ()
    made = table("edit", "", *dates, "method", "facts", "first", right=("facts",))
    for column in made.columns[: 2 + len(dates)]:
        column.no_wrap = True
    for row in rows:
        state = ("active" if row["active"] else "undone") + (", forced" if row["forced"] else "")
        date = [row["created"][:16].replace("T", " ")] if dates else []
        style = None if row["active"] else "dim"
        made.add_row(row["id"], state, *date, row["method"], str(row["facts"]), row["first"], style=style)
    terminal.print(made)
    active = [row["id"] for row in rows if row["active"]]
    terminal.hint(f"{len(active)} of {counted(len(rows), 'edit')} active, model {ledger.model_name}, {ledger.path}")
    document = {"ledger": str(ledger.path), "model": ledger.model_name, "fingerprint": ledger.model, "edits": rows}
    terminal.result(document, "\n".join(active))


def show(
    id: Annotated[str, argument("ID", "Id of an edit, such as e0001.")], *, source: LedgerOptions, terminal: Terminal
) -> None:
    """Show one edit: its facts, scores, settings and software versions."""
    ledger = _open(source)
    edit = ledger.get(id)
    scores: Any = edit.scores
    made = answers_table("fact")
    for fact, before, after in list(zip(edit.facts, scores["before"], scores["after"], strict=True))[:LISTED]:
        texts = (first_words(before, fact.target), first_words(after, fact.target))
        add_answer(made, f"{fact.text} → {fact.target}", before, after, *texts)
    terminal.print(made)
    if len(edit.facts) > LISTED:
        terminal.hint(f"… and {counted(len(edit.facts) - LISTED, 'more fact')}; --json lists all of them")
    settings: Any = edit.settings
    hidden = {"chat"} if uses_lambda(edit.method) else {"chat", "lam"}
    rows = [
        ("edit", f"{edit.id}, {'active' if ledger.is_active(edit.id) else 'undone'}"),
        ("created", edit.created),
        ("method", f"{edit.method} (forced)" if edit.forced else edit.method),
        *drift_rows(scores),
        *([("prompts", "in the chat template")] if settings.get("chat") else []),
        *[(name, _plain(value)) for name, value in settings.items() if name not in hidden],
        ("sites", ", ".join(edit.sites)),
        ("versions", _plain(edit.versions)),
    ]
    terminal.print(pairs(rows))
    document = {"id": edit.id, "active": ledger.is_active(edit.id), "ledger": str(ledger.path)} | edit.to_json()
    terminal.result(document, "\n".join(f"{fact.text} → {fact.target}" for fact in edit.facts))


def undo(ids: Ids, *, source: LedgerOptions, terminal: Terminal) -> None:
    """Undo edits. The other edits stay, and an undone edit can be redone."""
    _switch(terminal, source, ids, on=False)


def redo(
    ids: Ids,
    force: Annotated[bool, flag("Redo edits even if they contradict an active edit.", "--force")] = False,
    *,
    source: LedgerOptions,
    terminal: Terminal,
) -> None:
    """Redo undone edits, each in its original place."""
    _switch(terminal, source, ids, on=True, force=force)


def diff(
    other: Annotated[Path, argument("OTHER", "Folder of the ledger to compare with.")],
    *,
    source: LedgerOptions,
    terminal: Terminal,
) -> None:
    """Compare the active edits of two ledgers by their facts, methods and settings."""
    from rebind.edit.ledger.ledger import Ledger

    check_ledger(other, "read")
    here, there = _open(source), Ledger.open(other.expanduser())
    difference = here.diff(there)
    sides = {"only here": (difference.only_here, here), "only there": (difference.only_there, there)}
    made = table("", "edit", "method", "facts", "first", right=("facts",))
    for name, (edits, ledger) in {**sides, "both": (difference.both, here)}.items():
        for row in (_summary(ledger, edit) for edit in edits):
            made.add_row(name, row["id"], row["method"], str(row["facts"]), row["first"])
    terminal.print(made)
    only_here, only_there, both = (
        [edit.id for edit in edits] for edits in (difference.only_here, difference.only_there, difference.both)
    )
    terminal.hint(f"here: {here.path}; there: {there.path}")
    document = {"here": str(here.path), "there": str(there.path)}
    ids = {"only_here": only_here, "only_there": only_there, "both": both}
    terminal.result(document | ids, "\n".join([*(f"-{id}" for id in only_here), *(f"+{id}" for id in only_there)]))


def verify(*, source: LedgerOptions, terminal: Terminal) -> None:
    """Check that nothing in a ledger was altered, damaged or lost."""
    folder = find_ledger(source)
    from rebind.edit.ledger.verify import verify_folder

    problems = verify_folder(folder)
    for problem in problems:
        terminal.print(f"✗ {problem}", style="red")
    if not problems:
        terminal.print(f"✓ {folder} is intact", style="green")
    document = {"ledger": str(folder), "intact": not problems, "problems": problems}
    terminal.result(document, "\n".join(problems))
    if problems:
        raise typer.Exit(FAILED_CHECK)


def _open(source: LedgerOptions) -> Ledger:
    """Open the ledger alone; no model is loaded."""
    folder = find_ledger(source)
    from rebind.edit.ledger.ledger import Ledger

    return Ledger.open(folder)


def _summary(ledger: Ledger, edit: Edit) -> dict[str, Any]:
    scores: Any = edit.scores.get("after") or ()
    return {
        "id": edit.id,
        "active": ledger.is_active(edit.id),
        "created": edit.created,
        "method": edit.method,
        "facts": len(edit.facts),
        "first": f"{edit.facts[0].text} → {edit.facts[0].target}",
        "exact": sum(bool(score["exact"]) for score in scores),
        "forced": edit.forced,
    }


def _plain(value: Any) -> str:
    """Return settings the way people read them."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _switch(terminal: Terminal, source: LedgerOptions, ids: list[str], *, on: bool, force: bool = False) -> None:
    """Undo or redo all of the edits, or none."""
    ledger = _open(source)
    action, opposite = ("redone", "undo") if on else ("undone", "redo")
    typed = as_typed(source)
    with ledger.locked():
        edits = list({edit.id: edit for edit in map(ledger.get, ids)}.values())
        if unchanged := [edit.id for edit in edits if ledger.is_active(edit.id) is on]:
            raise InputError(
                f"{', '.join(unchanged)} already {'active' if on else 'undone'}",
                advice=f"See `{command_line('ledger list', options=typed)}`",
                code="already_active" if on else "already_undone",
            )
        contradictions = _contradictions(ledger, edits, typed) if on else {}
        if contradictions and not force:
            raise next(iter(contradictions.values()))
        problems = {id: error.problem for id, error in contradictions.items()}
        ledger.switch([edit.id for edit in edits], on=on, forced=problems)
        active = [edit.id for edit in ledger.active]
        total = len(ledger.edits)
    for problem in problems.values():
        terminal.report("warning", problem)
    for edit in edits:
        first, more = edit.facts[0], len(edit.facts) - 1
        terminal.print(f"{action} {edit.id}: {first.text} → {first.target}" + (f" and {more} more" if more else ""))
    terminal.hint(f"{len(active)} of {counted(total, 'edit')} active")
    changed = [edit.id for edit in edits]
    terminal.suggest(opposite, command_line(f"ledger {opposite}", *changed, options=typed))
    terminal.result({"ledger": str(ledger.path), action: changed, "active": active}, "\n".join(active))


def _contradictions(ledger: Ledger, edits: list[Edit], typed: str) -> dict[str, InputError]:
    """Return, by id, the edits that give a prompt another target than an active edit or one that is redone first."""
    from rebind.edit.guard import find_earlier

    active, errors = list(ledger.active), {}
    for edit in edits:
        if earlier := next((one for one in find_earlier(edit.facts, active) if one.clashes), None):
            undo_first = f"Undo it first (`{command_line('ledger undo', earlier.edit, options=typed)}`)"
            errors[edit.id] = InputError(
                f"Edit {edit.id} contradicts edit {earlier.edit}, which makes {earlier.text!r} say {earlier.target!r}",
                expected="one target per prompt",
                advice=f"{undo_first if ledger.is_active(earlier.edit) else 'Redo one of the two'}, or use {{force}}",
                settings={"force": True},
                code="contradicts_active_edit",
            )
        active.append(edit)
    return errors


app = new_app(
    help="List, show, undo, redo, compare, verify, export and replay edits.",
    epilog=examples("rebind ledger list", "rebind ledger undo e0001"),
    no_args_is_help=True,
)
VERIFY_NOTE = (
    "Exits with 1 if something is wrong. A change to the header, the log or an edit's tensors is found, and so is "
    "anything missing before the last line of the log. Not found are undo and redo lines cut off at the end of the log, "
    "an edit cut off there together with its tensors, and a ledger rewritten with matching digests; compare with a copy."
)
add_command(app, "list", list_edits, examples("rebind ledger list --model Qwen/Qwen3-0.6B"))
add_command(app, "show", show, examples("rebind ledger show e0001 --json"))
add_command(app, "undo", undo, examples("rebind ledger undo e0001"))
add_command(app, "redo", redo, examples("rebind ledger redo e0001"))
add_command(app, "diff", diff, examples("rebind ledger diff backup/ --ledger edits/"))
add_command(app, "verify", verify, examples("rebind ledger verify --ledger backup/", note=VERIFY_NOTE))
add_command(app, "export", export.export, export.EXPORT_EXAMPLES)
add_command(app, "replay", export.replay, export.REPLAY_EXAMPLES)
