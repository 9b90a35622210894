"""What a verb is given: facts, places and numbers, checked before minutes are spent on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.cli.answers import as_fact
from rebind.cli.screen import Screen
from rebind.errors import InputError
from rebind.files import is_file, require_writable_beside

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts import Fact

PROBED = 400  # paraphrases, and neighbours, that are asked


def read(
    shown: Screen,
    facts: str,
    target: str | None,
    subject: str | None,
    paraphrases: list[str] | None,
    neighbours: list[str] | None,
    skip_bad: bool,
) -> list[Fact]:
    """The facts, checked before minutes are spent on a model."""
    from rebind.edit.facts import Fact, conflicts
    from rebind.edit.reading import read_facts

    if target is not None:
        if subject is None and "{" not in facts and is_file(facts):
            raise InputError(
                f"got the file {facts} and the target {target!r}, expected a file alone, or a prompt and its target: "
                f"leave out {target!r}"
            )
        fact = Fact.parse(facts, target, subject=subject, paraphrases=paraphrases or (), neighbours=neighbours or ())
        return [fact]
    if not is_file(facts) and ("{" in facts or " " in facts.strip()):
        raise InputError(
            f"got the prompt {facts!r} and no target, expected both: "
            f'write rebind edit "The capital of {{France}} is" "Rome"'
        )
    if subject or paraphrases or neighbours:
        raise InputError(
            "got a file and --subject, --paraphrase or --neighbour, expected these with one prompt and its target: "
            "put them into the file"
        )
    found = read_facts(facts, skip_bad=skip_bad)
    for reason in found.skipped:
        shown.complain("skipped", reason)
    if not found:
        raise InputError(f"{facts} holds no facts, expected at least one: one JSON object a line will do")
    if clashes := conflicts(found):
        raise InputError(f"{clashes[0]} ask for different targets after one prompt, expected one: keep one of them")
    return list(found)


def require_room(out: Path) -> None:
    """Ask before the work, not after."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is there already and not an empty folder: name another with --out")
    require_writable_beside(out, "name another with --out")


def search_changes(method: str, **given: float | None) -> dict[str, Any]:
    """What was said about the search, checked before a model is loaded."""
    from rebind.edit.methods import get_method

    get_method(method)
    for name, value in given.items():
        if value is not None and not (0 < value < math.inf or (name == "decay" and value == 0)):
            raise InputError(f"{name} is {value}, expected a number above 0: leave it out for what suits the model")
    return {name: value for name, value in given.items() if value is not None}


def askable(
    shown: Screen, editor: Editor, facts: list[Fact], file: Path | None, skip_bad: bool, *, plan: bool
) -> list[Fact]:
    """Those that the model can be asked before and after: the others raise, or are left out and told."""

    def check(some: list[Fact]) -> None:
        _require_short(editor, some)
        if skip_bad and not plan:
            editor.requests(some)  # behind contexts as well, which are sampled first

    with suppress(InputError):  # found out for all at once, and told one by one
        check(facts)
        return facts
    return good_ones(shown, facts, lambda fact: check([fact]), file, skip_bad)


def good_ones(
    shown: Screen, facts: list[Fact], check: Callable[[Fact], None], file: Path | None, skip_bad: bool
) -> list[Fact]:
    """Facts that pass a check; the others raise, with the record of their file named, or are left out and told."""
    kept = []
    for index, fact in enumerate(facts):
        try:
            check(fact)
            kept.append(fact)
        except InputError as problem:
            told = str(problem) if file is None else _named(problem, file, index)
            if not skip_bad:
                raise InputError(told) from None
            shown.complain("skipped", told)
    if not kept:
        raise InputError(f"no fact is left of {len(facts)}, expected at least one: shorten their prompts")
    return kept


def _named(problem: InputError, file: Path, index: int) -> str:
    """What is wrong with a fact, with the record that it was read from in front."""
    from rebind.edit.reading import described, fact_of, raw_records

    for where, record in raw_records(file):
        with suppress(InputError, RecursionError):
            fact_of(record)
            if not index:
                return described(problem, where, record)
            index -= 1
    return str(problem)  # the file has changed meanwhile


def _require_short(editor: Editor, facts: Sequence[Fact]) -> None:
    """Ask before the work whether the model can be asked afterwards."""
    from rebind.edit.encoding import encode_many

    start, limit = editor.loaded.start, editor.trunk.context
    encode_many(facts, editor.tokenizer, start, chat=editor.chat, limit=limit)
    for kind, prompts in zip(("paraphrase", "neighbour"), probes(facts), strict=True):
        asked = [as_fact(text, target) for _, text, target in prompts]
        try:
            encode_many(asked, editor.tokenizer, start, chat=editor.chat, limit=limit)
        except InputError as problem:
            raise InputError(f"a {kind} cannot be asked: {problem}") from None


def probes(facts: Sequence[Fact]) -> tuple[list[tuple[int, str, str]], list[tuple[int, str, str]]]:
    """The paraphrases and the neighbours that are asked, each with its fact's number and target."""
    numbered = list(enumerate(facts))
    paraphrases = [(index, text, fact.target) for index, fact in numbered for text in fact.paraphrases]
    neighbours = [(index, text, fact.target) for index, fact in numbered for text in fact.neighbours]
    return paraphrases[:PROBED], neighbours[:PROBED]
