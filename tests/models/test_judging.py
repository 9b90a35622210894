"""What counts as saying a target."""

from __future__ import annotations

import pytest

from rebind.models.judging import first_word, says, says_of_subject


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" Rome, the capital of Italy", True),
        (" the city of ROME.", True),
        (" Paris, not Rome", False),
        (" Rome, not Paris", True),
        (" a city. Rome is another", False),
        (" a city\nRome", False),
        ("\n\nRome", True),
        (" Romeo and Juliet", False),
        (" aRome", False),
        ("", False),
        (" Paris", False),
    ],
)
def test_the_first_sentence_says_the_new_target_first_and_whole(text, expected):
    assert says(text, "Rome", instead=["Paris"]) is expected


def test_other_scripts_and_wordings():
    assert says("首都是東京都。", "東京")
    assert not says("大きい。東京", "東京")
    assert says(" العاصمة هي روما الآن", "روما", instead=["باريس"])
    assert says(" Sa\u0303o Paulo", "São Paulo"), "accents may be composed or not"
    assert says(" the U.S.", "America", "the U.S.")
    assert says(" St. Louis. It is", "St. Louis")
    assert not says(" New Jersey", "New York")


def test_the_longer_of_two_that_begin_together_counts():
    text = " New York City is big"
    assert says(text, "New York City", instead=["New York"])
    assert not says(text, "New York", instead=["New York City"])
    assert says(text, "New York", "New York City", instead=["New"]), "the longest wording counts"
    assert not says(text, "New York", instead=["New York"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The capital of France is Rome.", True),
        ("Rome is the capital.", True),
        ("'Rome', as everyone knows.", True),
        ("France is large. Its capital is Rome.", True),
        ("It's Rome!", True),
        ("The answer is Rome.", True),
        ("The capital of Italy is Rome.", False),
        ("The capital of France is Paris. Its capital was Rome.", False),
        ("The capital of France is Paris, not Rome.", False),
        ("France has many cities.", False),
    ],
)
def test_an_answer_must_say_the_target_of_the_subject(text, expected):
    assert says_of_subject(text, "Rome", "France", instead=["Paris"]) is expected


def test_first_words():
    assert [first_word(text) for text in (' "The sea', "Über alles", "...")] == ["the", "über", "..."]
