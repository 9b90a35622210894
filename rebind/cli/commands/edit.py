"""`rebind edit`: write facts into a model."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rebind.cli import options
from rebind.cli.answers import Probe, answer, probe
from rebind.cli.given import PROBED, askable, probes, read, require_room, search_changes
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.tables import answers_table, begun, change, drift_rows, pairs, seconds, size, spoken, table
from rebind.cli.ui.terminal import Screen, counted, screen
from rebind.cli.whose import find_ledger
from rebind.edit.wording import percent
from rebind.errors import InputError, RebindError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact
    from rebind.edit.guard import Earlier
    from rebind.edit.ledger.edit import Edit
    from rebind.edit.plan import Plan

EXAMPLES = """[bold]Examples[/bold]

rebind edit "The capital of {France} is" "Rome"

rebind edit facts.jsonl --model Qwen/Qwen3-0.6B --method memit --out edited/

rebind edit facts.csv --plan

A line of facts.jsonl: {"prompt": "The capital of {France} is", "target": "Rome"}. CSV and the records of CounterFact and zsRE are read too."""  # noqa: E501

SEARCH = "Search for targets (by default what suits the model)"
SPOKEN = 8  # facts whose answers are written out
LISTED = 20  # facts in the table


def edit(
    facts: Annotated[str, typer.Argument(help="A prompt with its subject in braces, or a file of facts.")],
    target: Annotated[str | None, typer.Argument(help="What the prompt shall be answered with.")] = None,
    subject: Annotated[str | None, typer.Option(metavar="TEXT", help="The subject, instead of braces.")] = None,
    paraphrase: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Another wording, to be asked afterwards. Repeatable.")
    ] = None,
    neighbour: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt whose answer should stay. Repeatable.")
    ] = None,
    method: Annotated[str, typer.Option(metavar="NAME", help=f"{options.METHODS}.")] = "memit",
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Layers to write, as 2,3,4 or 2-6. Default: by the model.")
    ] = None,
    lam: Annotated[
        float | None,
        typer.Option(metavar="X", help="λ, the weight of old answers against new ones. Default: from the keys."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most steps to search a target.", rich_help_panel=SEARCH)
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="X", help="How far a step goes.", rich_help_panel=SEARCH)
    ] = None,
    clamp: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Longest target, against the hidden state it is added to.", rich_help_panel=SEARCH
        ),
    ] = None,
    decay: Annotated[
        float | None, typer.Option(metavar="X", help="What a long target costs.", rich_help_panel=SEARCH)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write the edit although a check speaks against it; the ledger says so.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what it would take.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save the edited model here, in the model's own format.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out records that cannot be used.")] = False,
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    chat: options.Chat = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    corpus: options.CorpusFile = None,
    moment_tokens: options.MomentTokens = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Write facts into a model, and show what it says before and after."""
    with screen(as_json, quiet, debug, options.typed(model, ledger), skips=True) as shown:
        picked = options.parse_layers(layers)
        given = read(shown, facts, target, subject, paraphrase, neighbour, skip_bad)
        if out is not None and not plan:
            require_room(out)
        changes = search_changes(method, steps=steps, rate=rate, clamp=clamp, decay=decay)
        if lam is not None and not 0 < lam < math.inf:
            raise InputError(f"lam is {lam}, expected a number above 0: leave it out to have it found from the keys")
        wanted = Wanted(model, ledger, device, dtype, chat, corpus, moment_tokens)
        bars = Bars(shown)
        with bars.drawn():
            editor = open_editor(wanted, bars, new_ledger=not plan, planned=plan)
            given = askable(shown, editor, given, skip_bad, plan=plan)
            listed = list(given.facts)
            settings = editor.settings(method, facts=len(listed), layers=picked, lam=lam)[1]
            targets = replace(settings.targets, **changes)
            bars.steps, bars.facts = targets.steps, len(listed)
            if plan:
                made = editor.plan(listed, method=method, layers=picked, lam=lam, targets=targets)
            else:
                with _kept(shown, editor, listed, named=ledger is not None):
                    done = editor.rewrite_many(
                        listed, method=method, layers=picked, lam=lam, targets=targets, force=force
                    )
                report = _measure(editor, done, bars)
                if out is not None:
                    bars.phase("saving")
                    editor.save(out)
        given.tell_skipped(shown)
        if plan:
            _show_plan(shown, made, given.skipped)
        else:
            report |= {"skipped": given.skipped}
            report |= {"seconds": bars.seconds, "saved": None if out is None else str(out), "source": settings.source}
            report |= {"which": _which(editor, model, ledger), "better": f"rebind layers{options.typed(model)}"}
            asking = options.typed(device=device, dtype=dtype, chat=chat, corpus=corpus, moment_tokens=moment_tokens)
            _show(shown, editor, done, report, asking)


@contextmanager
def _kept(shown: Screen, editor: Editor, facts: Sequence[Fact], *, named: bool) -> Iterator[None]:
    """Have the screen know of the edit that is written inside, even where an interrupt hides its id."""
    before = len(editor.ledger.edits)
    try:
        yield
    finally:
        with suppress(RebindError):  # a ledger that cannot be read says so itself
            for edit in editor.ledger.edits[before:]:
                if edit.facts == tuple(facts):
                    shown.keep(edit.id, None if named else editor.ledger.path)


def _measure(editor: Editor, done: Edit, bars: Bars) -> dict[str, Any]:
    """What the base model and the edited one say to the facts, their paraphrases and their neighbours."""
    bars.phase("asking")
    first = done.facts[:SPOKEN]
    with editor.lifted():
        before = [answer(editor, fact.text).says for fact in first]
    after = [answer(editor, fact.text).says for fact in first]
    paraphrases, neighbours = probes(done.facts, PROBED)
    return {
        "says": list(zip(before, after, strict=True)),
        "paraphrases": probe(editor, paraphrases),
        "neighbours": probe(editor, neighbours),
    }


def _show(shown: Screen, editor: Editor, done: Edit, report: dict[str, Any], asking: str) -> None:
    from rebind.edit.methods import BY_DEPTH

    scores: Any = done.scores
    rows = list(zip(done.facts, scores["before"], scores["after"], strict=True))
    _show_facts(shown, rows, report["says"])
    _show_probes(shown, done, report["paraphrases"], report["neighbours"])
    settings: Any = done.settings
    spent = report["seconds"]
    layers = ", ".join(map(str, settings["layers"]))
    weighed = f", λ {settings['lam']:.4g}" if _weighs(done.method) else ""
    phases = ", ".join(f"{name} {seconds(value)}" for name, value in spent.items() if value >= 0.05)
    shown.show(
        pairs(
            [
                ("edit", f"{done.id} ({done.method}{weighed})"),
                ("layers", f"{layers} ({report['source']})"),
                ("model", editor.loaded.name),
                *drift_rows(scores),
                ("ledger", f"{editor.ledger.path} ({len(editor.ledger.active)} active)"),
                ("time", f"{seconds(sum(spent.values()))} ({phases})" if phases else seconds(sum(spent.values()))),
                *([("saved", report["saved"])] if report["saved"] else []),
            ]
        )
    )
    if report["source"].startswith(BY_DEPTH):
        shown.suggest("measure which layers suit it", report["better"])
    shown.suggest("take it back", shown.command("ledger", "undo", done.id, more=report["which"]))
    shown.suggest("ask", shown.command("ask", done.facts[0].text, more=asking))
    told = report["says"] + [(None, None)] * (len(rows) - len(report["says"]))
    shown.result(
        {
            "id": done.id,
            "model": editor.loaded.name,
            "fingerprint": editor.fingerprint,
            "ledger": str(editor.ledger.path),
            "method": done.method,
            "settings": settings,
            "forced": done.forced,
            "drift": scores.get("drift"),
            "guard": scores.get("guard"),
            "facts": [
                fact.to_json() | {"before": before | {"continues": first}, "after": after | {"continues": second}}
                for (fact, before, after), (first, second) in zip(rows, told, strict=True)
            ],
            "paraphrases": [one.to_json() for one in report["paraphrases"]],
            "neighbours": [one.to_json() for one in report["neighbours"]],
            "skipped": report["skipped"],
            "seconds": spent,
            "saved": report["saved"],
        },
        done.id,
    )


def _which(editor: Editor, model: str, named: Path | None) -> str:
    """The option that names the ledger, where a command with the model alone would not find it."""
    with suppress(InputError):
        if named is not None or find_ledger(model, None) == editor.ledger.path:
            return ""
    return f" -l {shlex.quote(str(editor.ledger.path))}"


def _show_facts(shown: Screen, rows: list[tuple[Fact, Any, Any]], says: list[tuple[str, str]]) -> None:
    made = answers_table("fact")
    for index, (fact, before, after) in enumerate(rows[:LISTED]):
        told = [begun(score, fact.target) for score in (before, after)] if index >= len(says) else says[index]
        made.add_row(
            f"{fact.text} → {fact.target}",
            change(percent(before["probability"]), percent(after["probability"]), after["exact"]),
            change(str(before["rank"]), str(after["rank"]), after["rank"] == 1),
            *map(spoken, told),
        )
    shown.show(made)
    if len(rows) > LISTED:
        shown.hint(f"… and {counted(len(rows) - LISTED, 'more fact')}; --json has them all")
    if len(rows) > 1:
        exact = [sum(score["exact"] for score in scores) for scores in zip(*[(b, a) for _, b, a in rows], strict=True)]
        shown.show(f"{exact[1]} of {len(rows)} facts answered with the whole target (before: {exact[0]})")


def _show_probes(shown: Screen, done: Edit, paraphrases: list[Probe], neighbours: list[Probe]) -> None:
    if paraphrases:
        made = answers_table("paraphrase")
        for one in paraphrases[:LISTED]:
            before, after = one.before, one.after
            made.add_row(
                one.prompt,
                change(percent(before.probability), percent(after.probability), after.exact),
                change(str(before.rank), str(after.rank), after.rank == 1),
                spoken(before.says),
                spoken(after.says),
            )
        shown.show(made)
        first = sum(one.after.exact for one in paraphrases)
        shown.show(f"{first} of {len(paraphrases)} paraphrases answered with the whole target")
    if neighbours:
        made = table("neighbour", "said before", "says now", "")
        for one in neighbours[:LISTED]:
            same = one.before.says == one.after.says
            made.add_row(one.prompt, spoken(one.before.says), spoken(one.after.says), "same" if same else "changed")
        shown.show(made)
        kept = sum(one.before.says == one.after.says for one in neighbours)
        shown.show(f"{kept} of {len(neighbours)} neighbours answer as before")


def _show_plan(shown: Screen, plan: Plan, skipped: int) -> None:
    moments = "cached" if plan.moments_cached else f"to be computed from {plan.moment_tokens:,} tokens"
    shown.show(
        pairs(
            [
                ("facts", plan.facts),
                ("method", plan.method),
                ("layers", f"{', '.join(map(str, plan.layers))} ({plan.source})"),
                *([("λ", _told_lambda(plan))] if _weighs(plan.method) else []),
                ("search", ", ".join(f"{name} {value:g}" for name, value in asdict(plan.targets).items())),
                ("old keys", moments),
                ("tokens", f"{plan.prompt_tokens:,} in all prompts"),
                ("time", f"about {seconds(plan.seconds)}"),
                ("memory", f"about {size(plan.bytes_in_memory)} besides the model"),
                ("ledger", f"grows by about {size(plan.bytes_on_disk)}"),
                *[("conflict", str(clash)) for clash in plan.conflicts],
                *[(one.edit, _told_earlier(one)) for one in plan.earlier[:LISTED]],
            ]
        )
    )
    if any(one.clashes for one in plan.earlier):
        shown.hint("one prompt has one target: undo those edits first, or write over them with --force")
    shown.hint("nothing was done: leave out --plan to edit")
    shown.result({"plan": asdict(plan), "skipped": skipped}, f"{plan.seconds:.1f}")


def _weighs(method: str) -> bool:
    """Whether λ, the weight of old answers, has a say in it."""
    from rebind.edit.methods import get_method

    return not get_method(method).exact


def _told_lambda(plan: Plan) -> str:
    if plan.lam is not None:
        return f"{plan.lam:.4g}"
    known = f" (published runs on this model had {plan.published_lam:,.0f})" if plan.published_lam else ""
    return f"found from the keys{known}"


def _told_earlier(one: Earlier) -> str:
    kind = "says otherwise" if one.clashes else "has the same subject"
    return f"{kind}: {one.text} → {one.target}"
