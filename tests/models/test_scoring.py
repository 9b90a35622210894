"""Scoring many prompts in few passes gives the numbers of one plain pass each."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rebind.errors import InputError
from rebind.models.prompts import EncodedPrompt, Prompt
from rebind.models.scoring import score_prompts
from tests import tiny
from tests.support import raises

PROMPTS = [
    Prompt("The capital of France is", "Rome"),
    Prompt("The capital of France is", "Paris"),
    Prompt("The capital of France is", "a city with a very long name indeed"),
    Prompt("I", "think"),
    Prompt("The mother tongue of Danielle Darrieux is", "French"),
    Prompt("عاصمة فرنسا هي", "روما"),
    Prompt("法国的首都是", "罗马"),
    Prompt("The capital of France is", "Rome"),  # again
    Prompt("He said that {she} had", "seen it"),
]
models = pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
starts = pytest.mark.parametrize("start", [(), (0,)])


def log_probs(model, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities after each token of one plain pass."""
    return torch.log_softmax(model.model(input_ids=torch.tensor([ids])).logits[0], dim=-1)


@models
@starts
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_prompts_scored_together_are_scored_alone(build, start, batch_tokens):
    model = tiny.language_model(build, start)
    scores = model.score(PROMPTS, batch_tokens=batch_tokens)
    for prompt, score in zip(model.encode(PROMPTS), scores, strict=True):
        rows = log_probs(model, [*prompt.ids, *prompt.target])[len(prompt.ids) - 1 : -1]
        picked = rows[range(len(prompt.target)), list(prompt.target)]
        first, best = rows[0], rows.argmax(-1).tolist()
        assert score.nll == pytest.approx(-float(picked.mean()), abs=1e-9)
        assert score.probability == pytest.approx(math.exp(float(picked.sum())), rel=1e-9)
        assert score.rank == 1 + int((first > first[prompt.target[0]]).sum())
        assert score.tokens == len(prompt.target)
        assert score.right_tokens == sum(a == b for a, b in zip(best, prompt.target, strict=True))
        assert (score.first_token, score.says) == (best[0], model.tokenizer.decode(best[:1]))
        assert score.exact == (tuple(best) == prompt.target)


WORDS = SimpleNamespace(batch_decode=lambda rows: [str(ids) for ids in rows])  # a tokenizer that can only decode


class FixedLogits:
    """A trunk with given logits, one row for each position."""

    context_length, device = None, torch.device("cpu")

    def __init__(self, logits: list[list[float]]) -> None:
        self.table = torch.tensor(logits, dtype=torch.float64)

    def cache(self, tokens):
        return SimpleNamespace(layers=[], batch_select_indices=lambda rows: None)

    def logits(self, tokens, where, *, cache):
        assert len(where) == len(self.table)
        return self.table


def test_scores_from_hand_made_logits():
    """Three words; prompt (0, 1); targets (2,), (2, 0) and (0,), the first and last with the same logits."""
    at_prompt, after_two = [0.0, 0.0, math.log(2)], [math.log(8), 0.0, 0.0]  # p(2) = 1/2; p(0 | 2) = 8/10
    trunk = FixedLogits([at_prompt, at_prompt, after_two])
    prompts = [EncodedPrompt((0, 1), 1, target) for target in ((2,), (2, 0), (0,))]
    one, two, three = score_prompts(trunk, WORDS, prompts)
    assert [one.probability, two.probability, three.probability] == pytest.approx([0.5, 0.4, 0.25])
    assert two.nll == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2)
    assert [score.rank for score in (one, two, three)] == [1, 1, 2]
    assert [(score.right_tokens, score.exact) for score in (one, two, three)] == [(1, True), (2, True), (0, False)]
    assert one.to_json() == {"probability": one.probability, "rank": 1, "nll": one.nll, "exact": True, "says": "[2]"}


def test_no_prompts_no_targets_and_a_broken_model():
    model = tiny.language_model()
    assert model.score([]) == []
    model.model.lm_head.weight.fill_(torch.nan)
    assert math.isnan(model.score(PROMPTS[:1])[0].nll)
    with raises(InputError, "no_target"):
        model.score([Prompt("The capital of France is")])


@models
def test_the_next_token_after_each_prompt(build):
    model = tiny.language_model(build)
    texts = ["The capital of France is", "I", "In the north of Norway"]
    rows = model.next_token_log_probs(texts)
    for row, prompt in zip(rows, model.encode([Prompt(text) for text in texts]), strict=True):
        assert torch.allclose(row, log_probs(model, list(prompt.ids))[-1], atol=1e-9)


def test_a_prompt_longer_than_the_context_is_refused_or_cut():
    model = tiny.language_model(tiny.gpt2, n_positions=8)
    text = " ".join(tiny.SENTENCES[:2])
    with raises(InputError, "prompt_too_long"):
        model.next_token_log_probs([text])
    ids = [*model.start, *model.tokenizer(text).input_ids][:8]
    assert torch.allclose(model.next_token_log_probs([text], truncate=True)[0], log_probs(model, ids)[-1], atol=1e-9)


# The likelihood of a text


@models
@starts
@pytest.mark.parametrize(("window", "limit"), [(32, 32), (95, 95), (96, 95), (512, 95)])
def test_the_nll_of_a_text_is_that_of_plain_passes(build, start, window, limit):
    model = tiny.language_model(build, start)  # of 96 positions, one of them for the start token
    text = " ".join(tiny.SENTENCES)
    ids = model.tokenizer(text).input_ids
    total, tokens = model.text_nll(text, window=window)
    expected = 0.0
    for begin in range(0, len(ids) if start else len(ids) - 1, limit):
        row = [*start, *ids[begin : begin + limit]] if start else ids[begin : begin + limit + 1]
        rows = log_probs(model, row)
        expected -= sum(float(rows[place, token]) for place, token in enumerate(row[1:]))
    assert len(ids) > limit
    assert tokens == len(ids) - (not start), "the first token is predicted only after a start token"
    assert total == pytest.approx(expected, rel=1e-9)


def test_the_first_token_is_predicted_only_after_a_start_token():
    assert tiny.language_model().text_nll("I")[1] == 1
    with raises(InputError, "text_too_short"):
        tiny.language_model(start=()).text_nll("I")
