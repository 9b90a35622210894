"""Many facts from few records: for the cost of editing, not for its quality.

Subjects of a relation are put into the templates of the relation's other records, which gives facts of the usual
lengths that the model has no opinion of; where those run out, into the templates of other relations. The target and
the old object are the template's record's. There are no paraphrases and no neighbours, and what the model says to
"The mother tongue of Berlin is" means little: of scores on such facts only ES and EA are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rebind.edit.facts import Fact, comparable


def made_facts(facts: Sequence[Fact], count: int) -> list[Fact]:
    """So many facts, no prompt twice: the records themselves first, then pairs; the same ones every time."""
    found: dict[str, Fact] = {}
    for fact in (*facts, *_pairs(facts)):
        if len(found) == count:
            break
        found.setdefault(comparable(fact.text), fact)
    if len(found) < count:
        raise SystemExit(f"{len(facts)} records make {len(found)} facts, expected {count}: pass more records")
    return list(found.values())


def _pairs(facts: Sequence[Fact]) -> Iterator[Fact]:
    groups: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        groups[fact.tags[1] if len(fact.tags) > 1 else ""].append(fact)
    templates = {relation: list({fact.prompt: fact for fact in group}.values()) for relation, group in groups.items()}
    for relation, group in groups.items():
        yield from _combined(group, templates[relation])
    for relation, group in groups.items():
        for other, theirs in templates.items():
            if other != relation:
                yield from _combined(group, theirs)


def _combined(group: Sequence[Fact], templates: Sequence[Fact]) -> Iterator[Fact]:
    for fact in group:
        for template in templates:
            if fact.prompt != template.prompt:
                yield Fact(template.prompt, fact.subject, template.target, template.old)
