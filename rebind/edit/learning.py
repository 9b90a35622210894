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
    """Return one fact for each clause.

    Of candidates with the same prompt, which differ in where the object ends ("Night Watch" or "Night Watch in Delft"),
    it is the one behind which the model would rather end the sentence. Otherwise the order of the candidates decides.
    """
    choices = [[fact for fact in one.candidates if fact.text == one.candidates[0].text] for one in clauses]
    uncertain = [fact for choice in choices if len(choice) > 1 for fact in choice]
    targets = model.score([fact.as_prompt() for fact in uncertain])
    ended = model.score([fact.as_prompt(f"{fact.target}.") for fact in uncertain])
    log_probs = [one.nll * one.tokens - end.nll * end.tokens for one, end in zip(targets, ended, strict=True)]
    ends = dict(zip(uncertain, log_probs, strict=True))  # of the full stop, behind each target
    return [max(choice, key=lambda fact: ends.get(fact, 0.0)) for choice in choices]
