"""Learn from a text: the facts in it that can be written, those that the model knows, and what was not understood.

Patterns find the facts (`rebind.edit.facts.extraction`). The model gives a second opinion where a clause can be read in
several ways, and tells which of the facts are news to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rebind.edit.facts.conflicts import Conflict, contradictions
from rebind.edit.facts.extraction import Clause, extract
from rebind.edit.facts.fact import Fact, comparable
from rebind.edit.ledger.edit import Edit
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import Prompt
from rebind.models.scoring import FactScore


@dataclass(frozen=True)
class Statement:
    """A fact that a text states."""

    fact: Fact
    clause: str  # of the text, with pronouns replaced by what they refer to
    score: FactScore  # by the model as it was before learning


@dataclass(frozen=True)
class TextFacts:
    """What a text states, as far as it was understood. A statement is in one of the first four."""

    new: tuple[Statement, ...]
    known: tuple[Statement, ...]  # the model says them already
    repeated: tuple[Statement, ...]  # stated before, in these or other words
    contradicted: tuple[Statement, ...]  # the text gives the same relation of the same subject several objects
    contradictions: tuple[Conflict, ...]  # by their indices in `contradicted`
    not_understood: tuple[str, ...]  # pieces of the text that are in no fact


@dataclass(frozen=True)
class Lesson:
    """What a text states, and the edit that wrote what was new; None if nothing was."""

    facts: TextFacts
    edit: Edit | None

    @property
    def written(self) -> tuple[Fact, ...]:
        return () if self.edit is None else self.edit.facts


def facts_in_text(model: LanguageModel, text: str) -> TextFacts:
    """Return what a text states, sorted by what the model, as it stands now, says about it."""
    clauses = extract(text)
    understood = [clause for clause in clauses if clause.candidates]
    facts = choose_candidates(model, understood)
    scores = model.score([fact.as_prompt() for fact in facts])
    stated = [Statement(*one) for one in zip(facts, (clause.text for clause in understood), scores, strict=True)]
    first: dict[tuple[str, str], Statement] = {}
    repeated = []
    for statement in stated:
        key = (comparable(statement.fact.text), comparable(statement.fact.target))
        if first.setdefault(key, statement) is not statement:
            repeated.append(statement)
    distinct = list(first.values())
    indices = {index for one in contradictions([one.fact for one in distinct]) for index in one.indices}
    contradicted = [one for index, one in enumerate(distinct) if index in indices]
    rest = [one for index, one in enumerate(distinct) if index not in indices]
    return TextFacts(
        new=tuple(one for one in rest if not one.score.exact),
        known=tuple(one for one in rest if one.score.exact),
        repeated=tuple(repeated),
        contradicted=tuple(contradicted),
        contradictions=tuple(contradictions([one.fact for one in contradicted])),
        not_understood=tuple(filter(None, (one.rest if one.candidates else one.text for one in clauses))),
    )


def choose_candidates(model: LanguageModel, clauses: Sequence[Clause]) -> list[Fact]:
    """Return one fact for each clause: of several candidates, the one that the clause itself supports most.

    That is the candidate whose target gains most per token, in log-probability, when its prompt stands behind the
    clause instead of alone.
    """
    open_questions = [clause for clause in clauses if len(clause.candidates) > 1]
    pairs = [(clause, fact) for clause in open_questions for fact in clause.candidates]
    alone = model.score([fact.as_prompt() for _, fact in pairs])
    behind = model.score([Prompt(f"{clause.text}. {fact.text}", fact.target) for clause, fact in pairs])
    gains = iter([before.nll - after.nll for before, after in zip(alone, behind, strict=True)])
    choices = []
    for clause in clauses:
        if len(clause.candidates) > 1:
            support = {fact: next(gains) for fact in clause.candidates}
            choices.append(max(support, key=lambda fact: support[fact]))
        else:
            choices.append(clause.candidates[0])
    return choices
