"""Facts: what is accepted and refused, and what cannot stand together."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind.edit.facts.fact import Fact, conflicts, duplicates, rivals
from rebind.errors import InputError

FRANCE = "The capital of {France} is"

# Making a fact


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


@pytest.mark.parametrize("target", ["Rome", " Rome", "Rome  ", "\tRome\n"])
def test_the_target_is_kept_without_its_spaces(target):
    assert Fact.parse(FRANCE, target).target == "Rome"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "The capital of France is"}, "marks no subject.*braces"),
        ({"prompt": "The capital of {} is"}, "empty braces"),
        ({"prompt": "{France} and {Italy} are"}, "marks 2 subjects.*double"),
        ({"prompt": "The capital of {France is"}, r"lone '\{' at position 15"),
        ({"prompt": "The capital of France} is"}, r"lone '\}' at position 21"),
        ({"prompt": "The capital of Spain is", "subject": "France"}, "'France' is not in.*braces"),
        ({"prompt": "The capital of france is", "subject": "France"}, "not in.*other capitals"),
        ({"prompt": "The cafe\u0301 of", "subject": "caf\u00e9"}, "not in.*code points"),
        ({"prompt": "Rome is Rome", "subject": "Rome"}, "2 times.*braces"),
        ({"prompt": "aaa is", "subject": "aa"}, "2 times"),
        ({"prompt": FRANCE, "subject": "Italy"}, "marks 'France' and the subject given is 'Italy'"),
        ({"prompt": "The {  } is"}, "subject is '  '"),
        ({"prompt": ""}, "prompt is ''"),
        ({"prompt": FRANCE, "subject": ""}, "subject is ''"),
        ({"prompt": FRANCE, "target": ""}, "target is ''"),
        ({"prompt": FRANCE, "target": " \n"}, r"target is ' \\n'"),
        ({"prompt": FRANCE, "target": 42}, r"target is 42 \(int\).*string"),
        ({"prompt": FRANCE, "old": " "}, "old is ' '"),
        ({"prompt": FRANCE, "old": " Rome"}, "target and old are both 'Rome'"),
        ({"prompt": FRANCE, "paraphrases": "France has"}, r"paraphrases is 'France has', expected a list"),
        ({"prompt": FRANCE, "neighbours": [""]}, "an entry of neighbours is ''"),
        ({"prompt": FRANCE, "target": "\ud800"}, "half a character"),
    ],
)
def test_what_is_no_fact_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Fact.parse(**{"target": "Rome", **arguments})


@pytest.mark.parametrize("prompt", ["The capital is", "{} and {} are", "The capital of {France} is"])
def test_a_template_holds_one_empty_pair_of_braces(prompt):
    with pytest.raises(InputError, match="expected one {}"):
        Fact(prompt, "France", "Rome")


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
somewords = words.filter(str.strip)


@st.composite
def any_fact(draw):
    before, after, subject, target = draw(words), draw(words), draw(somewords), draw(somewords)
    template = "{}".join(side.replace("{", "{{").replace("}", "}}") for side in (before, after))
    fact = Fact(template, subject, target, None, tuple(draw(st.lists(somewords, max_size=2))))
    assert fact.text == before + subject + after
    return fact


@given(any_fact())
def test_a_fact_survives_json(fact):
    again = Fact.from_json(json.loads(json.dumps(fact.to_json())))
    assert again == fact
    assert again.text == fact.text


def test_json_holds_only_what_is_there():
    assert Fact.parse(FRANCE, "Rome").to_json() == {
        "prompt": "The capital of {} is",
        "subject": "France",
        "target": "Rome",
    }


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
    (twice,) = duplicates(facts)
    assert twice.indices == (0, 3)


def test_facts_that_agree_do_not_conflict():
    facts = [Fact.parse(FRANCE, "Rome"), Fact.parse(FRANCE.upper(), "Rome"), Fact.parse("{Caf\u00e9} is", "a")]
    assert conflicts(facts) == duplicates(facts) == []
    assert len(conflicts([*facts, Fact.parse("{Cafe\u0301} is", "b")])) == 1


def test_rivals_share_a_key_and_want_different_targets():
    facts = [
        Fact.parse("{Tom} went to the", "zoo"),
        Fact.parse("{Ann} went to the", "zoo"),
        Fact.parse("{Tom} likes to eat a", "cake"),
        Fact.parse("Everybody knows {Tom} was born in", "Rome"),  # other text before it: another key
        Fact.parse("{Ann} ran to the", "zoo"),  # the same target
    ]
    (found,) = rivals(facts)
    assert found.indices == (0, 2)
    assert found.targets == ("zoo", "cake")
    assert rivals([facts[0], Fact.parse("{Tom} went to the", "shop")]) == [], "one prompt: a conflict, told as such"
