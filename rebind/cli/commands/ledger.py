"""`rebind ledger`: every edit that was made, and how to take it back, check it and ship it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rebind.cli import options
from rebind.cli.places import ledgers_folder
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.tables import answers_table, begun, change, drift_rows, pairs, seconds, table
from rebind.cli.ui.terminal import FAILED, Screen, counted, screen
from rebind.cli.whose import choose_ledger, require_some_ledger
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.files import require_writable, require_writable_beside

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.scores import FactScore
    from rebind.edit.ledger.edit import Edit
    from rebind.edit.ledger.ledger import Ledger

app = typer.Typer(
    help="List, show, undo, redo, verify, export and replay edits.",
    epilog="[bold]Example[/bold]\n\nrebind ledger list",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Ids = Annotated[list[str], typer.Argument(help="Ids of edits, as e0001, or as much of one as tells it apart.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier export left there.")]
LISTED = 20
DATED = 72  # columns of a screen that has room for when an edit was made


def _open(model: str, folder: Path | None, again: str, *, changing: bool = False) -> Ledger:
    """The ledger alone: no model is loaded. `again` is the command, for a message that says how to go on."""
    where = choose_ledger(model, folder, again=again, changing=changing)
    from rebind.edit.ledger.ledger import Ledger

    return Ledger.open(where)


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


@app.command("list", epilog="[bold]Example[/bold]\n\nrebind ledger list --model Qwen/Qwen3-0.6B")
def list_(
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """List all edits, undone ones too; with --quiet the ids of those that are active."""
    with screen(as_json, quiet, debug, options.typed(model, ledger)) as shown:
        opened = _open(model, ledger, shown.command("ledger", "list"))
        rows = [_summary(opened, edit) for edit in opened.edits]
        dated = ("made (UTC)",) if shown.out.width >= DATED else ()
        made = table("edit", "", *dated, "method", "facts", "first", right=("facts",))
        for column in made.columns[: 2 + len(dated)]:
            column.no_wrap = True
        for row in rows:
            state = ("active" if row["active"] else "undone") + (", forced" if row["forced"] else "")
            style = None if row["active"] else "dim"
            when = [_minute(row["created"])] if dated else []
            made.add_row(row["id"], state, *when, row["method"], str(row["facts"]), row["first"], style=style)
        shown.show(made)
        active = sum(row["active"] for row in rows)
        shown.hint(f"{active} of {len(rows)} active, model {opened.model_name or opened.model[:12]}, {opened.path}")
        shown.result(
            {"ledger": str(opened.path), "model": opened.model_name, "fingerprint": opened.model, "edits": rows},
            "\n".join(row["id"] for row in rows if row["active"]),
        )


def _minute(moment: str) -> str:
    """A moment of the log to the minute, in UTC.

    >>> _minute("2026-11-16T02:57:04+00:00")
    '2026-11-16 02:57'
    """
    return moment[:16].replace("T", " ")


@app.command("show", epilog="[bold]Example[/bold]\n\nrebind ledger show e0001 --json")
def show(
    id: Annotated[str, typer.Argument(help="Id of an edit, as e0001.")],
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Show one edit: its facts, scores, settings and versions."""
    with screen(as_json, quiet, debug, options.typed(model, ledger)) as shown:
        from rebind.edit.methods import METHODS

        opened = _open(model, ledger, shown.command("ledger", "show", id))
        edit = opened.get(id)
        scores: Any = edit.scores
        made = answers_table("fact")
        for fact, before, after in list(zip(edit.facts, scores["before"], scores["after"], strict=True))[:LISTED]:
            made.add_row(
                f"{fact.text} → {fact.target}",
                change(percent(before["probability"]), percent(after["probability"]), after["exact"]),
                change(str(before["rank"]), str(after["rank"]), after["rank"] == 1),
                begun(before, fact.target),
                begun(after, fact.target),
            )
        shown.show(made)
        if len(edit.facts) > LISTED:
            shown.hint(f"… and {counted(len(edit.facts) - LISTED, 'more fact')}; --json has them all")
        settings: Any = edit.settings
        method = METHODS.get(edit.method)
        unsaid = {"chat", "lam"} if method is not None and method.exact else {"chat"}  # λ has no say in it
        shown.show(
            pairs(
                [
                    ("edit", f"{edit.id}, {'active' if opened.is_active(edit.id) else 'undone'}"),
                    ("made", edit.created),
                    ("method", f"{edit.method} (forced)" if edit.forced else edit.method),
                    *drift_rows(scores),
                    *([("asked", "in the chat template")] if settings.get("chat") else []),
                    *[(name, _plain(value)) for name, value in settings.items() if name not in unsaid],
                    ("sites", ", ".join(edit.sites)),
                    ("versions", _plain(edit.versions)),
                ]
            )
        )
        summary = {"id": edit.id, "active": opened.is_active(edit.id), "ledger": str(opened.path)}
        shown.result(summary | edit.described(), "\n".join(f"{fact.text} → {fact.target}" for fact in edit.facts))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command("undo", epilog="[bold]Example[/bold]\n\nrebind ledger undo e0001\n\nThe others stay as they are.")
def undo(
    ids: Ids,
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Take edits out of the weights; they stay in the ledger and can be had back."""
    with screen(as_json, quiet, debug, options.typed(model, ledger)) as shown:
        again = shown.command("ledger", "undo", *ids)
        _switch(shown, _open(model, ledger, again, changing=True), ids, on=False)


@app.command("redo", epilog="[bold]Example[/bold]\n\nrebind ledger redo e0001")
def redo(
    ids: Ids,
    force: Annotated[
        bool, typer.Option("--force", help="Put them back although an active edit gives a prompt another target.")
    ] = False,
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Put undone edits back, each in its old place."""
    with screen(as_json, quiet, debug, options.typed(model, ledger)) as shown:
        again = shown.command("ledger", "redo", *ids, more=" --force" if force else "")
        _switch(shown, _open(model, ledger, again, changing=True), ids, on=True, force=force)


def _switch(shown: Screen, ledger: Ledger, ids: list[str], *, on: bool, force: bool = False) -> None:
    """All of them or none."""
    verb = "redone" if on else "undone"
    with ledger.locked():
        edits = list({edit.id: edit for edit in map(ledger.get, ids)}.values())
        if wrong := [edit.id for edit in edits if ledger.is_active(edit.id) is on]:
            state = "active" if on else "undone"
            listed = shown.command("ledger", "list")
            raise InputError(f"{', '.join(wrong)} already {state}: `{listed}` shows which edits are what")
        clashes = _clashes(shown, ledger, edits) if on else {}
        clash = next(iter(clashes.values()), None)
        if clash and not force:
            raise InputError(f"{clash}, or put them back all the same with --force")
        ledger.switch([edit.id for edit in edits], on=on, forced=clashes)
        active = [edit.id for edit in ledger.active]
        total = len(ledger.edits)
    if clash:
        shown.complain("warning", clash)
    for edit in edits:
        first, more = edit.facts[0], len(edit.facts) - 1
        shown.show(f"{verb} {edit.id}: {first.text} → {first.target}" + (f" and {more} more" if more else ""))
    back = [edit.id for edit in edits]
    shown.hint(f"{len(active)} of {total} active")
    shown.suggest("the other way", shown.command("ledger", "undo" if on else "redo", *back))
    shown.result({"ledger": str(ledger.path), verb: [edit.id for edit in edits], "active": active}, "\n".join(active))


def _clashes(shown: Screen, ledger: Ledger, edits: list[Edit]) -> dict[str, str]:
    """By id those that give a prompt another target than an active edit, or one put back before it, and which."""
    from rebind.edit.guard import find_earlier

    there, found = list(ledger.active), {}
    for edit in edits:
        if one := next((one for one in find_earlier(edit.facts, there) if one.clashes), None):
            step = f"undo it first ({shown.command('ledger', 'undo', one.edit)})"
            found[edit.id] = (
                f"edit {one.edit} makes {one.text!r} say {one.target!r}, edit {edit.id} something else, expected one "
                f"target for one prompt: {step if ledger.is_active(one.edit) else 'redo one of the two'}"
            )
        there.append(edit)
    return found


@app.command(
    "verify",
    epilog="[bold]Example[/bold]\n\nrebind ledger verify --ledger backup/\n\nExits with 3 if not.\n\n"
    "Seen is any change to the header, the log or an edit's tensors, and whatever was lost before the log's last line. "
    "Not seen are undo and redo lines cut off whole at the log's end (edits are then as they were before), an edit "
    "cut off there together with its tensors, and a ledger written anew with digests that fit: compare it with a copy.",
)
def verify(
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Check that nothing in a ledger was altered, damaged or lost."""
    with screen(as_json, quiet, debug, options.typed(model, ledger)) as shown:
        where = choose_ledger(model, ledger, again=shown.command("ledger", "verify"))
        from rebind.edit.ledger.verify import verify_folder

        problems = verify_folder(where)
        for problem in problems:
            shown.show(f"✗ {problem}", style="red")
        if not problems:
            shown.show(f"✓ {where} is whole", style="green")
        shown.result({"ledger": str(where), "sound": not problems, "problems": problems}, "\n".join(problems))
        if problems:
            raise typer.Exit(FAILED)


@app.command(
    "export",
    epilog="[bold]Examples[/bold]\n\nrebind ledger export --peft adapter/ --rank 8\n\n"
    "rebind ledger export --delta change.safetensors --model-out edited/",
)
def export(
    peft: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a LoRA adapter for peft.")] = None,
    rank: Annotated[
        int | None, typer.Option(metavar="R", min=1, help="Keep this many directions a layer. Default: all, lossless.")
    ] = None,
    delta: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the change alone, as safetensors.")] = None,
    model_out: Annotated[
        Path | None, typer.Option("--model-out", metavar="DIR", help="Write the edited model in its own format.")
    ] = None,
    overwrite: Overwrite = False,
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    corpus: options.CorpusFile = None,
    moment_tokens: options.MomentTokens = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Write the active edits as an adapter, as a change, or as a whole model."""
    with screen(as_json, quiet, debug, options.typed(model, ledger)) as shown:
        if peft is None and delta is None and model_out is None:
            raise InputError("got nothing to export, expected --peft DIR, --delta FILE or --model-out DIR: name one")
        if rank is not None and peft is None:
            raise InputError(f"got --rank {rank} without --peft, expected both: only an adapter can be cut to a rank")
        _require_places(peft, delta, model_out, model, overwrite)
        bars = Bars(shown)
        with bars.drawn():
            editor = _edited(Wanted(model, ledger, device, dtype, False, corpus, moment_tokens), bars)
            bars.phase("saving")
            document: dict[str, Any] = {"edits": [edit.id for edit in editor.ledger.active]}
            if peft is not None:
                made = editor.export_peft(peft, rank=rank, overwrite=overwrite)
                document["peft"] = {"folder": str(made.folder), "ranks": made.ranks, "errors": made.errors}
            if model_out is not None:
                document["model"] = str(editor.save(model_out, overwrite=overwrite))
            if delta is not None:  # last: it may lie in one of the folders
                document["delta"] = str(editor.save_delta(delta, overwrite=overwrite))
        if peft is not None:
            ranks, worst = sorted(set(made.ranks.values())), max(made.errors.values())
            shown.show(f"✓ adapter {made.folder}: rank {', '.join(map(str, ranks))}, relative error {worst:.1e}")
        for name in ("delta", "model"):
            if name in document:
                shown.show(f"✓ {name} {document[name]}")
        shown.hint(f"{counted(len(document['edits']), 'edit')}, {seconds(sum(bars.seconds.values()))}")
        shown.result(document)


def _require_places(peft: Path | None, delta: Path | None, whole: Path | None, model: str, overwrite: bool) -> None:
    """Ask before the model is loaded whether all can be written, so that not some of them are."""
    for place, mark in ((peft, "adapter_config.json"), (whole, "config.json")):
        if place is not None:
            _require_free(place, mark, model, overwrite)
    if peft is not None and whole is not None:
        _require_apart(peft, whole)
    if delta is not None:
        from rebind.edit.export.delta import delta_file

        file = delta_file(delta)
        require_writable(file.parent, "name another place")
        folders = [folder.expanduser().resolve() for folder in (peft, whole) if folder is not None]
        if file.is_dir() or any(file.resolve() in (folder, *folder.parents) for folder in folders):
            raise InputError(f"{file} is a folder, expected a file: choose another name")
        if file.exists() and not overwrite:
            raise InputError(f"{file} is there already, expected a new name: choose another, or give --overwrite")


def _require_apart(peft: Path, whole: Path) -> None:
    """Neither folder may lie in the other, which could then not be put into its place, nor be replaced."""
    adapter, model = (folder.expanduser().resolve() for folder in (peft, whole))
    if adapter == model:
        raise InputError(f"--peft and --model-out are both {peft}, expected a folder each: name another place")
    if adapter in model.parents or model in adapter.parents:
        raise InputError(
            f"--peft {peft} and --model-out {whole} lie one in the other, expected folders apart: name another place"
        )


def _require_free(folder: Path, mark: str, model: str, overwrite: bool) -> None:
    """Ask before the model is loaded whether a folder is new, or holds what may be replaced, as `mark` shows."""
    from rebind.edit.export.folders import require_free

    require_writable_beside(folder, "name another place")
    folder, base = folder.expanduser().resolve(), Path(model).expanduser()
    if base.is_dir() and base.resolve() == folder:
        raise InputError(f"{folder} holds the base model, expected another folder: save beside it")
    require_free(folder, mark, overwrite)


@app.command("replay", epilog="[bold]Example[/bold]\n\nrebind ledger replay --model smollm2 --out edited/")
def replay(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to save the edited model.")],
    overwrite: Overwrite = False,
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    corpus: options.CorpusFile = None,
    moment_tokens: options.MomentTokens = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Apply the ledger to a fresh base model, ask it every fact again, and save it."""
    with screen(as_json, quiet, debug, options.typed(model, ledger)) as shown:
        _require_free(out, "config.json", model, overwrite)
        bars = Bars(shown)
        with bars.drawn():
            editor = _edited(Wanted(model, ledger, device, dtype, False, corpus, moment_tokens), bars)
            bars.phase("asking")
            facts = [(edit.id, fact) for edit in editor.ledger.active for fact in edit.facts]
            scores = [score for edit in editor.ledger.active for score in _scored(editor, edit)]
            bars.phase("saving")
            saved = editor.save(out, overwrite=overwrite)
        rows = list(zip(facts, scores, strict=True))
        exact = sum(score.exact for score in scores)
        made = table("edit", "fact", "probability", "rank", "says", right=("probability", "rank"))
        for (name, fact), score in rows[:LISTED]:
            described = f"{fact.text} → {fact.target}"
            says = begun(asdict(score), fact.target)
            made.add_row(name, described, percent(score.probability), str(score.rank), says)
        shown.show(made)
        shown.show(f"✓ {saved}: {exact} of {len(rows)} facts answered with the whole target")
        shown.result(
            {
                "ledger": str(editor.ledger.path),
                "saved": str(saved),
                "edits": [edit.id for edit in editor.ledger.active],
                "facts": [
                    fact.to_json() | {"edit": name, "probability": score.probability, "rank": score.rank}
                    for (name, fact), score in rows
                ],
                "exact": exact,
            },
            str(saved),
        )


def _scored(editor: Editor, edit: Edit) -> list[FactScore]:
    """An edit's facts, asked as they were when it was made: in the chat template, or not."""
    from rebind.edit.facts.scores import score_facts

    chat = bool(edit.settings.get("chat"))
    return score_facts(editor.trunk, editor.tokenizer, editor.loaded.start, edit.facts, chat=chat)


def _edited(wanted: Wanted, bars: Bars) -> Editor:
    """A fresh model with its ledger in place, which has something to give."""
    if wanted.ledger is None:
        require_some_ledger(wanted.model)  # before the model is loaded
    editor = open_editor(wanted, bars)
    if editor.ledger.path is None:
        raise InputError(
            f"no ledger of {wanted.model} as it is loaded here in {ledgers_folder()}, expected one: `rebind edit` "
            f"makes one, --model, --dtype or --ledger names another"
        )
    if not editor.ledger.active:
        raise InputError("the ledger has no active edits, expected at least one: write a fact first, or redo an edit")
    return editor
