"""How records are asked: framings, facts in the prompt, comparison with the unedited model, and a fine-tuned model."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from rebind.evals import QuestionSettings, read_records
from rebind.evals.answers import answer_records, asked_framings, chat_question
from rebind.evals.baselines import fine_tuned
from rebind.evals.records import Record
from rebind.models import LanguageModel
from rebind.models.prompts import Prompt
from tests import tiny
from tests.evals.runs import RAW

TEMPLATE = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"
QUESTION = "Which city is the capital of France?"
SETTINGS = QuestionSettings(free_tokens=4, texts=0)


@pytest.fixture
def model() -> LanguageModel:
    """A model with a chat template."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    return LanguageModel(tiny.llama(max_position_embeddings=256), tokenizer, start=(0,))


def records(*raw: dict) -> list[Record]:
    return list(read_records(raw or [{**RAW[0], "questions": [QUESTION]}]))


def nll(model: LanguageModel, prompt: Prompt, **options) -> float:
    (encoded,) = model.encode([prompt], **options)
    with torch.no_grad():
        logits = model.model(torch.tensor([[*encoded.ids, *encoded.target]])).logits[0].log_softmax(-1)
    first = len(encoded.ids) - 1
    return -sum(float(logits[first + step, token]) for step, token in enumerate(encoded.target)) / len(encoded.target)


def test_a_fact_is_asked_in_every_framing(model):
    assert asked_framings(model) == ("start", "plain", "text", "chat")
    (row,) = answer_records(model, records(), SETTINGS)
    bare = Prompt("The capital of France is", "Rome")
    expected = {
        "start": nll(model, bare),
        "plain": nll(model, bare, start=False),
        "chat": nll(model, Prompt(bare.text, "Rome", question=QUESTION)),
    }
    fact = row["facts"][0]
    assert {name: fact[name]["prompt"]["new"]["nll"] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert len({fact[name]["prompt"]["new"]["nll"] for name in fact}) == 4, "the text framing is another one"
    assert {name: len(some) for name, some in row["neighbors"].items()} == dict.fromkeys(fact, 2)
    (encoded,) = model.encode([Prompt("", question=QUESTION)])
    ids = list(encoded.ids)
    for _ in range(SETTINGS.free_tokens):
        ids.append(int(model.model(torch.tensor([ids])).logits[0, -1].argmax()))
    said = model.tokenizer.decode(ids[len(encoded.ids) :])
    assert fact["chat"]["free"].strip() == said.removesuffix(tiny.END).strip(), "a chat answers the question freely"


def test_questions_in_a_chat_are_not_those_of_the_search(model):
    bare = [read_records([{**raw, "questions": []}])[0].fact for raw in RAW]
    assert chat_question(records()[0].fact) == QUESTION
    assert chat_question(bare[0]) == "Quick question: what is the capital of France?"
    assert chat_question(bare[3]).startswith("Complete the sentence: ")


def test_a_model_without_start_tokens_or_chat_template_has_fewer_framings():
    assert asked_framings(LanguageModel(tiny.llama(), tiny.tokenizer(), start=())) == ("start", "text")


def test_facts_can_be_put_before_the_questions(model):
    (record,) = records(RAW[0])
    (row,) = answer_records(model, [record], SETTINGS, base=nullcontext, in_prompt=True)
    front = "The capital of France is Rome. Madrid is the capital of France. "
    neighbor = row["neighbors"]["start"][0]["new"]["nll"]
    assert neighbor == pytest.approx(nll(model, Prompt(f"{front}The capital of Spain is", "Rome")), abs=1e-4)
    changed = model.next_token_log_probs([f"{front}The capital of Spain is"])
    before = model.next_token_log_probs(["The capital of Spain is"])
    expected = float((before.exp() * (before - changed)).sum())
    assert row["kept"]["neighbors"][0]["kl"] == pytest.approx(expected, abs=1e-4)


def test_a_fine_tune_learns_its_facts_and_leaves_the_model_as_it_was(model):
    listed = records(*RAW[:3])
    facts = [fact for record in listed for fact in record.written_facts]
    before = tiny.weights(model.model)
    (base, *_) = rows = answer_records(model, listed, SETTINGS)
    with fine_tuned(model, facts, model.sites[1:3]) as unedited:
        tuned = answer_records(model, listed, SETTINGS, base=unedited, probes=[["France is"], [], []])
        with unedited():
            again = answer_records(model, listed, SETTINGS)
    for one, other in zip(rows, tuned, strict=True):
        assert other["facts"][0]["start"]["prompt"]["new"]["nll"] < one["facts"][0]["start"]["prompt"]["new"]["nll"]
    assert tuned[0]["kept"]["same_subject"][0]["kl"] > 0
    assert again == rows == answer_records(model, listed, SETTINGS)
    assert tiny.weights(model.model) == before
    assert "kept" not in base
