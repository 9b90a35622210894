"""Read and check the facts of a command, before any expensive work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.cli.ui import Terminal
from rebind.cli.ui.tables import one_line
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact
    from rebind.edit.facts.readers import Facts

MAX_QUOTE_LENGTH = 60  # characters of a prompt or a target in a message


def single_fact(prompt: str, target: str, **details: Any) -> Facts:
    """Return a single fact from the command line; `details` are those of `Fact.parse`."""
    from rebind.edit.facts.fact import Fact
    from rebind.edit.facts.readers import Facts

    return Facts((Fact.parse(prompt, target, **details),), (), ("",))


def facts_of_file(terminal: Terminal, file: str | Path, skip_bad: bool, limit: int | None = None) -> Facts:
    """Read at most `limit` facts from a file. An invalid record raises, or with `skip_bad` is reported and skipped."""
    from rebind.edit.facts.readers import read_facts

    facts = read_facts(Path(file), limit=limit, skip_bad=skip_bad)
    for reason in facts.skipped:
        terminal.report("skipped", reason)
    if not facts:
        raise InputError(f"{file} has no facts", expected="at least one JSON object per line", code="no_facts")
    return facts


def valid_facts(terminal: Terminal, facts: Facts, check: Callable[[Fact], object], skip_bad: bool) -> Facts:
    """Return the facts that pass a check. A fact that fails raises, or with `skip_bad` is reported and skipped."""
    from rebind.edit.facts.readers import Facts, record_error

    valid: list[tuple[Fact, str]] = []
    skipped = list(facts.skipped)
    for fact, name in zip(facts, facts.names, strict=True):
        try:
            check(fact)
            valid.append((fact, name))
        except InputError as problem:
            error = record_error(problem, name, None) if name else problem
            if not skip_bad:
                raise error from None
            skipped.append(error.message(terminal.as_option))
            terminal.report("skipped", skipped[-1])
    if not valid:
        raise InputError(f"All {len(skipped)} records were skipped", expected="at least one fact", code="no_facts")
    return Facts(tuple(fact for fact, _ in valid), tuple(skipped), tuple(name for _, name in valid))


def fits_context(editor: Editor, *, behind_contexts: bool = False) -> Callable[[Fact], object]:
    """Return a check that all prompts of a fact fit into the model's context length and can be used."""
    from rebind.models import Prompt

    def check(fact: Fact) -> None:
        for text in fact.keep:
            if fact.subject not in text:
                raise InputError(
                    f"{_quote(text)} should be kept, but does not name the subject {_quote(fact.subject)}",
                    advice="Name the subject exactly as in the fact; prompts about other subjects are neighbors",
                    code="keep_without_subject",
                )
        texts = (fact.text, *fact.paraphrases, *fact.neighbors, *fact.questions, *fact.keep)
        targets = filter(None, (fact.target, fact.old))
        editor.language_model.encode([Prompt(text, target) for target in targets for text in texts])
        if behind_contexts:
            editor.fact_prompts([fact])

    return check


def has_one_target() -> Callable[[Fact], object]:
    """Return a check that no earlier fact has the same prompt and another target."""
    from rebind.edit.facts.fact import comparable

    targets: dict[str, str] = {}

    def check(fact: Fact) -> None:
        first = targets.setdefault(comparable(fact.text), fact.target)
        if first != fact.target:
            raise InputError(
                f"{_quote(fact.text)} has the target {_quote(fact.target)}, and {_quote(first)} in an earlier record",
                expected="one target per prompt",
                advice="Remove one of the records, or use {skip_bad} to keep the first",
                settings={"skip_bad": True},
                code="conflicting_facts",
            )

    return check


def print_skipped(terminal: Terminal, facts: Facts) -> None:
    """Print how many records were skipped, if any were."""
    if facts.skipped:
        terminal.print(f"skipped {len(facts.skipped):,} of {len(facts.skipped) + len(facts):,} records")


def _quote(text: str) -> str:
    return repr(one_line(text, MAX_QUOTE_LENGTH))
