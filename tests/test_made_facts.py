"""Facts that the benchmark pairs anew: as many as asked for, the same every time, none twice."""

from __future__ import annotations

import pytest

from benchmarks.made import made_facts
from rebind.edit.facts import Fact, conflicts, duplicates

RECORDS = [
    Fact("{} plays the", "Ada", "harp", "flute", tags=("counterfact/1", "P1")),
    Fact("The instrument of {} is the", "Bo", "oboe", "drum", tags=("counterfact/2", "P1")),
    Fact("{} is in", "Oslo", "Asia", "Europe", tags=("counterfact/3", "P2")),
]


def test_records_come_first_then_their_relations_then_others():
    made = made_facts(RECORDS, 9)
    assert made[:3] == RECORDS
    assert [(fact.text, fact.target, fact.old) for fact in made[3:5]] == [
        ("The instrument of Ada is the", "oboe", "drum"),
        ("Bo plays the", "harp", "flute"),
    ]
    assert {fact.text for fact in made[5:]} == {
        "Ada is in",
        "Bo is in",
        "Oslo plays the",
        "The instrument of Oslo is the",
    }
    assert made_facts(RECORDS, 5) == made[:5]


def test_no_prompt_is_asked_for_twice():
    made = made_facts([*RECORDS, *RECORDS, Fact("{} plays  the", "ADA", "lute", "flute", tags=("x", "P1"))], 9)
    assert not conflicts(made)
    assert not duplicates(made)


def test_too_few_records_are_refused():
    with pytest.raises(SystemExit, match="3 records make 9 facts, expected 10"):
        made_facts(RECORDS, 10)
