"""Drift: nothing where nothing changed, and the very numbers where something did."""

from __future__ import annotations

import math

import pytest
import torch

from rebind.edit.drift import CANARIES, divergence, growths, measure, next_tokens
from tests import tiny
from tests.support import Draw


def test_divergence_on_distributions_made_by_hand():
    base = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]]).log()
    edited = torch.tensor([[0.25, 0.5, 0.25], [0.9, 0.1, 0.0]]).log()
    kl = divergence(base, edited)
    assert kl.tolist() == pytest.approx([0.5 * math.log(2), 0.0], abs=1e-7)
    assert float(divergence(edited, base)[0]) == math.inf, "the edited model may not be the one that is asked"


def test_growth_on_matrices_made_by_hand():
    base = {"a": torch.eye(2), "b": torch.full((1, 4), 2.0)}
    now = {"a": torch.eye(2), "b": torch.tensor([[2.0, 2.0, 2.0, 5.0]])}
    assert growths(base, now) == pytest.approx({"a": 0.0, "b": 3 / 4})


def test_the_worst_prompt_and_site_are_named():
    base = torch.log_softmax(Draw(1, torch.float32).normal(3, 5), -1)
    edited = base.clone()
    edited[1] = torch.log_softmax(base[1].roll(1), -1)
    found = measure(base, edited, {"a": 0.1, "b": 0.3}, prompts=("x", "y", "z"))
    assert (found.prompt, found.site, found.growth) == ("y", "b", 0.3)
    assert found.largest == pytest.approx(3 * found.kl)
    edited[2] = torch.nan
    assert measure(base, edited, {}, prompts=("x", "y", "z")).prompt == "z", "NaN is the worst of all"
    still = measure(base, base, {}, prompts=("x", "y", "z"))
    assert (still.kl, still.largest, still.growth, still.site) == (0.0, 0.0, 0.0, "")


def test_the_next_token_is_that_of_a_plain_run():
    model = tiny.llama()
    prompts = ["The capital of France is", "I", *CANARIES[20:22]]
    got = next_tokens(tiny.trunk(model), tiny.tokenizer(), (0,), prompts)
    for prompt, said in zip(prompts, got, strict=True):
        ids = torch.tensor([[0, *tiny.tokenizer()(prompt).input_ids]])
        torch.testing.assert_close(
            said, torch.log_softmax(model(input_ids=ids).logits[0, -1], -1), rtol=1e-4, atol=1e-5
        )


def test_canaries_are_many_different_and_short():
    assert len(CANARIES) >= 24
    assert len(set(CANARIES)) == len(CANARIES)
    assert all(prompt == prompt.strip() and len(prompt) < 100 for prompt in CANARIES)


def test_a_prompt_past_the_context_is_cut():
    model = tiny.llama(max_position_embeddings=4)
    assert torch.isfinite(next_tokens(tiny.trunk(model), tiny.tokenizer(), (0,), CANARIES)).all()
