"""Continuations side by side are continuations alone; samples follow their seed and the model."""

from __future__ import annotations

import pytest
import torch

from rebind.models.prompts import Prompt
from tests import tiny

TEXTS = ["The capital of France is", "I", "In the north of Norway the sun does not", "I"]


def greedy(model, text: str, tokens: int) -> str:
    """Return the first choices of plain passes, up to an end token."""
    ids = list(model.encode([Prompt(text)])[0].ids)
    new: list[int] = []
    while len(new) < tokens:
        token = int(model.model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax())
        if token in model.end_tokens:
            break
        new.append(token)
    return model.tokenizer.decode(new)


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_continuations_side_by_side_are_greedy_ones(build):
    model = tiny.language_model(build)
    assert model.generate(TEXTS, 6) == [greedy(model, text, 6) for text in TEXTS]
    assert model.generate([], 6) == []


def test_continuations_end_at_an_end_token_and_draws_are_seeded():
    model, texts = tiny.language_model(), TEXTS[:2]
    drawn = model.generate(texts, 8, top_k=5, seed=1)
    assert drawn == model.generate(texts, 8, top_k=5, seed=1)
    assert drawn != model.generate(texts, 8, top_k=5, seed=2)
    assert model.generate(texts, 8, top_k=1, seed=3) == model.generate(texts, 8)
    (first,) = model.next_token_log_probs(TEXTS[:1]).argmax(-1).tolist()
    assert model.end_tokens == {0}
    model.model.generation_config.eos_token_id = [first, 0]
    assert model.generate(TEXTS[:1], 6) == [""]


def test_a_long_prompt_does_not_cut_short_what_follows_the_others():
    model = tiny.language_model(tiny.gpt2, n_positions=24)  # learned positions: there is no twenty-fifth
    long = "The capital of France is Paris, and the capital of Italy is"
    texts = ["I", long, "The capital of France is"]
    assert 24 - 8 < len(model.encode([Prompt(long)])[0].ids) < 24, "it has room, but not for all"
    for options in ({}, {"top_k": 1}, {"top_k": 5, "seed": 3}):
        together = model.generate(texts, 8, **options)
        assert together == [model.generate([text], 8, **options)[0] for text in texts]
    assert model.generate(["I"], 500) == model.generate(["I"], 24 - len(model.encode([Prompt("I")])[0].ids))


# Free samples


def test_samples_follow_their_seed_and_the_best_token_is_greedy():
    model, first = tiny.language_model(), torch.tensor([[5], [6]])
    one, same, other = (model.sample(first, 9, seed=seed) for seed in (1, 1, 2))
    assert one.shape == (2, 9)
    assert torch.equal(one[:, :1], first)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)

    ids = model.sample(torch.tensor([[5]]), 6, seed=3, top_k=1)[0].tolist()
    for length in range(1, 6):
        logits = model.model(input_ids=torch.tensor([[*model.start, *ids[:length]]])).logits[0, -1]
        assert ids[length] == int(logits.argmax())


def test_samples_have_the_frequencies_of_the_model():
    """Two thousand draws of one token against its probabilities: χ² within what chance allows."""
    model = tiny.language_model()
    draws = model.sample(torch.full((2000, 1), 5), 2, seed=0)[:, 1]
    expected = 2000 * torch.softmax(model.model(input_ids=torch.tensor([[*model.start, 5]])).logits[0, -1], -1)
    counts = torch.bincount(draws, minlength=len(expected)).double()
    frequent = expected > 5
    chi2 = float(((counts - expected)[frequent] ** 2 / expected[frequent]).sum())
    freedom = int(frequent.sum())
    assert freedom > 20
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5
