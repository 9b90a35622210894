"""Learning from a text: what is written, what is known, what contradicts itself, what was not understood."""

from __future__ import annotations

from typing import Any

import pytest

from rebind.edit.facts import Fact, contradictions
from rebind.edit.facts.extraction import Clause
from rebind.edit.learning import choose_candidates, facts_in_text
from rebind.models.scoring import FactScore
from tests.edit.editors import QUICK, open_editor

PASSAGE = (
    "The capital of France is Rome. It rained all day. France's capital is Rome. The Xbox is made by Nintendo. "
    "Marie Curie was born in Oslo. The birthplace of Marie Curie is Madrid. The Xbox is made by Nintendo."
)


class Believer:
    """Stands in for a language model: it has a fixed opinion of how likely each target is after each prompt."""

    def __init__(self, nll: dict[str, float]) -> None:
        self.nll = nll

    def score(self, prompts: Any) -> list[FactScore]:
        return [self._score(self.nll.get(f"{one.text} {one.target}", 5.0)) for one in prompts]

    def _score(self, nll: float) -> FactScore:
        return FactScore(0.5, 1, nll, 1, 1 if nll < 1 else 0, 0, "x")


def test_a_text_is_sorted_by_what_the_model_says():
    facts = facts_in_text(Believer({"The capital of France is Rome": 0.5}), PASSAGE)
    assert [one.fact.text for one in facts.known] == ["The capital of France is"]
    assert [one.fact.text for one in facts.new] == ["France's capital is", "The Xbox is made by"]
    assert [one.fact.text for one in facts.repeated] == ["The Xbox is made by"]
    assert [one.fact.target for one in facts.contradicted] == ["Oslo", "Madrid"]
    assert [one.targets for one in facts.contradictions] == [("Oslo", "Madrid")]
    assert facts.not_understood == ("It rained all day",)


def test_the_catalog_sees_contradictions_in_other_words():
    same = [Fact.parse("The capital of {France} is", "Rome"), Fact.parse("{France}'s capital is", "rome")]
    other = Fact.parse("{France}'s capital is", "Lyon")
    assert not contradictions(same)
    assert [one.indices for one in contradictions([*same, other])] == [(0, 1, 2)]
    assert not contradictions([same[0], Fact.parse("The capital of {Italy} is", "Lyon")])


def test_the_object_ends_where_the_model_would_end_the_sentence():
    short, long = (Fact.parse("{Rembrandt} painted", target) for target in ("Anna", "Anna in Delft"))
    other = Fact.parse("{Anna} was painted by", "Rembrandt")
    clauses = [Clause("", (short, long, other)), Clause("", (other, short))]
    ends_short = Believer({f"{short.text} {short.target}.": 0.1})
    ends_long = Believer({f"{long.text} {long.target}.": 0.1, f"{other.text} {other.target}.": 0.0})
    assert choose_candidates(ends_short, clauses) == [short, other]
    assert choose_candidates(ends_long, clauses) == [long, other]


def test_what_is_new_is_written_and_undone():
    editor = open_editor()
    before = editor.score([Fact.parse("The {Xbox} is made by", "Nintendo")])
    lesson = editor.learn(PASSAGE, targets=QUICK, force=True)
    assert lesson.edit is not None
    assert lesson.edit.method == "dense"
    assert lesson.written == tuple(one.fact for one in lesson.facts.new)
    assert editor.score([Fact.parse("The {Xbox} is made by", "Nintendo")])[0].nll < before[0].nll
    editor.undo(lesson.edit.id)
    assert editor.score([Fact.parse("The {Xbox} is made by", "Nintendo")]) == before


@pytest.mark.parametrize("text", ["", "It rained all day."])
def test_a_text_without_facts_writes_nothing(text):
    editor = open_editor()
    lesson = editor.learn(text)
    assert lesson.edit is None
    assert not lesson.written
    assert not editor.ledger.edits
