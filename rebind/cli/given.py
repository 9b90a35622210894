"""What a verb is given: facts, places and numbers, checked before minutes are spent on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.cli.answers import as_fact
from rebind.cli.ui.terminal import Screen
from rebind.errors import InputError
from rebind.files import is_file, require_writable_beside

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact

PROBED = 400  # paraphrases, and neighbours, that are asked
LONGEST = 60  # letters of a prompt or a target that a message repeats


@dataclass(frozen=True)
class Given:
    """The facts a verb is given, what to call the record of each, and how many records were left out."""

    facts: tuple[Fact, ...] = ()
    names: tuple[str, ...] = ()  # as "line 3 of facts.jsonl (id x)"; empty where a fact was typed
    skipped: int = 0

    def tell_skipped(self, shown: Screen) -> None:
        """One line of how many were left out, if any were."""
        if self.skipped:
            shown.show(f"skipped {self.skipped:,} of {self.skipped + len(self.facts):,} records")


def read(
    shown: Screen,
    facts: str,
    target: str | None,
    subject: str | None,
    paraphrases: list[str] | None,
    neighbours: list[str] | None,
    skip_bad: bool,
) -> Given:
    """The facts, checked before minutes are spent on a model."""
    from rebind.edit.facts.fact import Fact

    if target is not None:
        if subject is None and "{" not in facts and is_file(facts):
            raise InputError(
                f"got the file {facts} and the target {target!r}, expected a file alone, or a prompt and its target: "
                f"leave out {target!r}"
            )
        fact = Fact.parse(facts, target, subject=subject, paraphrases=paraphrases or (), neighbours=neighbours or ())
        return Given((fact,), ("",))
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
    given = read_file(shown, facts, skip_bad)
    return given if skip_bad else without_conflicts(shown, given, skip_bad)  # `askable` leaves out other records first


def read_file(shown: Screen, file: str | Path, skip_bad: bool, *, limit: int | None = None) -> Given:
    """The facts of a file, at most `limit`; records that cannot be read raise, or are left out and told."""
    from rebind.edit.facts.readers import read_facts

    found = read_facts(file, limit=limit, skip_bad=skip_bad)
    for reason in found.skipped:
        shown.complain("skipped", reason)
    if not found:
        raise InputError(f"{file} holds no facts, expected at least one: one JSON object a line will do")
    return Given(found.facts, found.names, len(found.skipped))


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


def askable(shown: Screen, editor: Editor, given: Given, skip_bad: bool, *, plan: bool) -> Given:
    """Those that the model can be asked before and after: the others raise, or are left out and told."""
    most = None if skip_bad else PROBED  # with others left out, any of the prompts may be among those asked

    def check(some: Sequence[Fact]) -> None:
        _require_short(editor, some, most)
        if skip_bad and not plan:
            editor.requests(some)  # behind contexts as well, which are sampled first

    try:
        check(given.facts)
    except InputError:  # found out for all at once, and told one by one
        given = good_ones(shown, given, lambda fact: check([fact]), skip_bad)
    return without_conflicts(shown, given, skip_bad)


def good_ones(shown: Screen, given: Given, check: Callable[[Fact], None], skip_bad: bool) -> Given:
    """Facts that pass a check; the others raise, with their record named, or are left out and told."""

    def failing() -> Iterator[tuple[int, str]]:
        for index, fact in enumerate(given.facts):
            try:
                check(fact)
            except InputError as problem:
                yield index, str(problem)

    return _left_out(shown, given, failing(), skip_bad)


def without_conflicts(shown: Screen, given: Given, skip_bad: bool) -> Given:
    """Facts that can be written together: of those with one prompt and different targets the first, as in an eval."""
    from rebind.edit.facts.fact import conflicts

    advice = "keep one of them" if skip_bad else "keep one of them, or skip bad records"
    later = {}
    for clash in conflicts(given.facts):
        wanted, first = clash.targets[0], given.names[clash.indices[0]]
        for index, target in zip(clash.indices, clash.targets, strict=True):
            if target != wanted:
                later[index] = (
                    f"{shortened(clash.text)!r} → {shortened(wanted)} / {shortened(target)} (the first is that of "
                    f"{first}), expected one target for one prompt: {advice}"
                )
    return _left_out(shown, given, sorted(later.items()), skip_bad)


def _left_out(shown: Screen, given: Given, bad: Iterable[tuple[int, str]], skip_bad: bool) -> Given:
    """The facts but for those that something is wrong with, each told with the name of its record."""
    gone = set()
    for index, problem in bad:
        name = given.names[index]
        told = f"{name}: {problem}" if name else problem
        if not skip_bad:
            raise InputError(told)
        shown.complain("skipped", told)
        gone.add(index)
    skipped = given.skipped + len(gone)
    if len(gone) == len(given.facts):
        raise InputError(f"no fact is left of {skipped}, expected at least one: repair one of them")
    kept = [index for index in range(len(given.facts)) if index not in gone]
    return Given(tuple(given.facts[index] for index in kept), tuple(given.names[index] for index in kept), skipped)


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _require_short(editor: Editor, facts: Sequence[Fact], most: int | None) -> None:
    """Ask before the work whether the model can be asked afterwards."""
    from rebind.edit.facts.encoding import encode_many

    start, limit = editor.loaded.start, editor.trunk.context
    encode_many(facts, editor.tokenizer, start, chat=editor.chat, limit=limit)
    for kind, prompts in zip(("paraphrase", "neighbour"), probes(facts, most), strict=True):
        asked = [as_fact(text, target) for _, text, target in prompts]
        try:
            encode_many(asked, editor.tokenizer, start, chat=editor.chat, limit=limit)
        except InputError as problem:
            raise InputError(f"a {kind} cannot be asked: {problem}") from None


def probes(facts: Sequence[Fact], most: int | None) -> tuple[list[tuple[int, str, str]], list[tuple[int, str, str]]]:
    """The paraphrases and the neighbours, at most so many of either, each with its fact's number and target."""
    numbered = list(enumerate(facts))
    paraphrases = [(index, text, fact.target) for index, fact in numbered for text in fact.paraphrases]
    neighbours = [(index, text, fact.target) for index, fact in numbered for text in fact.neighbours]
    return paraphrases[:most], neighbours[:most]
