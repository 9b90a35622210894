"""The facts that a command works on, checked before minutes are spent on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.cli.ui.errors import as_option
from rebind.cli.ui.tables import one_line
from rebind.cli.ui.terminal import Terminal
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.facts.fact import Fact

LONGEST_QUOTE = 60  # characters of a prompt or a target in a message


@dataclass(frozen=True)
class FactInput:
    """Facts, the name of each one's record, and how many records were skipped."""

    facts: tuple[Fact, ...] = ()
    names: tuple[str, ...] = ()  # such as "line 3 of facts.jsonl (id x)"; empty for a fact that was typed
    skipped: int = 0

    def print_skipped(self, terminal: Terminal) -> None:
        """Print how many records were skipped, if any were."""
        if self.skipped:
            terminal.print(f"skipped {self.skipped:,} of {self.skipped + len(self.facts):,} records")

    def checked(self, check: Callable[[Fact], object], terminal: Terminal, *, skip_bad: bool) -> FactInput:
        """Return the facts that pass a check. The first that fails is an error, or with `skip_bad` each is skipped."""

        def failures() -> Iterator[tuple[int, InputError]]:
            for index, fact in enumerate(self.facts):
                try:
                    check(fact)
                except InputError as error:
                    yield index, error

        return self._without(failures(), terminal, skip_bad)

    def without_conflicts(self, terminal: Terminal, *, skip_bad: bool) -> FactInput:
        """Return facts that can be written together: of those with one prompt and different targets, the first."""
        from rebind.edit.facts.fact import conflicts

        later: dict[int, InputError] = {}
        for conflict in conflicts(self.facts):
            first, name = conflict.targets[0], self.names[conflict.indices[0]]
            for index, target in zip(conflict.indices, conflict.targets, strict=True):
                if target != first:
                    later[index] = InputError(
                        f"{quoted(conflict.text)} has the target {quoted(target)}, and {quoted(first)} in {name}",
                        expected="one target per prompt",
                        advice="Remove one of the records, or use {skip_bad} to keep the first one",
                        settings={"skip_bad": True},
                        code="conflicting_facts",
                    )
        return self._without(sorted(later.items()), terminal, skip_bad)

    def _without(self, failures: Iterable[tuple[int, InputError]], terminal: Terminal, skip_bad: bool) -> FactInput:
        removed = set()
        for index, error in failures:
            named = with_prefix(error, self.names[index])
            if not skip_bad:
                raise named
            terminal.report("skipped", named.message(lambda name, value: as_option(name, value, terminal.options)))
            removed.add(index)
        skipped = self.skipped + len(removed)
        remaining = [index for index in range(len(self.facts)) if index not in removed]
        if not remaining:
            raise InputError(f"All {skipped} records were skipped", expected="at least one fact", code="no_facts")
        return FactInput(
            tuple(self.facts[index] for index in remaining), tuple(self.names[index] for index in remaining), skipped
        )


def read_fact_or_file(
    terminal: Terminal,
    source: str,
    target: str | None,
    subject: str | None,
    paraphrases: list[str],
    neighbors: list[str],
    skip_bad: bool,
) -> FactInput:
    """Read the arguments of `rebind edit`: a prompt and its target, or a file of facts."""
    from rebind.edit.facts.fact import Fact

    is_file = os.path.isfile(source)
    if target is not None:
        if is_file and subject is None and "{" not in source:
            raise InputError(
                f"{source} is a file of facts and {target!r} is a target",
                expected="a file alone, or a prompt and its target",
                advice="Omit the target",
                code="file_and_target",
            )
        fact = Fact.parse(source, target, subject=subject, paraphrases=paraphrases, neighbors=neighbors)
        return FactInput((fact,), ("",))
    if not is_file and ("{" in source or " " in source.strip()):
        raise InputError(
            f"The prompt {source!r} has no target",
            advice='Add what the model should answer: rebind edit "The capital of {France} is" "Rome"',
            code="missing_target",
        )
    if subject or paraphrases or neighbors:
        raise InputError(
            "A file of facts was combined with options that describe a single fact",
            advice="Write subjects, paraphrases and neighbors into the file; omit {subject}, {paraphrase} and {neighbor}",
            settings={"subject": None, "paraphrase": None, "neighbor": None},
            code="file_and_fact_options",
        )
    return read_fact_file(terminal, source, skip_bad)


def read_fact_file(terminal: Terminal, file: str | Path, skip_bad: bool, *, limit: int | None = None) -> FactInput:
    """Read at most `limit` facts from a file; an invalid record is an error, or skipped and reported."""
    from rebind.edit.facts.readers import read_facts

    facts = read_facts(file, limit=limit, skip_bad=skip_bad)
    for reason in facts.skipped:
        terminal.report("skipped", reason)
    if not facts:
        raise InputError(
            f"{file} holds no facts", expected="at least one, such as one JSON object per line", code="no_facts"
        )
    return FactInput(facts.facts, facts.names, len(facts.skipped))


def with_prefix(error: InputError, name: str) -> InputError:
    """Return the same error with the name of the record that it is about."""
    if not name:
        return error
    return InputError(
        f"{name}: {error.problem}",
        expected=error.expected,
        advice=error.advice,
        code=error.code,
        settings=error.settings,
    )


def quoted(text: str) -> str:
    """Return a text in quotes, shortened for a message."""
    return repr(one_line(text, LONGEST_QUOTE))
