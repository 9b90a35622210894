"""`rebind learn`: write the facts that a text states."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rebind.cli import options as opt
from rebind.cli.commands.edit import undo_commands
from rebind.cli.session import describe, open_editor
from rebind.cli.ui import Phases, Terminal, tables
from rebind.cli.ui.tables import counted, one_line, seconds
from rebind.edit import DEFAULT_METHOD
from rebind.edit.wording import percent
from rebind.errors import InputError, StorageError

if TYPE_CHECKING:
    from rebind.edit.learning import Statement, TextFacts

EXAMPLES = opt.examples(
    "rebind learn notes.txt",
    'rebind learn "The capital of France is Lyon. It was moved there by Napoleon." --yes',
    "rebind learn notes.txt --json",
    note="Facts are found by patterns: 'The capital of France is Lyon', 'The Xbox is made by Nintendo', 'Marie Curie "
    "was born in Oslo'. What was not understood is listed. You are asked before anything is written; --json alone "
    "prints the facts and writes nothing, and --json --yes writes them.",
)
LONGEST_PIECE = 72  # characters of a piece of text that was not understood


def learn(
    text: Annotated[str, opt.argument("TEXT", "A text file, a passage in quotes, or - for standard input.")],
    yes: Annotated[bool, opt.flag("--yes", "Write all new facts without asking.", "-y")] = False,
    method: opt.Method = DEFAULT_METHOD,
    layers: opt.Layers = None,
    steps: Annotated[
        int | None, opt.value("N", "Search each target for at most N steps.", default="chosen for the model", min=1)
    ] = None,
    force: opt.Force = False,
    *,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Find the facts in a text, show them, and write those that you approve and the model does not say yet."""
    from dataclasses import replace

    from rebind.edit.methods import get_method

    get_method(method)
    chosen_layers = opt.parse_layers(layers)
    if not (yes or terminal.as_json):
        _require_person(terminal, text)
    passage = _read(text)
    with Phases(terminal) as phases:
        from rebind.edit.learning import facts_in_text

        editor = open_editor(source, phases, "create" if yes or not terminal.as_json else "preview")
        phases.begin("asking")
        facts = facts_in_text(editor.language_model, passage)
    _print_facts(terminal, facts)
    approved = list(facts.new) if yes else [] if terminal.as_json else _ask(terminal, facts.new)
    spent, id, scores = phases.seconds, None, None
    if approved:
        with Phases(terminal) as phases:
            editor.progress = phases.for_editor()
            targets = editor.settings(method, facts=len(approved), layers=chosen_layers).targets
            targets = targets if steps is None else replace(targets, steps=steps)
            phases.steps, phases.facts = targets.steps, len(approved)
            with undo_commands(terminal, editor, source):
                edit = editor.rewrite_many(
                    [one.fact for one in approved], method=method, layers=chosen_layers, targets=targets, force=force
                )
        spent, id, scores = spent | phases.seconds, edit.id, edit.scores
        _print_edit(terminal, approved, edit.scores, edit.id, spent)
        terminal.suggest("undo", terminal.written_edits[edit.id])
    elif not terminal.as_json:
        terminal.hint("nothing was written")
    report = describe(editor) | _as_document(facts) | {"id": id, "seconds": spent, "scores": scores}
    terminal.result(report | {"written": [one.fact.to_json() for one in approved]}, id or "")


def _require_person(terminal: Terminal, text: str) -> None:
    """Refuse, before the model is loaded, to write facts that nobody could approve."""
    if terminal.quiet or text == "-" or not is_terminal():
        raise InputError(
            "Nobody can be asked which facts to write",
            expected="a terminal",
            advice="Write all of them with {yes}, or only print them with {as_json}",
            settings={"yes": True, "as_json": True},
            code="cannot_ask",
        )


def is_terminal() -> bool:
    """Return whether a person can answer on standard input."""
    return sys.stdin.isatty()


def _read(text: str) -> str:
    """Return a passage: standard input, the content of a file, or the argument itself if it has spaces."""
    if text == "-":
        return sys.stdin.read()
    if not os.path.isfile(text):  # noqa: PTH113 - False for a passage that is too long to be a file's name
        if " " in text.strip():
            return text
        raise InputError(f"There is no file {text!r}", expected="a text file, or a passage of text", code="no_file")
    try:
        return Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{text} is not UTF-8 text", expected="a plain text file", code="not_text") from None
    except OSError as error:
        raise StorageError(f"{text} cannot be read: {error.strerror}", code="unreadable_file") from error


def _print_facts(terminal: Terminal, facts: TextFacts) -> None:
    """Print every fact with its number and what the model says now, and every piece that is in no fact."""
    grid = tables.table("#", "fact", "probability", "the model says", right=("#", "probability"))
    labeled_facts = [
        *((str(number), one) for number, one in enumerate(facts.new, 1)),
        *(("known", one) for one in facts.known),
    ]
    for label, one in labeled_facts:
        says = tables.first_words(one.score.to_json(), one.fact.target)
        grid.add_row(label, f"{one.fact.text} → {one.fact.target}", percent(one.score.probability), says)
    if labeled_facts:
        terminal.print(grid)
    for conflict in facts.contradictions:
        targets = " / ".join(dict.fromkeys(conflict.targets))
        terminal.print(f"the text contradicts itself, not written: {conflict.text} {targets}", style="yellow")
    if facts.repeated:
        terminal.hint(f"{counted(len(facts.repeated), 'repetition')} left out")
    if facts.not_understood:
        terminal.print("not understood:", style="yellow")
        for piece in facts.not_understood:
            terminal.print(f"  {one_line(piece, LONGEST_PIECE)}")


def _ask(terminal: Terminal, statements: Sequence[Statement]) -> list[Statement]:
    """Let the person choose: all, none, or some by their numbers."""
    if not statements:
        return []
    what = "this fact" if len(statements) == 1 else f"these {len(statements)} facts"
    while True:
        answer = terminal.out.input(f"Write {what}? [Y/n, or numbers such as 1,3] ", markup=False).strip().lower()
        if answer in ("", "y", "yes"):
            return list(statements)
        if answer in ("n", "no"):
            return []
        numbers = [int(part) for part in answer.replace(",", " ").split() if part.isdecimal()]
        if numbers and len(numbers) == len(answer.replace(",", " ").split()) and max(numbers) <= len(statements):
            return [one for number, one in enumerate(statements, 1) if number in numbers]
        terminal.report("not an answer", f"{answer!r}; expected y, n, or numbers from 1 to {len(statements)}")


def _print_edit(
    terminal: Terminal, statements: Sequence[Statement], scores: Any, id: str, spent: dict[str, float]
) -> None:
    rows = [
        {"text": one.fact.text, "target": one.fact.target, "before": before, "after": after}
        for one, before, after in zip(statements, scores["before"], scores["after"], strict=True)
    ]
    tables.print_answers(terminal, rows)
    properties = [
        ("edit", id),
        *tables.outcome_rows(scores["outcome"], list(scores["outcome"]["said"])),
        *tables.drift_rows(scores),
        *tables.memory_rows(scores),
        ("time", seconds(sum(spent.values()))),
    ]
    terminal.print(tables.pairs(properties))


def _as_document(facts: TextFacts) -> dict[str, Any]:
    named = {"new": facts.new, "known": facts.known, "repeated": facts.repeated, "contradicted": facts.contradicted}
    lists = {
        name: [one.fact.to_json() | {"clause": one.clause, "score": one.score.to_json()} for one in statements]
        for name, statements in named.items()
    }
    return {**lists, "not_understood": list(facts.not_understood)}
