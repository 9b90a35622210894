"""`rebind edit`: write facts into a model."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.filesize import decimal

from rebind.cli import options as opt
from rebind.cli.fact_input import facts_of_file, fits_context, has_one_target, print_skipped, single_fact, valid_facts
from rebind.cli.session import default_ledgers, describe, open_editor
from rebind.cli.ui import Phases, Terminal, tables
from rebind.cli.ui.tables import one_line, seconds
from rebind.errors import InputError
from rebind.storage import check_replaceable

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.readers import Facts
    from rebind.edit.ledger.edit import Edit
    from rebind.edit.plan import Plan

EXAMPLES = opt.examples(
    'rebind edit "The capital of {France} is" "Rome"',
    "rebind edit facts.jsonl --model Qwen/Qwen3-0.6B --method memit --out edited/",
    "rebind edit facts.csv --plan",
    note='A line of facts.jsonl: {"prompt": "The capital of {France} is", "target": "Rome"}. CSV files and the records '
    "of CounterFact and zsRE can be read too.",
)

SEARCH = "Target search (by default chosen for the model)"
SMALLEST = 1e-6  # rate and clamp of a search
GENERATED, PROBED = 8, 400  # facts answered in full; paraphrases, and neighbors, that are asked


def edit(
    facts: Annotated[str, opt.argument("FACTS", "A prompt with its subject in braces, or a file of facts.")],
    target: Annotated[str | None, opt.argument("TARGET", "What the model should answer to the prompt.")] = None,
    subject: opt.Subject = None,
    paraphrase: Annotated[list[str] | None, opt.value("TEXT", "Another wording to ask. Can be repeated.")] = None,
    neighbor: Annotated[
        list[str] | None, opt.value("TEXT", "A prompt whose answer should not change. Can be repeated.")
    ] = None,
    method: opt.Method = "memit",
    layers: opt.Layers = None,
    lam: opt.Lambda = None,
    steps: Annotated[int | None, opt.value("N", "Search each target for at most N steps.", min=1, panel=SEARCH)] = None,
    rate: Annotated[float | None, opt.value("X", "Learning rate of the search.", min=SMALLEST, panel=SEARCH)] = None,
    clamp: Annotated[
        float | None,
        opt.value("X", "Largest change of the hidden state, relative to its norm.", min=SMALLEST, panel=SEARCH),
    ] = None,
    decay: Annotated[float | None, opt.value("X", "Penalty on changes of the state.", min=0, panel=SEARCH)] = None,
    force: Annotated[bool, opt.flag("--force", "Write the edit even if a check fails; the ledger records it.")] = False,
    plan: Annotated[bool, opt.flag("--plan", "Show layers, cost and conflicts, and write nothing.")] = False,
    out: Annotated[Path | None, opt.value("DIR", "Also save the edited model into this folder.")] = None,
    skip_bad: opt.SkipBad = False,
    *,
    source: opt.EditorOptions,
    chat: opt.Chat = False,
    terminal: Terminal,
) -> None:
    """Write facts into a model, and show its answers before and after."""
    from rebind.edit.methods import get_method

    get_method(method)
    chosen_layers = opt.parse_layers(layers)
    search: dict[str, Any] = {"steps": steps, "rate": rate, "clamp": clamp, "decay": decay}
    details = {"subject": subject, "paraphrases": paraphrase or (), "neighbors": neighbor or ()}
    input_facts = _read(terminal, facts, target, details, skip_bad)
    if out is not None and not plan:
        check_replaceable(out.expanduser(), kind="checkpoint")
    with Phases(terminal) as phases:
        editor = open_editor(source, phases, "preview" if plan else "create", chat=chat)
        fits = fits_context(editor, behind_contexts=skip_bad and not plan)
        input_facts = valid_facts(terminal, input_facts, fits, skip_bad)
        settings = editor.settings(method, facts=len(input_facts), layers=chosen_layers, lam=lam)
        targets = replace(settings.targets, **{name: value for name, value in search.items() if value is not None})
        choices: dict[str, Any] = {"method": method, "layers": chosen_layers, "lam": lam, "targets": targets}
        phases.steps, phases.facts = targets.steps, len(input_facts)
        if plan:
            estimate = editor.plan(input_facts.facts, **choices)
        else:
            known = len(editor.ledger.edits)
            try:
                new_edit = editor.rewrite_many(input_facts.facts, **choices, force=force)
            finally:  # an interrupt may hide an edit that is written
                for written in editor.ledger.edits[known:]:
                    terminal.written_edits[written.id] = _undo_command(editor, written, source)
            report = _ask(editor, new_edit, phases)
            if out is not None:
                phases.begin("saving")
                editor.save(out.expanduser())
    print_skipped(terminal, input_facts)
    if plan:
        _print_plan(terminal, estimate)
        terminal.result({"plan": asdict(estimate), "skipped": len(input_facts.skipped)}, f"{estimate.seconds:.1f}")
        return
    saved = None if out is None else str(out)
    report |= {"skipped": len(input_facts.skipped), "seconds": phases.seconds, "saved": saved}
    _print_edit(terminal, editor, report, settings.source)
    if settings.source.startswith("by its depth"):
        measured = opt.ModelOptions(source.model, source.device, source.dtype)
        terminal.suggest("measure the best layers", opt.command_line("layers", options=opt.as_typed(measured)))
    terminal.suggest("undo", terminal.written_edits[new_edit.id])
    terminal.suggest("ask", opt.command_line("ask", new_edit.facts[0].text, options=opt.as_typed(source, chat=chat)))
    terminal.result(report, new_edit.id)


def _read(terminal: Terminal, facts: str, target: str | None, details: dict[str, Any], skip_bad: bool) -> Facts:
    """Read a file of facts, or a single fact; `details` are the subject, paraphrases and neighbors of the latter."""
    is_file = os.path.isfile(facts)  # noqa: PTH113 - False for a prompt that is too long to be a file's name
    if target is not None and not (is_file and details["subject"] is None and "{" not in facts):
        return single_fact(facts, target, **details)
    if not is_file and ("{" in facts or " " in facts.strip()):
        example = 'rebind edit "The capital of {France} is" "Rome"'
        raise InputError(f"The prompt {facts!r} has no target", advice=f"Add it: {example}", code="missing_target")
    if target or any(details.values()):
        problem = f"{facts} is a file of facts, and a target or options of a single fact were given as well"
        advice = "Write targets, subjects, paraphrases and neighbors into the file"
        raise InputError(problem, advice=advice, code="file_and_fact")
    return valid_facts(terminal, facts_of_file(terminal, facts, skip_bad), has_one_target(), skip_bad)


def _undo_command(editor: Editor, edit: Edit, source: opt.EditorOptions) -> str:
    """Return the command that undoes an edit; the model alone does not name the ledger if several have its name."""
    is_unique = default_ledgers(source.model) == [editor.ledger.path]
    ledger = source.ledger or (None if is_unique else editor.ledger.path)
    return opt.command_line("ledger undo", edit.id, options=opt.as_typed(opt.LedgerOptions(source.model, ledger)))


def _ask(editor: Editor, new_edit: Edit, phases: Phases) -> dict[str, Any]:
    """Ask the base model and the edited model about the facts, their paraphrases and their neighbors."""
    from rebind.models import Prompt

    phases.begin("asking")
    model, listed = editor.language_model, list(enumerate(new_edit.facts))
    first = [fact.text for fact in new_edit.facts[:GENERATED]]
    paraphrases = [(index, Prompt(text, fact.target)) for index, fact in listed for text in fact.paraphrases][:PROBED]
    neighbors = [(index, Prompt(text, fact.target)) for index, fact in listed for text in fact.neighbors][:PROBED]
    prompts = [prompt for _, prompt in paraphrases + neighbors]
    with editor.base_model():
        before = model.generate(first, 12), model.score(prompts)
    after = model.generate(first, 12), model.score(prompts)
    scored = [
        {"fact": index, "prompt": one.text, "target": one.target, "before": old.to_json(), "after": new.to_json()}
        for (index, one), old, new in zip(paraphrases + neighbors, before[1], after[1], strict=True)
    ]
    scores: Any = new_edit.scores
    facts = []
    for index, fact in listed:
        asked = [(scores["before"][index], before[0]), (scores["after"][index], after[0])]
        states = [score | {"continues": texts[index] if index < GENERATED else None} for score, texts in asked]
        facts.append(fact.to_json() | {"text": fact.text, "before": states[0], "after": states[1]})
    about = {"id": new_edit.id, **describe(editor), "method": new_edit.method, "settings": new_edit.settings}
    checks = {"forced": new_edit.forced, "drift": scores.get("drift"), "guard": scores.get("guard")}
    probes = {"paraphrases": scored[: len(paraphrases)], "neighbors": scored[len(paraphrases) :]}
    return {**about, **checks, "facts": facts, **probes}


def _print_edit(terminal: Terminal, editor: Editor, report: dict[str, Any], source: str) -> None:
    for kind in ("fact", "paraphrase"):
        if rows := report[f"{kind}s"]:
            tables.print_answers(terminal, kind, rows)
    if neighbors := report["neighbors"]:
        same = sum(one["before"]["says"] == one["after"]["says"] for one in neighbors)
        grid = tables.table("neighbor", "before", "after")
        for one in neighbors[: tables.LISTED]:
            grid.add_row(one["prompt"], one_line(one["before"]["says"]), one_line(one["after"]["says"]))
        terminal.print(grid, f"{same} of {len(neighbors)} neighbors answered as before")
    settings, spent = report["settings"], report["seconds"]
    lam = f", λ {settings['lam']:.4g}" if uses_lambda(report["method"]) else ""
    phases = ", ".join(f"{name} {seconds(value)}" for name, value in spent.items() if value >= 0.05)
    properties = [
        ("edit", f"{report['id']} ({report['method']}{lam})"),
        ("layers", f"{', '.join(map(str, settings['layers']))} ({source})"),
        ("model", report["model"]),
        *tables.drift_rows(report),
        ("ledger", f"{report['ledger']} ({len(editor.ledger.active)} active)"),
        ("time", f"{seconds(sum(spent.values()))} ({phases})"),
        *([("saved", report["saved"])] if report["saved"] else []),
    ]
    terminal.print(tables.pairs(properties))


def _print_plan(terminal: Terminal, plan: Plan) -> None:
    lam = "chosen from the keys" if plan.lam is None else f"{plan.lam:.4g}"
    if plan.lam is None and plan.published_lam:
        lam += f" (published runs on this model used {plan.published_lam:,.0f})"
    rows = [
        ("facts", plan.facts),
        ("method", plan.method),
        ("layers", f"{', '.join(map(str, plan.layers))} ({plan.source})"),
        *([("λ", lam)] if uses_lambda(plan.method) else []),
        ("search", ", ".join(f"{name} {value:g}" for name, value in asdict(plan.targets).items())),
        ("old keys", "cached" if plan.moments_cached else f"to be collected from {plan.moment_tokens:,} tokens"),
        ("tokens", f"{plan.prompt_tokens:,} in all prompts"),
        ("time", f"about {seconds(plan.seconds)}"),
        ("memory", f"about {decimal(plan.bytes_in_memory)} besides the model"),
        ("ledger", f"grows by about {decimal(plan.bytes_on_disk)}"),
    ]
    for one in plan.earlier[: tables.LISTED]:
        kind = "contradicts this edit" if one.clashes else "has the same subject"
        rows.append((one.edit, f"{kind}: {one.text} → {one.target}"))
    terminal.print(tables.pairs(rows))
    if any(one.clashes for one in plan.earlier):
        terminal.hint("undo the edits that contradict this one, or write over them with --force")
    terminal.hint("nothing was written: omit --plan to edit")


def uses_lambda(method: str) -> bool:
    """Return whether a method weighs old keys against new ones."""
    from rebind.edit.methods import get_method

    return not get_method(method).exact
