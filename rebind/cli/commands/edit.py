"""`rebind edit`: write facts into a model."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.filesize import decimal
from rich.text import Text

from rebind.cli import completion
from rebind.cli import options as opt
from rebind.cli.fact_input import facts_of_file, fits_context, has_one_target, print_skipped, single_fact, valid_facts
from rebind.cli.session import LedgerUse, default_ledgers, describe, open_editor
from rebind.cli.ui import Phases, Terminal, tables
from rebind.cli.ui.tables import last_words, one_line, seconds
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.storage import check_replaceable

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.readers import Facts
    from rebind.edit.ledger.edit import Edit
    from rebind.edit.plan import Plan

EXAMPLES = opt.examples(
    'rebind edit "The capital of {France} is" "Rome" --question "Which city is the capital of France?"',
    "rebind edit facts.jsonl --model Qwen/Qwen3-0.6B --method memit --out edited/",
    "rebind edit facts.csv --plan",
    note='A line of facts.jsonl: {"prompt": "The capital of {France} is", "target": "Rome"}. Optional fields are '
    "subject and old (texts), and paraphrases, questions, keep, neighbors and tags (lists; in a cell of a CSV file, "
    "separated by ' | '). The records of CounterFact and zsRE can be read too.",
)

SEARCH = "Target search (by default chosen for the model)"
SMALLEST = 1e-6  # rate and clamp of a search
ANSWERED = 8  # facts, at most, that the model answers freely
SHORT = 12  # tokens of an answer that is compared


def edit(
    facts: Annotated[str, opt.argument("FACTS", "A prompt with its subject in braces, or a file of facts.")],
    target: Annotated[str | None, opt.argument("TARGET", "What the model should answer to the prompt.")] = None,
    subject: opt.Subject = None,
    paraphrase: Annotated[
        list[str] | None, opt.value("TEXT", "Another wording of the prompt. Can be repeated.")
    ] = None,
    question: Annotated[
        list[str] | None,
        opt.value("TEXT", "A question that the target answers. Can be repeated.", default="made from the prompt"),
    ] = None,
    keep: Annotated[
        list[str] | None, opt.value("TEXT", "A prompt about the subject whose answer should stay. Can be repeated.")
    ] = None,
    neighbor: Annotated[
        list[str] | None, opt.value("TEXT", "A prompt about another subject, to compare its answers. Can be repeated.")
    ] = None,
    framings: Annotated[
        str | None,
        opt.value(
            "LIST",
            "How the fact will be asked: start, plain, text, paraphrase, chat.",
            default="all that apply",
            autocompletion=completion.list_of(*completion.FRAMINGS),
        ),
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
    decay: Annotated[float | None, opt.value("X", "Penalty on the size of the change.", min=0, panel=SEARCH)] = None,
    kl: Annotated[
        float | None, opt.value("X", "Penalty on predicting other words after the subject.", min=0, panel=SEARCH)
    ] = None,
    keep_weight: Annotated[
        float | None, opt.value("X", "Weight of keeping other answers about the subject.", min=0, panel=SEARCH)
    ] = None,
    contexts: Annotated[
        int | None, opt.value("N", "Sample N contexts to put before the prompt.", min=0, panel=SEARCH)
    ] = None,
    force: Annotated[bool, opt.flag("--force", "Write the edit even if a check fails; the ledger records it.")] = False,
    plan: Annotated[bool, opt.flag("--plan", "Show layers, cost and conflicts, and write nothing.")] = False,
    out: Annotated[Path | None, opt.value("DIR", "Also save the edited model into this folder.")] = None,
    skip_bad: opt.SkipBad = False,
    *,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Write facts into a model, and report in which framings it says them and what else changed."""
    from rebind.edit.methods import get_method
    from rebind.edit.targets.framings import require_framings

    get_method(method)
    chosen_layers, chosen_framings = opt.parse_layers(layers), opt.parse_names(framings)
    require_framings(chosen_framings or ())
    search: dict[str, Any] = {"steps": steps, "rate": rate, "clamp": clamp, "decay": decay}
    search |= {"kl": kl, "keep": keep_weight}
    lists = {"paraphrases": paraphrase, "questions": question, "keep": keep, "neighbors": neighbor}
    details = {"subject": subject, **{name: texts or () for name, texts in lists.items()}}
    input_facts = _read(terminal, facts, target, details, skip_bad)
    if out is not None and not plan:
        check_replaceable(out.expanduser(), kind="checkpoint")
    if plan and (config := _config_alone(source.model)) is not None:
        chosen: dict[str, Any] = {"method": method, "layers": chosen_layers, "lam": lam, "dtype": source.dtype}
        chosen |= {"framings": chosen_framings, "contexts": contexts, "moment_tokens": source.moment_tokens}
        _show_plan(terminal, _plan_config(config, input_facts, search, chosen), input_facts)
        return
    with Phases(terminal) as phases:
        use: LedgerUse = "preview" if plan else "create"
        editor = open_editor(source, phases, use, framings=chosen_framings, contexts=contexts)
        fits = fits_context(editor, behind_contexts=skip_bad and not plan)
        input_facts = valid_facts(terminal, input_facts, fits, skip_bad)
        settings = editor.settings(method, facts=len(input_facts), layers=chosen_layers, lam=lam)
        targets = replace(settings.targets, **{name: value for name, value in search.items() if value is not None})
        choices: dict[str, Any] = {"method": method, "layers": chosen_layers, "lam": lam, "targets": targets}
        phases.steps, phases.facts = targets.steps, len(input_facts)
        if plan:
            estimate = editor.plan(input_facts.facts, **choices)
        else:
            earlier = len(editor.ledger.edits)
            try:
                new_edit = editor.rewrite_many(input_facts.facts, **choices, force=force)
            finally:  # an interrupt may hide an edit that is written
                for later in editor.ledger.edits[earlier:]:
                    terminal.written_edits[later.id] = undo_command(editor, later, source)
            if not terminal.writes:
                return
            report = _ask(editor, new_edit, phases)
            if out is not None:
                phases.begin("saving")
                editor.save(out.expanduser())
    if plan:
        _show_plan(terminal, estimate, input_facts)
        return
    print_skipped(terminal, input_facts)
    saved = None if out is None else str(out)
    report |= {"skipped": len(input_facts.skipped), "seconds": phases.seconds, "saved": saved}
    _print_edit(terminal, editor, report, settings.source)
    if settings.source.startswith("by its depth"):
        model = opt.ModelOptions(source.model, source.device, source.device_map, source.dtype)
        terminal.suggest("measure the best layers", opt.command_line("layers", options=opt.as_typed(model)))
    terminal.suggest("undo", terminal.written_edits[new_edit.id])
    terminal.suggest("ask", opt.command_line("ask", new_edit.facts[0].text, options=opt.as_typed(source)))
    terminal.result(report, new_edit.id)


def _read(terminal: Terminal, facts: str, target: str | None, details: dict[str, Any], skip_bad: bool) -> Facts:
    """Read a file of facts, or a single fact; `details` are the subject and the lists of texts of the latter."""
    is_file = os.path.isfile(facts)  # noqa: PTH113 - False for a prompt that is too long to be a file's name
    if target is not None and not (is_file and details["subject"] is None and "{" not in facts):
        return single_fact(facts, target, **details)
    if not is_file and ("{" in facts or " " in facts.strip()):
        example = 'rebind edit "The capital of {France} is" "Rome"'
        raise InputError(f"The prompt {facts!r} has no target", advice=f"Add it: {example}", code="missing_target")
    if target or any(details.values()):
        problem = f"{facts} is a file of facts, and a target or options of a single fact were given as well"
        advice = "Write targets, subjects, paraphrases, questions, prompts to keep and neighbors into the file"
        raise InputError(problem, advice=advice, code="file_and_fact")
    return valid_facts(terminal, facts_of_file(terminal, facts, skip_bad), has_one_target(), skip_bad)


def undo_command(editor: Editor, edit: Edit, source: opt.EditorOptions) -> str:
    """Return the command that undoes an edit; the model alone does not name the ledger if several have its name."""
    is_unique = default_ledgers(source.model) == [editor.ledger.path]
    ledger = source.ledger or (None if is_unique else editor.ledger.path)
    return opt.command_line("ledger undo", edit.id, options=opt.as_typed(opt.LedgerOptions(source.model, ledger)))


def _ask(editor: Editor, new_edit: Edit, phases: Phases) -> dict[str, Any]:
    """Let the base model and the edited model answer freely, and return everything that is known about an edit."""
    from rebind.edit.answers import free_answers

    phases.begin("asking")
    model, listed = editor.language_model, new_edit.facts[:ANSWERED]
    scores: Any = new_edit.scores
    outcome = scores["outcome"]
    changed = [one["prompt"] for one in outcome["changed"][: tables.LISTED]]
    prompts = [*(fact.text for fact in listed), *changed]
    with editor.base_model():
        before = model.generate(prompts, SHORT)
    after, answers = model.generate(prompts, SHORT), free_answers(model, listed, editor.framings)
    facts = []
    for index, fact in enumerate(new_edit.facts):
        is_answered = index < len(listed)
        states = {
            when: scores[when][index] | {"continues": texts[index] if is_answered else None}
            for when, texts in (("before", before), ("after", after))
        }
        free = [asdict(answer) for answer in answers[index]] if is_answered else None
        facts.append(fact.to_json() | {"text": fact.text, **states, "answers": free})
    continued = zip(outcome["changed"], before[len(listed) :], after[len(listed) :], strict=False)
    rows = [one | {"before": old, "after": new} for one, old, new in continued]
    outcome = outcome | {"changed": [*rows, *outcome["changed"][len(rows) :]]}
    about = {"id": new_edit.id, **describe(editor), "method": new_edit.method, "settings": new_edit.settings}
    checks = {"forced": new_edit.forced, "drift": scores["drift"], "guard": scores["guard"]}
    checks |= {"memory": scores["memory"]} if "memory" in scores else {}
    return {**about, **checks, "facts": facts, "outcome": outcome}


def _print_outcome(terminal: Terminal, report: dict[str, Any]) -> None:
    """Print in which framings the facts are said, and what else stayed."""
    facts, outcome = report["facts"], report["outcome"]
    free = [answer for fact in facts for answer in fact["answers"] or ()]
    if len(facts) == 1:
        grid = tables.table("framing", "said", "asked", "answer")
        for one in free:
            mark = Text("yes", style="bold green") if one["said"] else Text("no", style="yellow")
            grid.add_row(one["framing"], mark, last_words(one["prompt"]), one_line(one["answer"]))
        terminal.print(grid, _summary(free))
    else:
        grid = tables.table("framing", "first choice", "freely said", right=("first choice", "freely said"))
        for framing in (name for name in report["settings"]["framings"] if name in outcome["said"]):
            answers = [one["said"] for one in free if one["framing"] == framing]
            grid.add_row(framing, percent(outcome["said"][framing]), f"{sum(answers)} of {len(answers)}")
        first = min(len(facts), ANSWERED)
        terminal.print(grid)
        terminal.hint(f"first choice: share of the facts; freely said: answers about the first {first} facts")
    terminal.print(tables.pairs(tables.kept_rows(outcome)))
    if changed := outcome["changed"]:
        grid = tables.table("changed", "before", "after")
        for one in changed[: tables.LISTED]:
            grid.add_row(one["prompt"], one_line(one["before"]), one_line(one["after"]))
        terminal.print(grid)
        tables.print_number_left_out(terminal, changed)


def _summary(answers: list[dict[str, Any]]) -> Text:
    """Return in how many framings a fact is said: in those in which every answer says it."""
    framings = {one["framing"]: True for one in answers}
    for one in answers:
        framings[one["framing"]] &= one["said"]
    missing = [framing for framing, is_said in framings.items() if not is_said]
    if not missing:
        return Text(f"the fact holds in all {len(framings)} framings", style="green")
    number = len(framings) - len(missing)
    few = "only " if 0 < 2 * number < len(framings) else ""
    count = f"{few}{number}" if number else "none"
    return Text(f"the fact holds in {count} of {len(framings)} framings, not in: {', '.join(missing)}", "yellow")


def _print_edit(terminal: Terminal, editor: Editor, report: dict[str, Any], source: str) -> None:
    tables.print_answers(terminal, report["facts"])
    _print_outcome(terminal, report)
    settings, spent = report["settings"], report["seconds"]
    lam = f", λ {settings['lam']:.4g}" if uses_lambda(report["method"]) else ""
    phases = ", ".join(f"{name} {seconds(value)}" for name, value in spent.items() if value >= 0.05)
    properties = [
        ("edit", f"{report['id']} ({report['method']}{lam})"),
        ("layers", f"{', '.join(map(str, settings['layers']))} ({source})"),
        ("model", report["model"]),
        *tables.drift_rows(report),
        *tables.memory_rows(report),
        ("ledger", f"{report['ledger']} ({len(editor.ledger.active)} active)"),
        ("time", f"{seconds(sum(spent.values()))} ({phases})"),
        *([("saved", report["saved"])] if report["saved"] else []),
    ]
    terminal.print(tables.pairs(properties))


def _config_alone(model: str) -> Path | None:
    """Return the path of a model that is given by its config alone: a JSON file, or a folder without weights."""
    path = Path(model).expanduser()
    if model == opt.DEFAULT_MODEL or not path.exists() or (path.is_file() and path.suffix != ".json"):
        return None
    from rebind.edit.outline import is_config_alone

    return path if is_config_alone(path) else None


def _plan_config(config: Path, facts: Facts, search: dict[str, Any], chosen: dict[str, Any]) -> Plan:
    """Plan an edit of a model without weights; `search` and `chosen` are options, None where they were not given."""
    from rebind.edit.methods import get_method
    from rebind.edit.plan import plan_from_config
    from rebind.edit.targets import ContextSettings

    targets = {name: value for name, value in search.items() if value is not None}
    options = {name: value for name, value in chosen.items() if value is not None}
    if "dtype" in options:
        options["dtype"] = opt.parse_dtype(options["dtype"])
    if "contexts" in options:
        options["contexts"] = ContextSettings.of(options["contexts"])
    if targets:
        options["targets"] = replace(get_method(options["method"]).targets, **targets)
    return plan_from_config(config, facts.facts, **options)


def _show_plan(terminal: Terminal, plan: Plan, facts: Facts) -> None:
    print_skipped(terminal, facts)
    _print_plan(terminal, plan)
    terminal.result({"plan": asdict(plan), "skipped": len(facts.skipped)}, f"{plan.seconds:.1f}")


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
        ("model", f"{plan.parameters:,} parameters, {decimal(plan.weight_bytes)}"),
        (
            "memory",
            f"about {decimal(plan.bytes_in_memory)} besides the model, {decimal(plan.bytes_per_site)} per layer",
        ),
        ("devices", ", or ".join(f"{number} with {size} GiB" for size, number in plan.devices.items())),
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
