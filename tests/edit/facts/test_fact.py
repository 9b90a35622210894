"""Facts: what is accepted and refused, and which facts conflict."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind.edit.facts.conflicts import conflicts, shared_keys
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from rebind.models.prompts import Prompt
from tests.support import raises

FRANCE = "The capital of {France} is"

# Parsing


def test_braces_mark_the_subject():
    fact = Fact.parse(FRANCE, "Rome", old="Paris", paraphrases=["France's capital is"], tags=["demo"])
    assert fact == Fact("The capital of {} is", "France", "Rome", "Paris", ("France's capital is",), (), ("demo",))
    assert fact.text == "The capital of France is"
    assert fact.parts == ("The capital of ", " is")


@pytest.mark.parametrize(
    ("prompt", "subject", "text", "before"),
    [
        ("The capital of France is", "France", "The capital of France is", "The capital of "),
        ("The capital of {} is", "France", "The capital of France is", "The capital of "),
        ("The capital of {France} is", "France", "The capital of France is", "The capital of "),
        ("Iranian cities of Iran are", "Iran", "Iranian cities of Iran are", "Iranian cities of "),
        ("在法国的首都", "法国", "在法国的首都", "在"),
        ("{{a}} of {b} in {{{{", None, "{a} of b in {{", "{a} of "),
        ("{{{b}}} is", None, "{b} is", "{"),
        ("{{a}} of b is", "b", "{a} of b is", "{a} of "),
        ("Of { France } I say", None, "Of  France  I say", "Of  "),
        ("Of France I say", " France ", "Of France I say", "Of "),
    ],
)
def test_the_subject_is_where_it_was_put(prompt, subject, text, before):
    fact = Fact.parse(prompt, "Rome", subject=subject)
    assert fact.text == text
    assert fact.parts[0] == before
    assert fact.subject == fact.subject.strip()


def test_a_fact_yields_its_prompt():
    fact = Fact.parse(FRANCE, "\tRome \n", old="Paris")
    assert fact.as_prompt() == Prompt("The capital of France is", "Rome", (15, 21))
    assert fact.as_prompt("Oslo").target == "Oslo"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"prompt": "The capital of France is"}, "no_subject"),
        ({"prompt": "{France} and {Italy} are"}, "several_subjects"),
        ({"prompt": FRANCE, "subject": "Italy"}, "several_subjects"),
        ({"prompt": "The capital of {France is"}, "unpaired_brace"),
        ({"prompt": "The capital of france is", "subject": "France"}, "subject_not_in_prompt"),
        ({"prompt": "The cafe\u0301 of", "subject": "caf\u00e9"}, "subject_not_in_prompt"),
        ({"prompt": "Rome is Rome", "subject": "Rome"}, "subject_not_unique"),
        ({"prompt": "The {  } is"}, "empty_text"),
        ({"prompt": ""}, "empty_text"),
        ({"prompt": FRANCE, "target": " \n"}, "empty_text"),
        ({"prompt": FRANCE, "old": " "}, "empty_text"),
        ({"prompt": FRANCE, "neighbors": [""]}, "empty_text"),
        ({"prompt": FRANCE, "target": 42}, "not_text"),
        ({"prompt": FRANCE, "target": "\ud800"}, "invalid_unicode"),
        ({"prompt": FRANCE, "old": " Rome"}, "target_equals_old"),
        ({"prompt": FRANCE, "paraphrases": "France has"}, "not_a_list"),
    ],
)
def test_what_is_not_a_fact_is_refused(arguments, code):
    with raises(InputError, code):
        Fact.parse(**{"target": "Rome", **arguments})


@pytest.mark.parametrize("prompt", ["The capital is", "{} and {} are", "The capital of {France} is"])
def test_a_template_has_one_empty_pair_of_braces(prompt):
    with raises(InputError, "bad_template"):
        Fact(prompt, "France", "Rome")


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
nonempty_words = words.filter(str.strip)


@st.composite
def any_fact(draw):
    before, after, subject, target = draw(words), draw(words), draw(nonempty_words), draw(nonempty_words)
    template = "{}".join(side.replace("{", "{{").replace("}", "}}") for side in (before, after))
    fact = Fact(template, subject, target, None, tuple(draw(st.lists(nonempty_words, max_size=2))))
    assert fact.text == before + subject + after
    return fact


@given(any_fact())
def test_a_fact_survives_json(fact):
    record = fact.to_json()
    assert all(record.values()), "empty fields are left out"
    assert Fact.from_json(json.loads(json.dumps(record))) == fact


# Conflicts


def test_one_prompt_with_two_targets_is_a_conflict():
    facts = [
        Fact.parse(FRANCE, "Rome"),
        Fact.parse("The capital of {Spain} is", "Rome"),
        Fact.parse("the  capital of {FRANCE} is ", "Oslo"),
        Fact.parse("The capital of France is", "Rome", subject="capital"),
    ]
    (found,) = conflicts(facts)
    assert found.indices == (0, 2, 3)
    assert found.targets == ("Rome", "Oslo", "Rome")
    assert str(found) == "'The capital of France is' → Rome / Oslo (facts 0, 2, 3)"
    facts = [Fact.parse(FRANCE, "Rome"), Fact.parse(FRANCE.upper(), "Rome"), Fact.parse("{Caf\u00e9} is", "a")]
    assert conflicts(facts) == []
    assert len(conflicts([*facts, Fact.parse("{Cafe\u0301} is", "b")])) == 1


def test_facts_that_share_a_key():
    facts = [
        Fact.parse("{Tom} went to the", "zoo"),
        Fact.parse("{Ann} went to the", "zoo"),
        Fact.parse("{Tom} likes to eat a", "cake"),
        Fact.parse("Everybody knows {Tom} was born in", "Rome"),  # other text before it: another key
        Fact.parse("{Ann} ran to the", "zoo"),  # the same target
    ]
    (found,) = shared_keys(facts)
    assert found.indices == (0, 2)
    assert found.targets == ("zoo", "cake")
    assert shared_keys([facts[0], Fact.parse("{Tom} went to the", "shop")]) == [], "one prompt: a conflict"
