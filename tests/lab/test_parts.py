"""What the experiments are made of: theory, fits, and models that train in stacks."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError
from rebind.lab import closed_form
from rebind.lab.experiment import configure
from rebind.lab.real import mlp_keys
from rebind.lab.report import curve, slope, spread
from rebind.lab.retrieval import Model, Stack, Task, Training, _latest, read_weights, train
from rebind.lab.theory import delta_errors, hopfield_error, interference, least_squares
from rebind.memory import get_rule, l2_normalise, rule_names
from rebind.memory.programmer import FastWeightProgrammer
from rebind.ops import scan_rule

CPU = torch.device("cpu")


def test_delta_errors_are_those_of_a_simulation():
    n, d, streams = 12, 5, 60_000
    drawn = torch.randn(2, streams, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys, values = l2_normalise(drawn[0]), drawn[1] / d**0.5
    k, v = keys.unsqueeze(-2), values.unsqueeze(-2)
    memory = scan_rule("delta", k, k, v)[1][:, 0]
    errors = (keys @ memory.mT - values).square().sum(-1).mean(0)
    torch.testing.assert_close(errors, delta_errors(n, d), atol=0.02, rtol=0.02)


def test_the_simple_theories():
    assert interference(1, 8) == 0
    assert interference(9, 8) == 1
    assert least_squares(8, 8) == 0
    assert least_squares(16, 8) == 0.5


def test_the_classical_network_breaks_down_at_0138():
    assert hopfield_error(0.0) == 0
    assert hopfield_error(0.05) < 1e-3
    assert 0.01 < hopfield_error(0.1379) < 0.02  # 1.6 % wrong bits at the edge
    assert hopfield_error(0.139) == 0.5


def test_a_slope_is_found_through_noise():
    assert slope([1, 10, 100], [2, 200, 20_000]) == pytest.approx(2)
    assert slope([1, 2, 4, 8], [5, 5, 5, 5]) == pytest.approx(0)


def test_a_curve_is_a_mean_with_its_range():
    found = curve([{"x": 2, "y": 1.0}, {"x": 1, "y": 5.0}, {"x": 2, "y": 3.0}], "x", "y")
    assert (found.x, found.mean, found.low, found.high) == ([1, 2], [5.0, 2.0], [5.0, 1.0], [5.0, 3.0])
    assert found.at(1.2) == 5.0
    assert spread([1.0, 3.0]) == "2 ± 1.4"


class TestRetrieval:
    @pytest.mark.parametrize("rule", rule_names())
    def test_reading_is_the_scan(self, rule):
        """No state is formed, yet what is read is what the recurrence leaves."""
        generator = torch.Generator().manual_seed(1)
        k, q = (torch.rand(3, n, 5, generator=generator, dtype=torch.float64) for n in (9, 2))
        v = torch.randn(3, 9, 4, generator=generator, dtype=torch.float64)
        found = get_rule(rule)
        gates = {name: torch.rand(3, 9, generator=generator, dtype=torch.float64) for name in found.gates}
        got = found.coefficients(k, **gates)
        read = read_weights(k, q, got.decay, got.erase, got.write) @ v
        given = {name: gate.unsqueeze(-1) for name, gate in gates.items()}
        _, state = scan_rule(rule, k.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), **given)
        torch.testing.assert_close(read, q @ state[:, 0].mT, atol=1e-11, rtol=1e-9)

    def test_squashed_memories_are_the_programmers(self):
        stack = Stack([Model("tanh", 0)], Task(3, 4, True), "linear", Training(key_width=2), CPU)
        generator = torch.Generator().manual_seed(2)
        phi_k, phi_q = torch.rand(1, 2, 4, 2, generator=generator), torch.rand(1, 2, 1, 2, generator=generator)
        values = torch.randint(3, (1, 2, 4), generator=generator)
        memory, hot = torch.zeros(1, 2, 3, 2), torch.nn.functional.one_hot(values, 3).float()
        for t in range(4):
            memory = FastWeightProgrammer().step(memory, hot[:, :, t], phi_k[:, :, t])
        torch.testing.assert_close(stack._squashed(phi_k, phi_q, values), phi_q @ memory.mT)

    def test_the_latest_value_is_wanted(self):
        keys, values = torch.tensor([[0, 1, 0, 2, 1]]), torch.tensor([[5, 6, 7, 8, 9]])
        assert _latest(keys, values, torch.tensor([[0, 1, 2]])).tolist() == [[7, 9, 8]]

    def test_without_replacement_every_key_comes_once(self):
        keys, values = Task(7, 7, replacement=False).draw(50, torch.Generator().manual_seed(0))
        assert (keys.sort(-1).values == torch.arange(7)).all()
        assert (values.sort(-1).values == torch.arange(7)).all()
        assert len({tuple(row) for row in keys.tolist()}) > 40

    def test_a_stack_trains_as_its_models_would_alone(self):
        config = Training(key_width=8, batch=4, steps=12, every=4, tested=3)
        models = [Model(rule, seed) for rule in ("sum", "delta", "tanh") for seed in (0, 1)]
        task = Task(4, 8, replacement=True)
        together = train(models, task, "dpfp-1", config, CPU)
        for model, found in zip(models, together, strict=True):
            (alone,) = train([model], task, "dpfp-1", config, CPU)
            assert found.losses == pytest.approx(alone.losses, rel=1e-4)
            assert found.short == pytest.approx(alone.short, rel=1e-4)
        assert len({round(found.loss, 6) for found in together}) == len(models)

    def test_models_that_are_done_leave(self):
        """A model whose loss no longer falls ends; the others train as if it had never been there."""
        config = Training(key_width=8, batch=8, steps=120, every=10, patience=2, rate=0.02)
        models = [Model("sum", 0), Model("delta", 0), Model("sum", 1)]
        found = train(models, Task(6, 12, replacement=True), "dpfp-1", config, CPU)
        assert len({one.steps for one in found}) > 1
        for model, one in zip(models, found, strict=True):
            (alone,) = train([model], Task(6, 12, replacement=True), "dpfp-1", config, CPU)
            assert (one.steps, one.loss) == (alone.steps, pytest.approx(alone.loss, rel=1e-2))

    @pytest.mark.parametrize("feature", ["favor-64", "linear", "softmax"])
    def test_every_feature_learns_under_delta(self, feature):
        """FAVOR+ with the delta rule has been seen to end in NaN; drawn once and scaled, it does not."""
        config = Training(key_width=8, batch=8, steps=60, every=20, rate=1e-2)
        (found,) = train([Model("delta", 0)], Task(5, 10, replacement=True), feature, config, CPU)
        assert found.losses[-1] < found.losses[0] < 0.5

    def test_an_unknown_feature_is_named(self):
        with pytest.raises(InputError, match="feature 'dpfp-9' is unknown, expected one of linear, dpfp-1"):
            Stack([Model("sum", 0)], Task(3, 3, False), "dpfp-9", Training(), CPU)


class TestRealKeys:
    @pytest.fixture
    def given(self, monkeypatch):
        """A model whose keys are these 12 of width 8."""
        keys = torch.randn(12, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        monkeypatch.setattr(closed_form, "mlp_keys", lambda model, layer, device: keys)
        closed_form._model_keys.cache_clear()
        yield keys
        closed_form._model_keys.cache_clear()

    def test_every_seed_writes_some_of_them(self, given):
        config = configure(closed_form.QUICK, ["keys=model", "width=8", "seeds=3"])
        keys, _ = closed_form._associations("model", config, 5, CPU)
        known = l2_normalise(given)
        assert keys.shape == (3, 5, 8)
        assert all((known == key).all(-1).any() for key in keys.flatten(0, 1))
        assert not torch.equal(keys[0], keys[1])

    @pytest.mark.parametrize(("width", "n"), [(9, 5), (8, 13)])
    def test_what_does_not_fit_is_said(self, given, width, n):
        config = configure(closed_form.QUICK, ["keys=model", f"width={width}"])
        with pytest.raises(InputError, match=r"has 12 keys of width 8, .*set width=8 and loads up to 1.50"):
            closed_form._associations("model", config, n, CPU)

    @pytest.mark.slow
    def test_a_language_models_keys_are_far_from_random(self):
        keys = l2_normalise(mlp_keys("smollm2", 12, CPU))
        assert keys.shape[-1] == 1536
        overlap = (keys @ keys.mT).square()
        assert float((overlap.sum() - len(keys)) / (len(keys) * (len(keys) - 1))) > 5 / 1536
