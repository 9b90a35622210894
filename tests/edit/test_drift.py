"""Drift: nothing where nothing changed, and the right numbers where something did."""

from __future__ import annotations

import math

import pytest
import torch

from rebind.edit.drift import CANARY_PROMPTS, divergence, measure_drift, relative_growth
from tests import tiny
from tests.edit.editors import open_editor
from tests.support import Draw


def test_divergence_of_distributions_made_by_hand():
    base = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]]).log()
    edited = torch.tensor([[0.25, 0.5, 0.25], [0.9, 0.1, 0.0]]).log()
    assert divergence(base, edited).tolist() == pytest.approx([0.5 * math.log(2), 0.0], abs=1e-7)
    assert float(divergence(edited, base)[0]) == math.inf, "the direction matters"


def test_growth_of_matrices_made_by_hand():
    base = {"a": torch.eye(2), "b": torch.full((1, 4), 2.0)}
    edited = {"a": torch.eye(2), "b": torch.tensor([[2.0, 2.0, 2.0, 5.0]])}
    assert relative_growth(base, edited) == pytest.approx({"a": 0.0, "b": 3 / 4})


def test_the_worst_prompt_and_site_are_named():
    prompts = ("x", "y", "z")
    base = torch.log_softmax(Draw(1, torch.float32).normal(3, 5), -1)
    edited = base.clone()
    edited[1] = torch.log_softmax(base[1].roll(1), -1)
    drift = measure_drift(base, edited, {"a": 0.1, "b": 0.3}, prompts)
    assert (drift.prompt, drift.site, drift.growth) == ("y", "b", 0.3)
    assert drift.largest == pytest.approx(3 * drift.kl)
    edited[2] = torch.nan
    assert measure_drift(base, edited, {}, prompts).prompt == "z", "NaN is worse than any number"
    still = measure_drift(base, base, {}, prompts)
    assert (still.kl, still.largest, still.growth, still.site) == (0.0, 0.0, 0.0, "")


def test_canary_prompts_are_distinct_and_cut_to_a_short_context():
    assert len(set(CANARY_PROMPTS)) == len(CANARY_PROMPTS) >= 24
    assert open_editor(tiny.llama(max_position_embeddings=8)).drift().kl == 0.0
