"""What a model says freely, and how that is judged."""

from __future__ import annotations

import pytest

from rebind.edit.answers import free_answers
from rebind.edit.facts import Fact
from rebind.models.language_model import LanguageModel
from tests import tiny

FACT = Fact.parse("The capital of {France} is", "Rome", old="Paris", questions=["Which city is it?"])
TEMPLATE = "{% for turn in messages %}[{{ turn['role'] }}] {{ turn['content'] }}\n{% endfor %}"


@pytest.fixture
def spoken(monkeypatch):
    """Return a function that asks a model whose answers depend on the last words of the prompt."""
    texts: dict[str, str] = {}
    tokenizer = tiny.tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    model = LanguageModel(tiny.llama(max_position_embeddings=256), tokenizer)
    asked: list[str] = []

    def answer(prompts, tokens):
        questions = [tokenizer.decode(prompt.ids) for prompt in prompts]
        asked.extend(questions)
        return [
            next((says for ending, says in texts.items() if question.rstrip().endswith(ending)), " nothing")
            for question in questions
        ]

    monkeypatch.setattr(model, "generate_encoded", answer)

    def run(framing: str, **answers: str):
        texts.clear()
        texts.update({ending.replace("_", " "): says for ending, says in answers.items()})
        return free_answers(model, [FACT], [framing])[0]

    run.asked = asked  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (" Rome, a city", True),
        (" the old city of Rome.", True),
        (" Romeo", False),
        (" Paris, not Rome", False),
        (" Madrid. Rome is old", False),
    ],
)
def test_a_continuation_says_the_target_in_its_sentence(spoken, answer, said):
    for framing in ("start", "plain", "text"):
        (one,) = spoken(framing, France_is=answer)
        assert (one.framing, one.answer, one.said) == (framing, answer, said)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("The capital of France is Rome.", True),
        ("Rome is the capital.", True),
        ("It is Rome.", True),
        ("The capital of Italy is Rome.", False),
        ("The capital of France is Paris. It is not Rome.", False),
        ("I do not know.", False),
    ],
)
def test_an_answer_in_a_chat_is_about_the_subject(spoken, answer, said):
    (one,) = spoken("chat", **{"[assistant]": answer})
    assert (one.prompt, one.said) == ("Which city is it?", said)
    assert spoken.asked[-1].endswith("[assistant]"), "no words are put into the assistant's mouth"


def test_a_fact_is_asked_in_other_words(spoken):
    answers = spoken("paraphrase", **{"Which city is it?": " Rome"})
    assert "France's capital is" in [one.prompt for one in answers]
    assert all(FACT.subject in one.prompt for one in answers), "questions that do not name the subject are left out"
    assert not any(one.said for one in answers)


def test_a_model_speaks_for_itself():
    model = LanguageModel(tiny.llama(), tiny.tokenizer())
    (answers,) = free_answers(model, [FACT], ["start", "plain", "text"])
    assert [one.framing for one in answers] == ["start", "plain", "text"]
    assert answers[0].answer == model.generate([FACT.text], 12)[0]
    assert len({one.answer for one in answers}) > 1
