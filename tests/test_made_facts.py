"""Facts that the benchmarks make of neighbors: as many as asked for, the same every time, no subject twice."""

from __future__ import annotations

import pytest

from benchmarks.made import made_facts
from rebind.edit.facts.conflicts import conflicts
from rebind.edit.facts.fact import Fact, comparable
from rebind.evals.records import Question, Record


def record(
    number: int,
    prompt: str,
    subject: str,
    target: str,
    old: str | None,
    neighbors: tuple[str, ...] = (),
    relation: str = "P1",
) -> Record:
    fact = Fact(prompt, subject, target, old, tags=(f"counterfact/{number}", relation))
    return Record(fact, f"counterfact/{number}", neighbors=tuple(Question(text, old) for text in neighbors))


RECORDS = [
    record(1, "{} plays the", "Ada", "harp", "flute", ("Cy plays the", "The instrument of Di is the", "Ed has a")),
    record(2, "The instrument of {} is the", "Bo", "oboe", "drum", ("Fay plays the", "CY plays  the", "Gus plays the")),
    record(3, "It is in {}", "Oslo", "Asia", "Europe", ("It is in Rome", "Cy plays the"), relation="P2"),
]


def told(made: list[Record]) -> list[tuple[str, str, str, str | None]]:
    return [(one.fact.text, one.fact.subject, one.fact.target, one.fact.old) for one in made]


def test_records_come_first_then_first_neighbors_then_second_ones():
    made = made_facts(RECORDS, 8)
    assert made[:3] == RECORDS
    assert told(made[3:]) == [
        ("Cy plays the", "Cy", "harp", "flute"),
        ("Fay plays the", "Fay", "oboe", "drum"),
        ("It is in Rome", "Rome", "Asia", "Europe"),
        ("The instrument of Di is the", "Di", "oboe", "flute"),
        ("Gus plays the", "Gus", "oboe", "drum"),
    ]
    assert made_facts(RECORDS, 8) == made
    assert made_facts(RECORDS, 5) == made[:5]


def test_a_neighbor_that_fits_no_template_of_its_relation_is_passed_over():
    with pytest.raises(SystemExit, match="3 records make 8 facts, expected 9: pass more records"):
        made_facts(RECORDS, 9)
    assert {"Ed has a", "CY plays  the"}.isdisjoint(one.fact.text for one in made_facts(RECORDS, 8))


def test_no_subject_comes_twice():
    """Of records neither, nor where capitals and spaces differ, nor where two templates split the same text."""
    more = [
        *RECORDS,
        record(4, "{} performs on the", "ADA", "lute", "flute", ("Cy performs on the", "Ada plays the")),
        record(5, "The sound of {} is", "rain", "low", "high", ("The sound of the sea is",), relation="P3"),
        record(6, "{} is", "snow", "low", "high", ("The sound of the sea is",), relation="P4"),
    ]
    with pytest.raises(SystemExit, match="6 records make 11 facts"):
        made_facts(more, 12)
    facts = [one.fact for one in made_facts(more, 11)]
    assert len({comparable(fact.subject) for fact in facts}) == 11
    assert len({comparable(fact.parts[0] + fact.subject) for fact in facts}) == 11
    assert not conflicts(facts)
    assert len({(fact.text, fact.target) for fact in facts}) == len(facts)


@pytest.mark.parametrize(
    ("prompt", "neighbor", "subject"),
    [
        ("{} plays the", "Cy plays the", "Cy"),
        ("It is in {}", "It is in Rome", "Rome"),
        ("The capital of {} is", "The capital of Peru is", "Peru"),
        ("In {{a}} {} is", "In {a} Peru is", "Peru"),
        ("The capital of {} is", "The capital of  Peru is", "Peru"),
    ],
)
def test_templates_have_text_before_the_subject_or_after_it_or_both(prompt, neighbor, subject):
    made = made_facts([record(1, prompt, "Ada", "new", "old", (neighbor,))], 2)[1]
    assert (made.fact.text, made.fact.subject) == (neighbor, subject)
    assert not made.fact.paraphrases
    assert not made.neighbors


def test_the_template_that_leaves_the_shortest_subject_is_the_neighbors():
    neighbor = "The capital of Peru is"
    records = [
        record(1, "{} is", "Ada", "new", "old", (neighbor,)),
        record(2, "The capital of {} is", "Bo", "new", "old"),
        record(3, "The capital {} is", "Cy", "new", "old"),
    ]
    made = made_facts(records, 4)[-1].fact
    assert (made.prompt, made.subject) == ("The capital of {} is", "Peru")


def test_a_template_does_not_fit_the_end_of_a_longer_one():
    neighbors = ("Bo, who was from", "Cy, which was from", "Di was from")
    made = made_facts([record(1, "{} was from", "Ada", "new", "old", neighbors)], 2)
    assert told(made[1:]) == [("Di was from", "Di", "new", "old")]
    longer = record(2, "{}, who was from", "Ed", "new", "old")
    made = made_facts([record(1, "{} was from", "Ada", "new", "old", neighbors), longer], 4)
    assert [one.fact.subject for one in made] == ["Ada", "Ed", "Bo", "Di"]


@pytest.mark.parametrize("neighbor", ["The is", "The of is", "The capital of is", "The capital of   is"])
def test_a_template_needs_a_subject(neighbor):
    with pytest.raises(SystemExit, match="make 1 facts"):
        made_facts([record(1, "The capital of {} is", "Ada", "new", "old", (neighbor,))], 2)


def test_a_neighbor_whose_answer_is_unknown_or_the_target_is_passed_over():
    fact = Fact("{} plays the", "Ada", "harp", "flute")
    asked = (Question("Bo plays the", None), Question("Cy plays the", "Harp"), Question("Di plays the", "drum"))
    made = made_facts([Record(fact, "1", neighbors=asked)], 2)
    assert told(made[1:]) == [("Di plays the", "Di", "harp", "drum")]
    with pytest.raises(SystemExit, match="1 records make 2 facts"):
        made_facts([Record(fact, "1", neighbors=asked)], 3)


def test_what_spared_prompts_are_about_is_not_written():
    """Neither in other templates, nor by further records; the records themselves stay."""
    more = [
        record(4, "{} performs on the", "Gus", "lute", "flute", ("Fay performs on the", "Hal performs on the")),
        record(5, "{} performs on the", "Ian", "lute", "flute", ("Ada performs on the",)),
    ]
    spared = {"Fay plays the", "Gus plays the", "Ada performs on the"}
    with pytest.raises(SystemExit, match="5 records make 8 facts"):
        made_facts(RECORDS, 9, more=more, spared=spared)
    made = made_facts(RECORDS, 8, more=[*RECORDS, *more], spared=spared)
    assert [one.fact.subject for one in made] == ["Ada", "Bo", "Oslo", "Ian", "Cy", "Rome", "Di", "Hal"]


def test_targets_of_a_relation_take_turns():
    """Neighbors of one record have one answer; they are not all to get one target, nor what is true of them."""
    first = record(
        1, "{} plays the", "Ada", "harp", "flute", tuple(f"{name} plays the" for name in ("Bo", "Cy", "Di", "Ed"))
    )
    others = [record(2, "{} plays the", "Fay", "flute", "drum"), record(3, "{} plays the", "Gus", "oboe", "drum")]
    made = made_facts([first, *others], 7)[3:]
    assert [one.fact.target for one in made] == ["harp", "oboe", "oboe", "harp"]
    assert {one.fact.old for one in made} == {"flute"}
