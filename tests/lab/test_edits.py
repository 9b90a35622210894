"""What the methods write into one layer, against the mathematics of each; and the random model."""

from __future__ import annotations

import pytest
import torch

from rebind.edit.moments import OldKeys
from rebind.evals import bundled_records
from rebind.lab.edits.experiment import METHODS, Edits, distance_to_curve
from rebind.lab.edits.layer import random_model, sentences_of, write_all

N, D_K, D_V, LAM = 7, 24, 10, 0.3


@pytest.fixture
def layer():
    """Weights, keys, values and old keys."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = noise(200, D_K) @ torch.diag(torch.linspace(0.2, 2, D_K, dtype=torch.float64))
    return noise(D_V, D_K), noise(N, D_K), noise(N, D_V), OldKeys(old.mT @ old / 200)


def after(method, layer, group=3):
    return write_all(method, *layer, LAM, group)


def test_emmet_is_exact(layer):
    _, keys, values, _ = layer
    torch.testing.assert_close(keys @ after("emmet", layer).mT, values)


def test_rome_is_exact_for_the_last_fact(layer):
    _, keys, values, _ = layer
    read = keys @ after("rome", layer).mT
    torch.testing.assert_close(read[-1], values[-1])
    assert float((read[0] - values[0]).norm()) > 0.01


def test_memit_minimizes_its_objective(layer):
    """Any step away from it makes Σ‖W'k − v‖² + λ tr(ΔCΔᵀ) larger, and no other method is lower."""
    weights, keys, values, old_keys = layer

    def objective(new):
        change = new - weights
        return float((keys @ new.mT - values).square().sum() + LAM * ((change @ old_keys.moment) * change).sum())

    best = after("memit", layer)
    for seed in range(5):
        step = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert objective(best + 1e-3 * step) > objective(best)
    assert min(objective(after(method, layer)) for method in METHODS) == pytest.approx(objective(best), rel=1e-9)


@pytest.mark.parametrize("group", [1, 3, N])
def test_recursive_ends_where_memit_does_in_groups_of_any_size(layer, group):
    torch.testing.assert_close(after("recursive", layer, group), after("memit", layer))


def test_batches_that_forget_do_not(layer):
    assert float((after("batches", layer) - after("memit", layer)).norm()) > 0.01
    torch.testing.assert_close(after("batches", layer, group=N), after("memit", layer))


def test_alphaedit_does_not_touch_the_most_used_directions(layer):
    weights, _, _, old_keys = layer
    change = after("alphaedit", layer) - weights
    _, vectors = torch.linalg.eigh(old_keys.moment)
    assert float((change @ vectors[:, -2:]).abs().max()) < 1e-9 < float(change.abs().max())


def test_the_distance_to_the_curve_is_negative_beyond_it():
    curve = [{"seed": 0, "realized": 0.5, "disturbance": 0.1, "price": 2.0}]
    worse = {"seed": 0, "realized": 0.5, "disturbance": 0.2}
    better = {"seed": 0, "realized": 0.6, "disturbance": 0.1}
    assert distance_to_curve(curve, [worse, {**better, "seed": 1}]) == pytest.approx(0.2)
    assert distance_to_curve(curve, [worse, better]) == pytest.approx(-0.1)


def test_points_cover_every_count_and_every_lambda():
    settings = Edits()
    points = [point for batch in settings.batches() for point in batch]
    assert {point["n"] for point in points if point["method"] == "rome"} == set(settings.counts)
    ridge = {point["scale"] for point in points if point["method"] == "memit" and point["n"] == settings.counts[-1]}
    assert ridge == set(settings.scales)


def test_the_random_model_has_a_token_for_every_word():
    records = bundled_records(Edits.quick().counts[-1])
    model, tokenizer, _ = random_model(records)
    for sentence in sentences_of(records):
        assert tokenizer.unk_token_id not in tokenizer(sentence).input_ids
    again, _, _ = random_model(records)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
