"""Questions and paraphrases that patterns make of prompts."""

from __future__ import annotations

import pytest

from rebind.edit.facts import Fact
from rebind.edit.facts.questions import paraphrases_of, question_of


@pytest.mark.parametrize(
    ("prompt", "target", "question"),
    [
        ("The capital of {France} is", "Rome", "What is the capital of France?"),
        ("The headquarters of {Boeing} are in the city of", "Miami", "What city are the headquarters of Boeing in?"),
        ("{Marie Curie} was born in", "Rome", "Where was Marie Curie born?"),
        ("{Marie Curie} was born in", "1871", "When was Marie Curie born?"),
        ("{macOS}, developed by", "Nokia", "Who was macOS developed by?"),
        ("{Tom} plays the instrument", "harp", "What instrument does Tom play?"),
        ("{Ravel} died in the city of", "Rome", "What city did Ravel die in?"),
        ("{Hungary}'s capital is", "Rome", "What is Hungary's capital?"),
        ("In {Brazil}, people speak", "Dutch", "What do people speak in Brazil?"),
        ("{The Louvre} can be found in", "Rome", "Where can The Louvre be found?"),
        ("Where is {Uruguay}? It is located in", "Asia", "Where is Uruguay?"),
        ("{Oslo}, in", "Peru", None),
        ("Die Hauptstadt von {Spanien} ist", "Rom", None),
    ],
)
def test_questions(prompt, target, question):
    assert question_of(Fact.parse(prompt, target)) == question


@pytest.mark.parametrize(
    ("prompt", "paraphrases"),
    [
        ("The capital of {France} is", ["France's capital is"]),
        ("{France}'s capital is the city of", ["The capital of France is the city of"]),
        ("{Tom} plays the", []),
    ],
)
def test_paraphrases(prompt, paraphrases):
    assert paraphrases_of(Fact.parse(prompt, "Rome")) == paraphrases
