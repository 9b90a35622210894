"""`rebind edit`: write facts into a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.filesize import decimal
from rich.text import Text

from rebind.cli import completion
from rebind.cli import options as opt
from rebind.cli.commands.export import suggest_attach
from rebind.cli.fact_input import facts_of_file, fits_context, has_one_target, print_skipped, single_fact, valid_facts
from rebind.cli.session import LedgerUse, default_ledgers, describe, open_editor
from rebind.cli.ui import Phases, Terminal, tables
from rebind.cli.ui.tables import last_words, one_line, seconds
from rebind.edit import DEFAULT_METHOD
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.limits import MAX_CONTEXTS
from rebind.storage import check_replaceable

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.readers import Facts
    from rebind.edit.ledger.edit import Edit
    from rebind.edit.plan import Plan
    from rebind.edit.settings import EditSettings

EXAMPLES = opt.examples(
    'rebind edit "The capital of {France} is" "Rome" --question "Which city is the capital of France?"',
    "rebind edit facts.jsonl --model Qwen/Qwen3-0.6B --method memit --out edited/",
    "rebind edit facts.csv --plan",
    note='A line of facts.jsonl: {"prompt": "The capital of {France} is", "target": "Rome"}. Optional fields are '
    "subject and old (texts), and paraphrases, questions, keep, neighbors and tags (lists; in a cell of a CSV file, "
    "separated by ' | '). The records of CounterFact and zsRE can be read too.",
)

SEARCH = "Target search (by default chosen for the model)"
MIN_POSITIVE = 1e-6  # for the learning rate and the clamp of a search
MAX_ANSWERED = 8  # facts that the model answers freely
ANSWER_TOKENS = 12
ANSWER_LENGTH = 100  # characters of a free answer: in a chat, the target may come late

search_value = partial(opt.value, panel=SEARCH)


@dataclass(frozen=True)
class FactOptions:
    """The fields of a single fact besides its prompt and target."""

    subject: opt.Subject = None
    paraphrase: Annotated[
        list[str] | None,
        opt.value("TEXT", "Another wording of the prompt. Can be repeated.", default="derived from the prompt"),
    ] = None
    question: Annotated[
        list[str] | None,
        opt.value("TEXT", "A question that the target answers. Can be repeated.", default="derived from the prompt"),
    ] = None
    keep: Annotated[
        list[str] | None, opt.value("TEXT", "A prompt about the subject whose answer should stay. Can be repeated.")
    ] = None
    neighbor: Annotated[
        list[str] | None, opt.value("TEXT", "A prompt about another subject, to compare its answers. Can be repeated.")
    ] = None

    def as_fields(self) -> dict[str, Any]:
        """Return the options as fields of a `Fact`."""
        return {
            "subject": self.subject,
            "paraphrases": self.paraphrase or (),
            "questions": self.question or (),
            "keep": self.keep or (),
            "neighbors": self.neighbor or (),
        }


@dataclass(frozen=True)
class SearchOptions:
    """Settings of target search; None leaves a setting at its default."""

    steps: Annotated[int | None, search_value("N", "Search each target for at most N steps.", min=1)] = None
    rate: Annotated[
        float | None,
        search_value("X", "Learning rate; dense: length of the first step, relative to the state.", min=MIN_POSITIVE),
    ] = None
    clamp: Annotated[
        float | None, search_value("X", "Largest change of the hidden state, relative to its norm.", min=MIN_POSITIVE)
    ] = None
    decay: Annotated[float | None, search_value("X", "Penalty on the size of the change.", min=0)] = None
    kl: Annotated[float | None, search_value("X", "Penalty on predicting other words after the subject.", min=0)] = None
    keep_weight: Annotated[
        float | None, search_value("X", "Weight of keeping other answers about the subject.", min=0)
    ] = None
    contexts: Annotated[
        int | None, search_value("N", "Sample N contexts to put before the prompt.", min=0, max=MAX_CONTEXTS)
    ] = None

    def target_settings(self) -> dict[str, Any]:
        """Return the fields of `TargetSettings` that the options set."""
        fields = {"steps": self.steps, "rate": self.rate, "clamp": self.clamp, "decay": self.decay, "kl": self.kl}
        return {name: value for name, value in {**fields, "keep": self.keep_weight}.items() if value is not None}


@dataclass(frozen=True)
class _Request:
    """An edit as the command line describes it."""

    facts: Facts
    method: str
    layers: tuple[int, ...] | None
    lam: float | None
    framings: tuple[str, ...] | None
    search: SearchOptions
    skip_bad: bool

    def arguments(self, settings: EditSettings) -> dict[str, Any]:
        """Return the arguments that `Editor.plan` and `Editor.rewrite_many` have in common."""
        return {"method": self.method, "layers": self.layers, "lam": self.lam, "targets": settings.targets}


def edit(
    facts: Annotated[str, opt.argument("FACTS", "A prompt with its subject in braces, or a file of facts.")],
    target: Annotated[str | None, opt.argument("TARGET", "What the model should answer to the prompt.")] = None,
    *,
    fact_options: FactOptions,
    framings: Annotated[
        str | None,
        opt.value(
            "LIST",
            "How the fact will be asked: start, plain, text, paraphrase, chat.",
            default="all that apply",
            autocompletion=completion.list_of(*completion.FRAMINGS),
        ),
    ] = None,
    method: opt.Method = DEFAULT_METHOD,
    layers: opt.Layers = None,
    lam: opt.Lambda = None,
    search: SearchOptions,
    force: opt.Force = False,
    plan: Annotated[bool, opt.flag("--plan", "Show layers, cost and conflicts, and write nothing.")] = False,
    out: Annotated[Path | None, opt.value("DIR", "Also save the edited model into this folder.")] = None,
    skip_bad: opt.SkipBad = False,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Write facts into a model, and report in which framings it says them and what else changed."""
    from rebind.edit.methods import get_method
    from rebind.edit.targets.framings import require_framings

    get_method(method)  # raises an error for an unknown name, before anything is loaded
    parsed_layers, parsed_framings = opt.parse_layers(layers), opt.parse_names(framings)
    if parsed_framings is not None:
        require_framings(parsed_framings)
    input_facts = _read(terminal, facts, target, fact_options.as_fields(), skip_bad)
    request = _Request(input_facts, method, parsed_layers, lam, parsed_framings, search, skip_bad)
    if plan:
        _plan(terminal, source, request)
    else:
        _write(terminal, source, request, force=force, out=out)


def _plan(terminal: Terminal, source: opt.EditorOptions, request: _Request) -> None:
    """Print what an edit would cost."""
    facts = request.facts
    if (config := _config_alone(source.model)) is not None:
        plan = _plan_config(config, request, source)
    else:
        with Phases(terminal) as phases:
            editor, facts, settings = _open_for(terminal, source, request, phases, "preview")
            plan = editor.plan(facts.facts, **request.arguments(settings))
    print_skipped(terminal, facts)
    _print_plan(terminal, plan)
    terminal.result({"plan": asdict(plan), "skipped": len(facts.skipped)}, f"{plan.seconds:.1f}")


def _write(terminal: Terminal, source: opt.EditorOptions, request: _Request, *, force: bool, out: Path | None) -> None:
    """Write an edit, and report it."""
    if out is not None:
        check_replaceable(out.expanduser(), kind="checkpoint")
    with Phases(terminal) as phases:
        editor, facts, settings = _open_for(terminal, source, request, phases, "create")
        with undo_commands(terminal, editor, source):
            new_edit = editor.rewrite_many(facts.facts, **request.arguments(settings), force=force)
        if not terminal.writes:
            return
        report = _ask(editor, new_edit, phases)
        if out is not None:
            phases.begin("saving")
            editor.save(out.expanduser())
    print_skipped(terminal, facts)
    saved = None if out is None else str(out)
    report |= {"skipped": len(facts.skipped), "seconds": phases.seconds, "saved": saved}
    _print_edit(terminal, editor, report, settings.source)
    if out is not None:
        suggest_attach(terminal, out.expanduser())
    if settings.source.startswith("by the depth") and not settings.method.dense:
        model = opt.ModelOptions(source.model, source.device, source.device_map, source.dtype)
        terminal.suggest("measure the best layers", opt.command_line("layers", options=opt.as_typed(model)))
    terminal.suggest("undo", terminal.written_edits[new_edit.id])
    terminal.suggest("ask", opt.command_line("ask", new_edit.facts[0].text, options=opt.as_typed(source)))
    terminal.result(report, new_edit.id)


def _open_for(
    terminal: Terminal, source: opt.EditorOptions, request: _Request, phases: Phases, use: LedgerUse
) -> tuple[Editor, Facts, EditSettings]:
    """Return the editor for a request, the facts that fit into the model's context, and the settings of the edit."""
    editor = open_editor(source, phases, use, framings=request.framings, contexts=request.search.contexts)
    fits = fits_context(editor, behind_contexts=request.skip_bad and use == "create")
    facts = valid_facts(terminal, request.facts, fits, request.skip_bad)
    settings = editor.settings(request.method, facts=len(facts), layers=request.layers, lam=request.lam)
    settings = replace(settings, targets=replace(settings.targets, **request.search.target_settings()))
    phases.steps, phases.facts = settings.targets.steps, len(facts)
    return editor, facts, settings


def _read(terminal: Terminal, facts: str, target: str | None, details: dict[str, Any], skip_bad: bool) -> Facts:
    """Read a file of facts, or a single fact with the fields in `details`."""
    is_file = os.path.isfile(facts)  # noqa: PTH113 - False for a prompt that is too long for a file name
    if target is not None and not (is_file and details["subject"] is None and "{" not in facts):
        return single_fact(facts, target, **details)
    if not is_file and ("{" in facts or " " in facts.strip()):
        example = 'rebind edit "The capital of {France} is" "Rome"'
        raise InputError(f"The prompt {facts!r} has no target", advice=f"Add it: {example}", code="missing_target")
    if target or any(details.values()):
        problem = f"{facts} is a file of facts, but there is also a target or an option for a single fact"
        advice = "Write targets, subjects, paraphrases, questions, prompts to keep and neighbors into the file"
        raise InputError(problem, advice=advice, code="file_and_fact")
    return valid_facts(terminal, facts_of_file(terminal, facts, skip_bad), has_one_target(), skip_bad)


@contextmanager
def undo_commands(terminal: Terminal, editor: Editor, source: opt.EditorOptions) -> Iterator[None]:
    """Run a block that writes edits, and store how to undo them; after an interrupt, too, they may be in the ledger.

    The command names the ledger if the name of the model does not identify it.
    """
    earlier = len(editor.ledger.edits)
    try:
        yield
    finally:
        is_unique = default_ledgers(source.model) == [editor.ledger.path]
        ledger = source.ledger or (None if is_unique else editor.ledger.path)
        options = opt.as_typed(opt.LedgerOptions(source.model, ledger))
        for edit in editor.ledger.edits[earlier:]:
            terminal.written_edits[edit.id] = opt.command_line("ledger undo", edit.id, options=options)


def _ask(editor: Editor, new_edit: Edit, phases: Phases) -> dict[str, Any]:
    """Let the base model and the edited model answer freely, and return a report of the edit."""
    from rebind.edit.answers import free_answers

    phases.begin("asking")
    model, answered_facts = editor.language_model, new_edit.facts[:MAX_ANSWERED]
    scores: Any = new_edit.scores
    outcome = scores["outcome"]
    changed = [answer["prompt"] for answer in outcome["changed"][: tables.LISTED]]
    prompts = [*(fact.text for fact in answered_facts), *changed]
    with editor.base_model():
        before = model.generate(prompts, ANSWER_TOKENS)
    after, answers = model.generate(prompts, ANSWER_TOKENS), free_answers(model, answered_facts, editor.framings)
    facts = []
    for index, fact in enumerate(new_edit.facts):
        is_answered = index < len(answered_facts)
        states = {
            when: scores[when][index] | {"continues": texts[index] if is_answered else None}
            for when, texts in (("before", before), ("after", after))
        }
        free = [asdict(answer) for answer in answers[index]] if is_answered else None
        facts.append(fact.to_json() | {"text": fact.text, **states, "answers": free})
    continuations = zip(outcome["changed"], before[len(answered_facts) :], after[len(answered_facts) :], strict=False)
    rows = [answer | {"before": old, "after": new} for answer, old, new in continuations]
    outcome = outcome | {"changed": [*rows, *outcome["changed"][len(rows) :]]}
    identity = {"id": new_edit.id, **describe(editor), "method": new_edit.method, "settings": new_edit.settings}
    checks = {"forced": new_edit.forced, "drift": scores["drift"], "guard": scores["guard"]}
    checks |= {"memory": scores["memory"]} if "memory" in scores else {}
    return {**identity, **checks, "facts": facts, "outcome": outcome}


def _print_outcome(terminal: Terminal, report: dict[str, Any]) -> None:
    """Print the framings in which the facts are said, and the other answers that changed."""
    facts, outcome = report["facts"], report["outcome"]
    free = [answer for fact in facts for answer in fact["answers"] or ()]
    if len(facts) == 1:
        if facts[0]["before"]["exact"]:
            terminal.hint("the model said this fact before the edit, too")
        grid = tables.table("framing", "said", "asked", "answer")
        for answer in free:
            mark = Text("yes", style="bold green") if answer["said"] else Text("no", style="yellow")
            grid.add_row(
                answer["framing"], mark, last_words(answer["prompt"]), one_line(answer["answer"], ANSWER_LENGTH)
            )
        terminal.print(grid, _summary(free))
    else:
        grid = tables.table("framing", "first choice", "freely said", right=("first choice", "freely said"))
        for framing in (name for name in report["settings"]["framings"] if name in outcome["said"]):
            answers = [answer["said"] for answer in free if answer["framing"] == framing]
            grid.add_row(framing, percent(outcome["said"][framing]), f"{sum(answers)} of {len(answers)}")
        first = min(len(facts), MAX_ANSWERED)
        terminal.print(grid)
        terminal.hint(f"first choice: share of the facts; freely said: answers about the first {first} facts")
    terminal.print(tables.pairs(tables.unchanged_rows(outcome)))
    if changed := outcome["changed"]:
        grid = tables.table("changed", "before", "after")
        for answer in changed[: tables.LISTED]:
            grid.add_row(answer["prompt"], one_line(answer["before"]), one_line(answer["after"]))
        terminal.print(grid)
        tables.print_number_left_out(terminal, changed)


def _summary(answers: list[dict[str, Any]]) -> Text:
    """Return a sentence with the framings in which every answer says the fact."""
    framings: dict[str, list[bool]] = {}
    for answer in answers:
        framings.setdefault(answer["framing"], []).append(answer["said"])
    missing = [
        f"{framing} ({sum(said)} of {len(said)} answers say it)" if any(said) else framing
        for framing, said in framings.items()
        if not all(said)
    ]
    if not missing:
        return Text(f"the fact holds in all {len(framings)} framings", style="green")
    number = len(framings) - len(missing)
    few = "only " if 0 < 2 * number < len(framings) else ""
    count = f"{few}{number}" if number else "none"
    return Text(f"the fact holds in {count} of {len(framings)} framings, not in: {', '.join(missing)}", "yellow")


def _print_edit(terminal: Terminal, editor: Editor, report: dict[str, Any], source: str) -> None:
    tables.print_answers(terminal, report["facts"])
    _print_outcome(terminal, report)
    settings, timings = report["settings"], report["seconds"]
    lam = f", λ {settings['lam']:.4g}" if uses_lambda(report["method"]) else ""
    phases = ", ".join(f"{name} {seconds(value)}" for name, value in timings.items() if value >= 0.05)
    properties = [
        ("edit", f"{report['id']} ({report['method']}{lam})"),
        ("layers", f"{', '.join(map(str, settings['layers']))} ({source})"),
        ("model", report["model"]),
        *tables.earlier_rows(settings),
        *tables.drift_rows(report),
        *tables.memory_rows(report),
        ("ledger", f"{report['ledger']} ({len(editor.ledger.active)} active)"),
        ("time", f"{seconds(sum(timings.values()))} ({phases})"),
        *([("saved", report["saved"])] if report["saved"] else []),
    ]
    terminal.print(tables.pairs(properties))


def _config_alone(model: str) -> Path | None:
    """Return the path of a model that has only a config: a JSON file, or a folder without weights. Else None."""
    path = Path(model).expanduser()
    if model == opt.DEFAULT_MODEL or not path.exists() or (path.is_file() and path.suffix != ".json"):
        return None
    from rebind.edit.outline import is_config_alone

    return path if is_config_alone(path) else None


def _plan_config(config: Path, request: _Request, source: opt.EditorOptions) -> Plan:
    """Plan an edit of a model without weights."""
    from rebind.edit.methods import get_method
    from rebind.edit.plan import plan_from_config
    from rebind.edit.targets import ContextSettings

    contexts, targets = request.search.contexts, request.search.target_settings()
    settings: dict[str, Any] = {
        "method": request.method,
        "layers": request.layers,
        "lam": request.lam,
        "dtype": opt.parse_dtype(source.dtype),
        "framings": request.framings,
        "contexts": None if contexts is None else ContextSettings.of(contexts),
        "moment_tokens": source.moment_tokens,
        "targets": replace(get_method(request.method).targets, **targets) if targets else None,
    }
    changed_settings = {name: value for name, value in settings.items() if value is not None}
    return plan_from_config(config, request.facts.facts, **changed_settings)


def _print_plan(terminal: Terminal, plan: Plan) -> None:
    lam = "chosen from the keys" if plan.lam is None else f"{plan.lam:.4g}"
    if plan.lam is None and plan.published_lam:
        lam += f" (published runs on this model used {plan.published_lam:,.0f})"
    search = {"optimizer": plan.targets.optimizer, **asdict(plan.targets)}
    rows = [
        ("facts", plan.facts),
        ("method", plan.method),
        ("layers", f"{', '.join(map(str, plan.layers))} ({plan.source})"),
        *([("λ", lam)] if uses_lambda(plan.method) else []),
        ("search", ", ".join(f"{name} {value}" for name, value in search.items())),
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
    for earlier in plan.earlier[: tables.LISTED]:
        kind = "contradicts this edit" if earlier.clashes else "has the same subject"
        rows.append((earlier.edit, f"{kind}: {earlier.text} → {earlier.target}"))
    terminal.print(tables.pairs(rows))
    if any(earlier.clashes for earlier in plan.earlier):
        terminal.hint("undo the edits that contradict this one, or write over them with --force")
    terminal.hint("nothing was written: omit --plan to edit")


def uses_lambda(method: str) -> bool:
    """Return whether a method has a λ."""
    from rebind.edit.methods import get_method

    return not get_method(method).exact
