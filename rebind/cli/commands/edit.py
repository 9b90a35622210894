"""`rebind edit`: write facts into a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rebind.cli import options
from rebind.cli.fact_input import FactInput, read_fact_or_file, with_prefix
from rebind.cli.options import (
    EditorOptions,
    LedgerOptions,
    ModelOptions,
    argument,
    as_typed,
    command_line,
    examples,
    flag,
    option,
)
from rebind.cli.session import check_positive, default_ledgers, open_editor
from rebind.cli.ui.progress import Phases
from rebind.cli.ui.tables import (
    add_answer,
    answers_table,
    counted,
    drift_rows,
    first_words,
    one_line,
    pairs,
    seconds,
    size,
    table,
)
from rebind.cli.ui.terminal import Terminal
from rebind.errors import InputError
from rebind.storage import check_replaceable

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact
    from rebind.edit.ledger.edit import Edit
    from rebind.edit.plan import Plan
    from rebind.models import FactScore

EXAMPLES = examples(
    'rebind edit "The capital of {France} is" "Rome"',
    "rebind edit facts.jsonl --model Qwen/Qwen3-0.6B --method memit --out edited/",
    "rebind edit facts.csv --plan",
    note='A line of facts.jsonl: {"prompt": "The capital of {France} is", "target": "Rome"}. CSV files and the records '
    "of CounterFact and zsRE can be read too.",
)

SEARCH = "Target search (defaults are chosen for the model)"
GENERATED, LISTED, PROBED = 8, 20, 400  # facts answered in full; rows in a table; paraphrases and neighbors asked


@dataclass(frozen=True)
class Probe:
    """A paraphrase or a neighbor of a fact, asked before and after the edit."""

    fact: int  # index of the fact
    prompt: str
    before: FactScore
    after: FactScore

    def to_json(self) -> dict[str, Any]:
        return {
            "fact": self.fact,
            "prompt": self.prompt,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


@dataclass(frozen=True)
class Answers:
    """What the base model and the edited model say."""

    continuations: list[tuple[str, str]]  # of the first facts' prompts, before and after
    paraphrases: list[Probe]
    neighbors: list[Probe]


def edit(
    facts: Annotated[str, argument("FACTS", "A prompt with its subject in braces, or a file of facts.")],
    target: Annotated[str | None, argument("TARGET", "What the model should answer to the prompt.")] = None,
    subject: Annotated[str | None, option("TEXT", "The subject, if the prompt has no braces.")] = None,
    paraphrase: Annotated[
        list[str] | None, option("TEXT", "Another wording of the prompt, asked after the edit. Can be repeated.")
    ] = None,
    neighbor: Annotated[
        list[str] | None, option("TEXT", "A prompt whose answer should not change. Can be repeated.")
    ] = None,
    method: options.Method = "memit",
    layers: options.Layers = None,
    lam: options.Lambda = None,
    steps: Annotated[int | None, option("N", "Search each target for at most N steps.", min=1, panel=SEARCH)] = None,
    rate: Annotated[float | None, option("X", "Learning rate of the search.", panel=SEARCH)] = None,
    clamp: Annotated[
        float | None,
        option("X", "Largest change of the hidden state, relative to its norm.", panel=SEARCH),
    ] = None,
    decay: Annotated[float | None, option("X", "Penalty on large changes of the hidden state.", panel=SEARCH)] = None,
    force: Annotated[bool, flag("Write the edit even if a check fails; the ledger records it.", "--force")] = False,
    plan: Annotated[bool, flag("Show layers, cost and conflicts, and write nothing.", "--plan")] = False,
    out: Annotated[Path | None, option("DIR", "Also save the edited model into this folder.")] = None,
    skip_bad: options.SkipBad = False,
    chat: options.Chat = False,
    *,
    source: EditorOptions,
    terminal: Terminal,
) -> None:
    """Write facts into a model, and show its answers before and after."""
    from rebind.edit.methods import get_method

    chosen_layers = options.parse_layers(layers)
    given = read_fact_or_file(terminal, facts, target, subject, paraphrase or [], neighbor or [], skip_bad)
    if not skip_bad:  # otherwise records that do not fit are skipped first
        given = given.without_conflicts(terminal, skip_bad=False)
    get_method(method)
    search = {"steps": steps, "rate": rate, "clamp": clamp, "decay": decay}
    for name, value in [*search.items(), ("lam", lam)]:
        check_positive(name, value, or_zero=name == "decay")
    if out is not None and not plan:
        check_replaceable(out.expanduser(), kind="checkpoint")
    phases = Phases(terminal)
    with phases.shown():
        editor = open_editor(source, phases, "preview" if plan else "create", chat=chat)
        given = _check(terminal, editor, given, skip_bad, plan)
        listed = list(given.facts)
        settings = editor.settings(method, facts=len(listed), layers=chosen_layers, lam=lam)[1]
        targets = replace(settings.targets, **{name: value for name, value in search.items() if value is not None})
        phases.steps, phases.facts = targets.steps, len(listed)
        if plan:
            planned = editor.plan(listed, method=method, layers=chosen_layers, lam=lam, targets=targets)
        else:
            undo_options = _ledger_options(editor, source)
            known = len(editor.ledger.edits)
            try:
                done = editor.rewrite_many(
                    listed, method=method, layers=chosen_layers, lam=lam, targets=targets, force=force
                )
            finally:
                for written in editor.ledger.edits[known:]:  # even if an interrupt hides its id
                    terminal.written_edits[written.id] = command_line("ledger undo", written.id, options=undo_options)
            answers = _ask(editor, done, phases)
            if out is not None:
                phases.start("saving")
                editor.save(out)
    given.print_skipped(terminal)
    if plan:
        _print_plan(terminal, planned, given.skipped)
        return
    more = {"skipped": given.skipped, "seconds": phases.seconds, "saved": None if out is None else str(out)}
    _print_edit(terminal, editor, done, answers, settings.source, more)
    if not layers and settings.source.startswith("by its depth"):
        measure = ModelOptions(source.model, source.device, source.dtype)
        terminal.suggest("measure which layers suit the model", command_line("layers", options=as_typed(measure)))
    terminal.suggest("undo", terminal.written_edits[done.id])
    terminal.suggest("ask", command_line("ask", done.facts[0].text, options=as_typed(source, chat=chat)))
    terminal.result(_document(editor, done, answers) | more, done.id)


def _check(terminal: Terminal, editor: Editor, given: FactInput, skip_bad: bool, plan: bool) -> FactInput:
    """Check that every prompt fits into the model's context, and that no two facts contradict each other."""

    def check(facts: Sequence[Fact]) -> None:
        _require_fit(editor, facts)
        if skip_bad and not plan:
            editor.requests(facts)  # behind contexts as well, which are sampled first

    try:
        check(given.facts)
    except InputError:  # all together is fast; one by one finds out which
        given = given.checked(lambda fact: check([fact]), terminal, skip_bad=skip_bad)
    return given.without_conflicts(terminal, skip_bad=skip_bad)


def _require_fit(editor: Editor, facts: Sequence[Fact]) -> None:
    from rebind.models import Prompt

    model = editor.language_model
    model.encode([fact.as_prompt() for fact in facts])
    for kind, field in (("paraphrase", "paraphrases"), ("neighbor", "neighbors")):
        try:
            model.encode([Prompt(text, fact.target) for fact in facts for text in getattr(fact, field)])
        except InputError as error:
            raise with_prefix(error, f"A {kind} cannot be asked") from None


def _ledger_options(editor: Editor, source: EditorOptions) -> str:
    """Return the options that name the ledger; the model alone is not enough if there are several of its name."""
    is_unique = default_ledgers(source.model) == [editor.ledger.path]
    return as_typed(LedgerOptions(source.model, source.ledger or (None if is_unique else editor.ledger.path)))


def _ask(editor: Editor, done: Edit, phases: Phases) -> Answers:
    """Ask the base model and the edited model for the facts, their paraphrases and their neighbors."""
    from rebind.models import Prompt

    phases.start("asking")
    numbered = list(enumerate(done.facts))
    probes = [
        [(index, Prompt(text, fact.target)) for index, fact in numbered for text in texts(fact)][:PROBED]
        for texts in (lambda fact: fact.paraphrases, lambda fact: fact.neighbors)
    ]
    prompts = [prompt for group in probes for _, prompt in group]
    model, first = editor.language_model, [fact.text for fact in done.facts[:GENERATED]]
    with editor.lifted():
        before = model.generate(first, 12), model.score(prompts)
    after = model.generate(first, 12), model.score(prompts)
    scores = iter(zip(before[1], after[1], strict=True))
    paraphrases, neighbors = ([Probe(index, prompt.text, *next(scores)) for index, prompt in group] for group in probes)
    return Answers(list(zip(before[0], after[0], strict=True)), paraphrases, neighbors)


def _document(editor: Editor, done: Edit, answers: Answers) -> dict[str, Any]:
    scores: Any = done.scores
    missing = len(done.facts) - len(answers.continuations)
    rows = zip(
        done.facts, scores["before"], scores["after"], [*answers.continuations, *[(None, None)] * missing], strict=True
    )
    return {
        "id": done.id,
        "model": editor.language_model.name,
        "fingerprint": editor.fingerprint,
        "ledger": str(editor.ledger.path),
        "method": done.method,
        "settings": done.settings,
        "forced": done.forced,
        "drift": scores.get("drift"),
        "guard": scores.get("guard"),
        "facts": [
            fact.to_json() | {"before": before | {"continues": first}, "after": after | {"continues": second}}
            for fact, before, after, (first, second) in rows
        ],
        "paraphrases": [one.to_json() for one in answers.paraphrases],
        "neighbors": [one.to_json() for one in answers.neighbors],
    }


def _print_edit(
    terminal: Terminal, editor: Editor, done: Edit, answers: Answers, source: str, more: dict[str, Any]
) -> None:
    scores: Any = done.scores
    _print_facts(terminal, list(zip(done.facts, scores["before"], scores["after"], strict=True)), answers.continuations)
    _print_probes(terminal, answers)
    settings: Any = done.settings
    spent = more["seconds"]
    phases = ", ".join(f"{name} {seconds(value)}" for name, value in spent.items() if value >= 0.05)
    lam = f", λ {settings['lam']:.4g}" if uses_lambda(done.method) else ""
    rows = [
        ("edit", f"{done.id} ({done.method}{lam})"),
        ("layers", f"{', '.join(map(str, settings['layers']))} ({source})"),
        ("model", editor.language_model.name),
        *drift_rows(scores),
        ("ledger", f"{editor.ledger.path} ({len(editor.ledger.active)} active)"),
        ("time", f"{seconds(sum(spent.values()))} ({phases})"),
    ]
    terminal.print(pairs([*rows, *([("saved", more["saved"])] if more["saved"] else [])]))


def _print_facts(terminal: Terminal, rows: list[tuple[Fact, Any, Any]], continuations: list[tuple[str, str]]) -> None:
    made = answers_table("fact")
    for index, (fact, before, after) in enumerate(rows[:LISTED]):
        texts = (first_words(before, fact.target), first_words(after, fact.target))
        texts = continuations[index] if index < len(continuations) else texts
        add_answer(made, f"{fact.text} → {fact.target}", before, after, *texts)
    terminal.print(made)
    if len(rows) > LISTED:
        terminal.hint(f"… and {counted(len(rows) - LISTED, 'more fact')}; --json lists all of them")
    if len(rows) > 1:
        exact = [sum(score["exact"] for score in scores) for scores in zip(*(row[1:] for row in rows), strict=True)]
        terminal.print(f"{exact[1]} of {len(rows)} facts answered with the whole target (before: {exact[0]})")


def _print_probes(terminal: Terminal, answers: Answers) -> None:
    if answers.paraphrases:
        made = answers_table("paraphrase")
        for one in answers.paraphrases[:LISTED]:
            add_answer(made, one.prompt, one.before.to_json(), one.after.to_json(), one.before.says, one.after.says)
        exact = sum(one.after.exact for one in answers.paraphrases)
        terminal.print(made, f"{exact} of {len(answers.paraphrases)} paraphrases answered with the whole target")
    if answers.neighbors:
        made = table("neighbor", "before", "after", "")
        same = [one.before.says == one.after.says for one in answers.neighbors]
        for one, is_same in list(zip(answers.neighbors, same, strict=True))[:LISTED]:
            says = (one_line(one.before.says), one_line(one.after.says))
            made.add_row(one.prompt, *says, "same" if is_same else "changed")
        terminal.print(made, f"{sum(same)} of {len(same)} neighbors answered as before")


def _print_plan(terminal: Terminal, plan: Plan, skipped: int) -> None:
    moments = "cached" if plan.moments_cached else f"to be collected from {plan.moment_tokens:,} tokens"
    rows = [
        ("facts", plan.facts),
        ("method", plan.method),
        ("layers", f"{', '.join(map(str, plan.layers))} ({plan.source})"),
        *([("λ", _planned_lambda(plan))] if uses_lambda(plan.method) else []),
        ("search", ", ".join(f"{name} {value:g}" for name, value in asdict(plan.targets).items())),
        ("old keys", moments),
        ("tokens", f"{plan.prompt_tokens:,} in all prompts"),
        ("time", f"about {seconds(plan.seconds)}"),
        ("memory", f"about {size(plan.bytes_in_memory)} besides the model"),
        ("ledger", f"grows by about {size(plan.bytes_on_disk)}"),
    ]
    for one in plan.earlier[:LISTED]:
        kind = "contradicts this edit" if one.clashes else "has the same subject"
        rows.append((one.edit, f"{kind}: {one.text} → {one.target}"))
    terminal.print(pairs(rows))
    if any(one.clashes for one in plan.earlier):
        terminal.hint("undo the edits that contradict this one, or overwrite them with --force")
    terminal.hint("nothing was written: omit --plan to edit")
    terminal.result({"plan": asdict(plan), "skipped": skipped}, f"{plan.seconds:.1f}")


def _planned_lambda(plan: Plan) -> str:
    if plan.lam is not None:
        return f"{plan.lam:.4g}"
    published = f" (published runs on this model used {plan.published_lam:,.0f})" if plan.published_lam else ""
    return f"chosen from the keys{published}"


def uses_lambda(method: str) -> bool:
    """Return whether a method weighs old keys against new ones."""
    from rebind.edit.methods import get_method

    return not get_method(method).exact
