"""Questions and paraphrases of facts: the user's, those of the catalog, and those that patterns make."""

from __future__ import annotations

import re

import pytest

from rebind.edit.facts import Fact
from rebind.edit.facts.questions import PARAPHRASES, paraphrases_of, questions_from_grammar, questions_of
from rebind.edit.facts.relations import KIND_WORDS, OTHER_SUBJECTS, PROTECTED_SUBJECTS, RELATIONS, relation_of


@pytest.mark.parametrize(
    ("prompt", "target", "question"),
    [
        ("The capital of {France} is", "Rome", "What is the capital of France?"),
        ("The headquarters of {Boeing} are in the city of", "Miami", "What city are the headquarters of Boeing in?"),
        ("{Marie Curie} was born in", "Rome", "Where was Marie Curie born?"),
        ("{Marie Curie} was born in", "1871", "When was Marie Curie born?"),
        ("{macOS}, developed by", "Nokia", "Who developed macOS?"),
        ("{Tom} plays the instrument", "harp", "What instrument does Tom play?"),
        ("{Ravel} died in the city of", "Rome", "What city did Ravel die in?"),
        ("{Hungary}'s capital is", "Rome", "What is Hungary's capital?"),
        ("In {Brazil}, people speak", "Dutch", "What do people speak in Brazil?"),
        ("{The Louvre} can be found in", "Rome", "Where can The Louvre be found?"),
        ("Where is {Uruguay}? It is located in", "Asia", "Where is Uruguay?"),
        ("The {Great Wall} was built in", "Peru", "Where was the Great Wall built?"),
        ("The color of a {flamingo} is", "green", "What is the color of a flamingo?"),
        ("The novel {Dune} belongs to the genre of", "poetry", "What genre does the novel Dune belong to?"),
        ("At sea level, {alcohol} boils at", "90 degrees", "At sea level, what does alcohol boil at?"),
        ("{Bees} produce", "silk", "What do bees produce?"),
        ("{Vodka} is a drink that comes from", "Brazil", "Where does Vodka come from?"),
        ("{Hawaii} is a group of islands in the", "Atlantic", "Where is Hawaii?"),
        ("The {Iliad} is a poem attributed to", "Sappho", "Who is the Iliad attributed to?"),
        ("{Easter} is celebrated on", "October 12", "When is Easter celebrated?"),
        ("The {Apollo 11} mission landed on the moon in", "1976", "When did the Apollo 11 mission land on the moon?"),
        ("The speed of {light} is about", "500 miles per hour", "What is the speed of light?"),
        ("The {Olympic Games} take place every", "ten years", None),
        ("The {Ryder Cup} takes place every", "ten years", "How often does the Ryder Cup take place?"),
        ("The {Iliad} was written by", "Sappho", "Who wrote the Iliad?"),
        ("The {Xbox} is made by", "Nintendo", "Who is the Xbox made by?"),
        ("A {crab} has", "twelve legs", "How many legs does a crab have?"),
        ("A lack of {iron} causes", "rickets", "What does a lack of iron cause?"),
        ("A group of {crows} is called a", "herd", "What is a group of crows called?"),
        ("{K2} is part of a mountain range called the", "Alps", "What mountain range is K2 part of?"),
        ("{Tom} comes from the English city of", "Leeds", "What English city does Tom come from?"),
        ("{Tom} was defeated at the Battle of", "Leipzig", "What battle was Tom defeated at?"),
        ("The first woman to walk on the {Moon} was", "Ada", "Who was the first woman to walk on the Moon?"),
        ("The CEO of {Nokia} is a man named", "Tom", "Who is the CEO of Nokia?"),
        ("{Oslo}, in", "Peru", None),
        ("Die Hauptstadt von {Spanien} ist", "Rom", None),
    ],
)
def test_questions_from_grammar(prompt, target, question):
    questions = questions_from_grammar(Fact.parse(prompt, target))
    assert (questions[0] if questions else None) == question
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize(
    ("prompt", "paraphrases"),
    [
        ("The motto of {Oslo} is", ["Oslo's motto is", "When it comes to Oslo, the motto is"]),
        ("The color of a {crow} is", ["A crow's color is", "When it comes to a crow, the color is"]),
        ("The number of letters in the {alphabet} is", ["In the alphabet, the number of letters is"]),
        ("{Oslo}'s motto is the word", ["The motto of Oslo is the word"]),
        ("{Tom} eats", ["What Tom eats is"]),
        ("{Tom} was praised by", ["The one who praised Tom was"]),
        ("The {Great Wall} was built in", ["The place where the Great Wall was built was"]),
        ("The {Sun} is a", []),
    ],
)
def test_paraphrases_from_grammar(prompt, paraphrases):
    fact = Fact.parse(prompt, "Rome")
    assert relation_of(fact) is None
    assert list(paraphrases_of(fact)) == paraphrases


# The catalog


@pytest.mark.parametrize(
    ("prompt", "target", "wording"),
    [
        ("The capital of {France} is", "Rome", "France's capital is"),
        ("{Paris} is the capital of", "Spain", "The country whose capital is Paris is"),
        ("The {Xbox} is a product of", "Nintendo", "The maker of the Xbox is"),
        ("{Ravel} was born in", "Rome", "The birthplace of Ravel is"),
        ("{Ravel} was born in", "1871", "The year in which Ravel was born is"),
        ("{Ravel} worked as a", "actor", "Ravel earned a living as an"),
        ("The native language of {Ravel} is", "Dutch", "The mother tongue of Ravel is"),
        ("The official language of {Peru} is", "Dutch", "The language spoken in Peru is"),
    ],
)
def test_a_prompt_is_recognized_as_a_relation(prompt, target, wording):
    fact = Fact.parse(prompt, target)
    assert wording in paraphrases_of(fact)
    assert fact.text not in paraphrases_of(fact)
    assert len(paraphrases_of(fact)) <= PARAPHRASES
    assert all(question.endswith("?") and fact.subject in question for question in questions_of(fact))


def test_what_the_user_wrote_comes_first():
    fact = Fact.parse(
        "The capital of {France} is", "Rome", paraphrases=("France is ruled from",), questions=("Which?",)
    )
    assert paraphrases_of(fact) == ("France is ruled from",)
    assert questions_of(fact) == ("Which?",)


def test_the_catalog_is_complete():
    assert {kind for relation in RELATIONS for kind in relation.kinds} == set(KIND_WORDS) == set(OTHER_SUBJECTS)
    assert set(PROTECTED_SUBJECTS) == set(KIND_WORDS)
    for kind, names in PROTECTED_SUBJECTS.items():
        assert not set(names) & set(OTHER_SUBJECTS[kind]), "who is asked afterwards is not protected"
    for relation in RELATIONS:
        assert relation.kinds or relation.cue, "it could neither be kept nor recognized"
        assert all(text.count("{}") == 1 for text in (*relation.wordings, *relation.questions))
        assert bool(relation.cue) == bool(relation.questions)


@pytest.mark.parametrize("relation", [one for one in RELATIONS if one.cue], ids=lambda one: one.wordings[0])
def test_every_relation_can_be_reached(relation):
    """No cue is hidden behind an earlier one: some wording or question is recognized as its own relation."""
    target = "1900" if relation.numeric else "Rome"
    texts = [text.removesuffix("?") for text in (*relation.wordings, *relation.questions)]
    facts = [Fact.parse(text.replace("{}", "{Oslo}"), target) for text in texts]
    assert relation in [relation_of(fact) for fact in facts]
    assert re.compile(relation.cue)
