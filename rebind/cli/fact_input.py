"""The facts that a command works on, checked before minutes are spent on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.cli.ui import Terminal
from rebind.cli.ui.errors import as_option
from rebind.cli.ui.tables import one_line
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact
    from rebind.edit.facts.readers import Facts

LONGEST_QUOTE = 60  # characters of a prompt or a target in a message


def single_fact(
    prompt: str, target: str, subject: str | None, paraphrases: Sequence[str] = (), neighbors: Sequence[str] = ()
) -> Facts:
    """Return a fact from the command line."""
    from rebind.edit.facts.fact import Fact
    from rebind.edit.facts.readers import Facts

    fact = Fact.parse(prompt, target, subject=subject, paraphrases=paraphrases, neighbors=neighbors)
    return Facts((fact,), (), ("",))


def facts_of_file(terminal: Terminal, file: str | Path, skip_bad: bool, limit: int | None = None) -> Facts:
    """Read at most `limit` facts from a file; an invalid record is an error, or skipped and reported."""
    from rebind.edit.facts.readers import read_facts

    facts = read_facts(Path(file), limit=limit, skip_bad=skip_bad)
    for reason in facts.skipped:
        terminal.report("skipped", reason)
    if not facts:
        raise InputError(f"{file} holds no facts", expected="at least one JSON object per line", code="no_facts")
    return facts


def valid_facts(terminal: Terminal, facts: Facts, check: Callable[[Sequence[Fact]], object], skip_bad: bool) -> Facts:
    """Return the facts that pass a check. The first that fails is an error, or with `skip_bad` each is skipped."""

    def failures() -> Iterator[tuple[int, InputError]]:
        for index, fact in enumerate(facts):
            try:
                check([fact])
            except InputError as error:
                yield index, error

    try:
        check(facts.facts)  # all together is fast; one by one finds out which
    except InputError:
        return _without(terminal, facts, failures(), skip_bad)
    return facts


def fitting_facts(terminal: Terminal, editor: Editor, facts: Facts, skip_bad: bool, *, contexts: bool = False) -> Facts:
    """Return the facts whose prompts all fit into the context length; with `contexts`, behind contexts as well."""
    from rebind.models import Prompt

    def check(some: Sequence[Fact]) -> None:
        questions: list[Prompt] = []
        for fact in some:
            texts, targets = (fact.text, *fact.paraphrases, *fact.neighbors), filter(None, (fact.target, fact.old))
            questions += [Prompt(text, target) for target in targets for text in texts]
        editor.language_model.encode(questions)
        if contexts:
            editor.fact_prompts(some)

    return valid_facts(terminal, facts, check, skip_bad)


def consistent_facts(terminal: Terminal, facts: Facts, skip_bad: bool) -> Facts:
    """Return facts that can be written together: of those with one prompt and different targets, the first."""
    from rebind.edit.facts.conflicts import conflicts

    later: dict[int, InputError] = {}
    for conflict in conflicts(facts.facts):
        first = conflict.targets[0]
        for index, target in zip(conflict.indices, conflict.targets, strict=True):
            if target != first:
                later[index] = InputError(
                    f"{quote(conflict.text)} has the target {quote(target)}, and {quote(first)} in "
                    f"{facts.names[conflict.indices[0]]}",
                    expected="one target per prompt",
                    advice="Remove one of the records, or use {skip_bad} to keep the first",
                    settings={"skip_bad": True},
                    code="conflicting_facts",
                )
    return _without(terminal, facts, sorted(later.items()), skip_bad)


def _without(terminal: Terminal, facts: Facts, failures: Iterable[tuple[int, InputError]], skip_bad: bool) -> Facts:
    from rebind.edit.facts.readers import Facts

    removed: dict[int, str] = {}
    for index, error in failures:
        named = copy(error)
        named.problem = f"{facts.names[index]}: {error.problem}" if facts.names[index] else error.problem
        if not skip_bad:
            raise named
        removed[index] = named.message(lambda name, value: as_option(name, value, terminal.options))
        terminal.report("skipped", removed[index])
    rest = [index for index in range(len(facts)) if index not in removed]
    skipped = (*facts.skipped, *removed.values())
    if not rest:
        raise InputError(f"All {len(skipped)} records were skipped", expected="at least one fact", code="no_facts")
    return Facts(tuple(facts[index] for index in rest), skipped, tuple(facts.names[index] for index in rest))


def print_skipped(terminal: Terminal, facts: Facts) -> None:
    """Print how many records were skipped, if any were."""
    if facts.skipped:
        terminal.print(f"skipped {len(facts.skipped):,} of {len(facts.skipped) + len(facts):,} records")


def quote(text: str) -> str:
    """Return a text in quotes, shortened for a message."""
    return repr(one_line(text, LONGEST_QUOTE))
