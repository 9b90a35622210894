"""What the methods write into one layer, against the mathematics of each; and the random model it is tried on."""

from __future__ import annotations

import pytest
import torch

from rebind.edit.methods import Old
from rebind.errors import InputError
from rebind.evals.records import bundled
from rebind.lab.edits import EXPERIMENT, METHODS, QUICK, _slack, batches, written
from rebind.lab.toy import toy

N, KEYS, VALUES, LAM = 7, 24, 10, 0.3


@pytest.fixture
def layer():
    """Weights, keys, values and the moment of old keys."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = noise(200, KEYS) @ torch.diag(torch.linspace(0.2, 2, KEYS, dtype=torch.float64))
    return noise(VALUES, KEYS), noise(N, KEYS), noise(N, VALUES), Old(old.mT @ old / 200)


def after(method, layer, lam=LAM, group=3):
    weights, keys, values, old = layer
    return written(method, weights, keys, values, old, lam, group)


def test_emmet_is_exact(layer):
    _, keys, values, _ = layer
    torch.testing.assert_close(keys @ after("emmet", layer).mT, values)


def test_rome_is_exact_about_the_last(layer):
    _, keys, values, _ = layer
    found = keys @ after("rome", layer).mT
    torch.testing.assert_close(found[-1], values[-1])
    assert float((found[0] - values[0]).norm()) > 0.01


def test_memit_minimises_what_it_says(layer):
    """Any step away from it makes Σ‖W'k − v‖² + λ tr(ΔCΔᵀ) larger."""
    weights, keys, values, old = layer

    def objective(new):
        change = new - weights
        return float((keys @ new.mT - values).square().sum() + LAM * ((change @ old.moment) * change).sum())

    found = after("memit", layer)
    for seed in range(5):
        step = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert objective(found + 1e-3 * step) > objective(found)
    assert min(objective(after(method, layer)) for method in METHODS) == pytest.approx(objective(found), rel=1e-9)


@pytest.mark.parametrize("group", [1, 3, N])
def test_recursive_ends_where_memit_does_however_the_facts_come(layer, group):
    torch.testing.assert_close(after("recursive", layer, group=group), after("memit", layer))


def test_batches_that_forget_do_not(layer):
    assert float((after("batches", layer) - after("memit", layer)).norm()) > 0.01
    torch.testing.assert_close(after("batches", layer, group=N), after("memit", layer))


def test_alphaedit_leaves_the_most_used_directions(layer):
    weights, _, _, old = layer
    change = after("alphaedit", layer) - weights
    _, vectors = torch.linalg.eigh(old.moment)
    assert float((change @ vectors[:, -2:]).abs().max()) < 1e-9 < float(change.abs().max())


def test_an_unknown_method_is_named(layer):
    with pytest.raises(InputError, match="method"):
        after("mend", layer)


def test_slack_is_negative_below_the_curve():
    curve = [{"seed": 0, "realised": 0.5, "disturbance": 0.1, "price": 2.0}]
    worse = {"seed": 0, "realised": 0.5, "disturbance": 0.2}
    better = {"seed": 0, "realised": 0.6, "disturbance": 0.1}
    elsewhere = {**better, "seed": 1}
    assert _slack(curve, [worse, elsewhere]) == pytest.approx(0.2)
    assert _slack(curve, [worse, better]) == pytest.approx(-0.1)


def test_points_cover_every_count_and_every_lambda():
    points = [point for batch in batches(EXPERIMENT.config) for point in batch]
    most = EXPERIMENT.config.counts[-1]
    assert {point["n"] for point in points if point["method"] == "rome"} == set(EXPERIMENT.config.counts)
    ridge = {point["scale"] for point in points if point["method"] == "memit" and point["n"] == most}
    assert ridge == set(EXPERIMENT.config.scales)


def test_the_toy_has_a_token_for_every_word():
    records = bundled(QUICK.counts[-1])
    made = toy(records)
    for record in records:
        assert made.tokenizer.unk_token_id not in made.tokenizer(f"{record.fact.text} {record.fact.target}").input_ids
    again = toy(records)
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), again.model.parameters(), strict=True))
