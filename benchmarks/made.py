"""Many facts from few records: each of CounterFact's kind, each about a subject of its own.

A record's neighbors are prompts about other subjects of its relation for which its true object is true as well. Split
by the templates of the relation's records, such a prompt is a fact like the record's own: "Amelia Fletcher plays the"
is "{} plays the" about Amelia Fletcher, what follows it is the neighbor's answer, and what shall follow it is one of
the relation's targets, each in turn. No subject comes twice, so every fact has a key of its own: the same subject in
two templates would often have the same key with two values.

Made facts have no paraphrases and no neighbors: ES, EA and what is said freely can be asked of them, PS and NS of the
records only. Neighbors that are asked are to be spared: neither they nor other facts about their subjects are made.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from rebind.edit.facts.fact import Fact, comparable, escape_braces
from rebind.evals.records import Question, Record

Template = tuple[str, str]  # what stands before the subject and after it
RELATIVE = (", who", ", which", ", that")  # no end of a name: "{} was from" does not fit "Sven-Ingvars, who was from"


def made_facts(
    records: Sequence[Record], count: int, *, more: Sequence[Record] = (), spared: Collection[str] = ()
) -> list[Record]:
    """So many facts, no subject twice; the same ones every time.

    The records come first, then `more` of them, then facts made of the neighbors of both. `spared` are prompts of
    neighbors: nothing but the records themselves is about their subjects.
    """
    everything = list(dict.fromkeys((*records, *more)))
    made = list(_of_neighbors(everything))
    asked = {comparable(prompt) for prompt in spared}
    taken: set[str] = set()
    found = list(_apart(records, taken))
    taken.update(name for one in made if comparable(one.fact.text) in asked for name in _names(one.fact))
    found += _apart((*more, *made), taken)
    if len(found) < count:
        raise SystemExit(f"{len(everything)} records make {len(found)} facts, expected {count}: pass more records")
    return found[:count]


def _apart(records: Iterable[Record], taken: set[str]) -> Iterator[Record]:
    """Those about what is not taken yet, which takes it."""
    for record in records:
        names = _names(record.fact)
        if taken.isdisjoint(names):
            taken |= names
            yield record


def _names(fact: Fact) -> set[str]:
    """The subject, and the text up to its end, which its key is of."""
    return {comparable(fact.subject), comparable(fact.parts[0] + fact.subject)}


def _of_neighbors(records: Sequence[Record]) -> Iterator[Record]:
    """The first neighbor of every record, then the second: facts of one record do not follow one another."""
    templates: dict[str, dict[Template, None]] = defaultdict(dict)
    targets: dict[str, dict[str, None]] = defaultdict(dict)
    for record in records:
        templates[_relation(record)][record.fact.parts] = None
        targets[_relation(record)][record.fact.target] = None
    for place in range(max((len(record.neighbors) for record in records), default=0)):
        for number, record in enumerate(records):
            if place < len(record.neighbors):
                wanted = deque(targets[_relation(record)])
                wanted.rotate(-number - place)
                fact = _fact(record.neighbors[place], templates[_relation(record)], wanted)
                if fact is not None:
                    yield Record(fact, f"{record.id}, neighbor {place}")


def _relation(record: Record) -> str:
    return record.fact.tags[1] if len(record.fact.tags) > 1 else ""


def _fact(neighbor: Question, templates: Iterable[Template], targets: Iterable[str]) -> Fact | None:
    """The neighbor with the first target that is not true of it; nothing where there is none, or no template fits."""
    text, old = neighbor.prompt, neighbor.answer
    fitting = [parts for parts in templates if _subject(text, parts).strip()]
    target = next((one for one in targets if old is not None and comparable(one) != comparable(old)), None)
    if target is None or not fitting:
        return None
    before, after = longest = max(fitting, key=lambda parts: len(parts[0] + parts[1]))  # leaves the shortest subject
    return Fact(f"{escape_braces(before)}{{}}{escape_braces(after)}", _subject(text, longest), target, old)


def _subject(text: str, template: Template) -> str:
    """What stands in the template's place; nothing where it does not fit."""
    before, after = template
    subject = text[len(before) : len(text) - len(after)]
    fits = text.startswith(before) and text.endswith(after) and not subject.endswith(RELATIVE)
    return subject if fits else ""
