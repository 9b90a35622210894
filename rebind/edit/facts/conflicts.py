"""Facts that cannot be written together, or only as a compromise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rebind.edit.facts.fact import Fact, comparable
from rebind.edit.facts.relations import relation_of


@dataclass(frozen=True)
class Conflict:
    """A group of facts that conflict, by their indices in the list that was checked."""

    text: str  # the prompt of the first fact
    targets: tuple[str, ...]  # one per fact, in order
    indices: tuple[int, ...]

    def __str__(self) -> str:
        indices = ", ".join(str(index) for index in self.indices)
        return f"{self.text!r} → {' / '.join(dict.fromkeys(self.targets))} (facts {indices})"


def conflicts(facts: Sequence[Fact]) -> list[Conflict]:
    """Return facts with different targets after the same prompt, ignoring case and spacing."""
    groups = _group(facts, [comparable(fact.text) for fact in facts])
    return [group for group in groups if len(set(group.targets)) > 1]


def contradictions(facts: Sequence[Fact]) -> list[Conflict]:
    """Return facts with different targets for the same relation of the same subject, in any wording.

    The catalog knows which wordings ask for the same relation; other prompts are compared as in `conflicts`.
    """
    keys = [(comparable(fact.subject), relation_of(fact) or comparable(fact.text)) for fact in facts]
    return [group for group in _group(facts, keys) if len({comparable(target) for target in group.targets}) > 1]


def shared_keys(facts: Sequence[Fact]) -> list[Conflict]:
    """Return facts with different prompts and targets, but the same text up to the end of the subject.

    They share one key, because the key is read at the end of the subject. The value that is written for it is a
    compromise between them.
    """
    groups = _group(facts, [fact.parts[0] + fact.subject for fact in facts])
    return [
        group
        for group in groups
        if len(set(group.targets)) > 1 and len({comparable(facts[index].text) for index in group.indices}) > 1
    ]


def _group(facts: Sequence[Fact], keys: Sequence[object]) -> list[Conflict]:
    """Return the groups of at least two facts with equal keys."""
    groups: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return [
        Conflict(facts[group[0]].text, tuple(facts[index].target for index in group), tuple(group))
        for group in groups.values()
        if len(group) > 1
    ]
