"""Facts about one subject share their keys, so one δ must say all of them.

The facts of an edit are grouped by subject. Active edits in the dense memory may be about the same subjects: their
facts are searched together with the new ones, except for facts that the new ones replace.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rebind.edit.dense.rows import Joint, moved_subjects, replaced_by
from rebind.edit.facts.fact import Fact, comparable
from rebind.edit.facts.questions import paraphrases_of
from rebind.edit.facts.relations import relation_of
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.edits import EditSequence
from rebind.edit.targets.kept import SubjectPrompts


@dataclass(eq=False)
class SubjectGroup:
    """The new facts about one subject, and what earlier edits say about it."""

    facts: list[Fact] = field(default_factory=list)
    about: list[SubjectPrompts] = field(default_factory=list)  # of each fact
    carried: list[Fact] = field(default_factory=list)  # earlier facts that stay true
    carries: list[str] = field(default_factory=list)  # the ids of their edits
    replaces: list[str] = field(default_factory=list)  # ids of other active edits, which the new facts contradict

    def joint(self, index: int) -> Joint | None:
        """Return how the group, which has this index, relates to earlier edits; None if there are none."""
        return Joint(index, tuple(self.carries), tuple(self.replaces)) if self.carries or self.replaces else None


def group_by_subject(
    facts: Sequence[Fact], about: Sequence[SubjectPrompts], active: Sequence[Edit]
) -> list[SubjectGroup]:
    """Return the facts by subject, in the order in which subjects appear, with the active edits about them."""
    groups: dict[str, SubjectGroup] = {}
    for fact, prompts in zip(facts, about, strict=True):
        group = groups.setdefault(comparable(fact.subject), SubjectGroup())
        group.facts.append(fact)
        group.about.append(prompts)
    by_subject = _by_subject(active, groups)
    replaced = {edit: replaced_by(edit) for edit in {edit for pairs in by_subject.values() for edit, _ in pairs}}
    for subject, pairs in by_subject.items():
        group = groups[subject]
        contradicted = [one for one in pairs if any(same_relation(one[1], new) for new in group.facts)]
        current = [one for one in _latest(pairs) if one not in contradicted]
        # A fact that another edit replaces comes back when that one is undone.
        elsewhere = {id for edit, _ in pairs for id in replaced[edit][subject]}
        ended = [edit.id for edit, fact in pairs if (edit, fact) in contradicted or edit.id not in elsewhere]
        group.carried = [fact for _, fact in current]
        group.carries = list(dict.fromkeys(edit.id for edit, _ in current))
        group.replaces = [id for id in dict.fromkeys(ended) if id not in group.carries]
    return list(groups.values())


def current_facts(edits: Sequence[Edit]) -> list[Fact]:
    """Return the facts that the dense memory holds after some edits, subject by subject."""
    return [fact for pairs in _by_subject(edits).values() for _, fact in _latest(pairs)]


def groups_in_memory(edits: Sequence[Edit]) -> list[SubjectGroup]:
    """Return the facts in the dense memory by subject, the oldest first."""
    return [SubjectGroup([fact for _, fact in _latest(pairs)]) for pairs in _by_subject(edits).values()]


def _by_subject(edits: Sequence[Edit], subjects: Collection[str] | None = None) -> dict[str, list[tuple[Edit, Fact]]]:
    """Return the facts in the dense memory, with their edits, by subject: all, or those about some subjects."""
    pairs: dict[str, list[tuple[Edit, Fact]]] = {}
    edits = EditSequence.of(edits)
    moved = moved_subjects(edits.where(lambda kind: kind.consolidates))
    for edit in edits.where(lambda kind: kind.has_rows) if subjects is None else edits.at(edits.about(subjects)):
        for fact in edit.facts if edit.has_rows else ():
            subject = comparable(fact.subject)
            if (subjects is None or subject in subjects) and edit.id not in moved.get(subject, ()):
                pairs.setdefault(subject, []).append((edit, fact))
    return pairs


def _latest(pairs: Sequence[tuple[Edit, Fact]]) -> list[tuple[Edit, Fact]]:
    """Return the facts about one subject without those that a fact of a later edit replaces."""
    return [
        (edit, fact)
        for index, (edit, fact) in enumerate(pairs)
        if not any(other is not edit and same_relation(fact, later) for other, later in pairs[index + 1 :])
    ]


def same_relation(fact: Fact, other: Fact) -> bool:
    """Return whether two facts about one subject ask for the same thing, as far as their wordings tell."""
    relation = relation_of(fact)
    return (relation is not None and relation == relation_of(other)) or bool(_wordings(fact) & _wordings(other))


def _wordings(fact: Fact) -> set[str]:
    return {comparable(text) for text in (fact.text, *fact.paraphrases, *paraphrases_of(fact))}


def kept_together(facts: Sequence[Fact], about: Sequence[SubjectPrompts]) -> SubjectPrompts:
    """Return the prompts to keep for facts about one subject: the user's, and those that no fact is about."""
    own = [[text for text in one.kept if text not in fact.keep] for fact, one in zip(facts, about, strict=True)]
    shared = [text for text in own[0] if all(text in texts for texts in own)]
    user = [text for fact in facts for text in fact.keep]
    openings = {
        question: min((one.openings.get(question, "") for one in about), key=len) for question in about[0].openings
    }
    openings = {question: words for question, words in openings.items() if words}  # none of them says an old target
    texts = tuple(dict.fromkeys([*user, *shared]))
    return SubjectPrompts(about[0].kind, texts, about[0].held_out, openings=openings)
