"""Theory, fits, curves and claims, and the keys of a language model."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError
from rebind.lab.closed_form import ClosedForm, mlp_keys
from rebind.lab.forgetting import Forgetting
from rebind.lab.hopfield import Hopfield, crossing, mean_field_error
from rebind.lab.report import Claim, Table, curve, learning_rows, markdown, slope, spread
from rebind.lab.theory import delta_errors, interference
from rebind.memory import l2_normalize
from rebind.ops import scan_rule
from tests.support import raises

CPU = torch.device("cpu")


class TestTheory:
    def test_delta_errors_are_those_of_a_simulation(self):
        n, d, streams = 12, 5, 60_000
        noise = torch.randn(2, streams, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        keys, values = l2_normalize(noise[0]), noise[1] / d**0.5
        k, v = keys.unsqueeze(-2), values.unsqueeze(-2)
        memory = scan_rule("delta", k, k, v)[1][:, 0]
        errors = (keys @ memory.mT - values).square().sum(-1).mean(0)
        torch.testing.assert_close(errors, delta_errors(n, d), atol=0.02, rtol=0.02)

    def test_interference(self):
        assert (interference(1, 8), interference(9, 8)) == (0, 1)

    def test_the_classical_network_breaks_down_at_0138(self):
        assert mean_field_error(0.05) < 1e-3
        assert 0.01 < mean_field_error(0.1379) < 0.02  # 1.6 % wrong bits at the edge
        assert mean_field_error(0.139) == 0.5


class TestReport:
    def test_a_slope_is_the_exponent(self):
        assert slope([1, 10, 100], [2, 200, 20_000]) == pytest.approx(2)
        assert slope([1, 2, 4, 8], [5, 5, 5, 5]) == pytest.approx(0)

    def test_a_curve_is_a_mean_with_its_range(self):
        values = curve([{"x": 2, "y": 1.0}, {"x": 1, "y": 5.0}, {"x": 2, "y": 3.0}], "x", "y")
        assert (values.x, values.mean, values.low, values.high) == ([1, 2], [5.0, 2.0], [5.0, 1.0], [5.0, 3.0])
        assert values.at(1.2) == 5.0
        assert spread([1.0, 3.0]) == "2 ± 1.4"

    def test_a_place_is_measured_or_not(self):
        values = curve([{"x": 0.3, "y": 1.0}, {"x": 2.0, "y": 5.0}], "x", "y")
        assert values.has(0.1 + 0.2, 2)
        assert not values.has(0.3, 1.9)
        assert crossing(values, 3.0) == pytest.approx(1.15)
        assert crossing(values, 9.0) != crossing(values, 9.0)  # NaN: it never rises so far

    def test_a_learning_curve_continues_where_a_seed_ended(self):
        rows = [{"steps": 100, "loss": [0.5]}, {"steps": 250, "loss": [0.75, 0.5, 0.25]}, {"steps": 100, "loss": []}]
        values = curve(learning_rows(rows, "loss", 100), "step", "value")
        assert (values.x, values.mean) == ([100, 200, 250], [0.625, 0.5, 0.375])
        assert (values.low, values.high) == ([0.5, 0.5, 0.25], [0.75, 0.5, 0.5])
        assert learning_rows(rows[2:], "loss", 100) == []

    def test_markdown_names_claims_that_do_not_hold(self):
        claims = [Claim("up is up", True, "1"), Claim("up is down", False, "0")]
        text = markdown("T", "nothing", Table(["a|b"], [["1"]]), claims)
        assert "| a\\|b |" in text
        assert "- holds: up is up (1)" in text
        assert "- **does not hold**: up is down (0)" in text


class TestClaims:
    def test_closed_form_claims_nothing_about_loads_it_did_not_measure(self):
        def statements(words):
            experiment = ClosedForm.quick().with_settings(["width=16", "seeds=1", *words])
            rows = [{**point, "error": 0.5} for batch in experiment.batches() for point in batch]
            return "; ".join(f"{claim.statement} ({claim.measured})" for claim in experiment.claims(rows))

        parts = ("at n = d:", "at 2d", "at d/2", "up to n = d,", "1 − d/n")
        assert all(part in statements([]) for part in (*parts, "(n−1)/d"))
        few = statements(["loads=0.375,0.75"])
        assert not [part for part in parts if part in few]
        assert "up to n = 12," in few
        assert "(n−1)/d" in few
        assert "recursive, batch by batch" in statements(["loads=1.5"])

    def test_hopfield_claims_nothing_about_places_it_did_not_measure(self):
        def count(words):
            experiment = Hopfield.quick().with_settings(words)
            return len(list(experiment.claims(hopfield_rows(experiment))))

        assert count([]) == 11
        assert count(["loads=0.13,0.15", "rates=0.25", "betas=0.1,0.3", "overlaps=0.1,0.2"]) == 11 - 7

    def test_the_sixth_network_is_drawn_too(self):
        pytest.importorskip("matplotlib")
        experiment = Hopfield.quick().with_settings(["units=20,30,40,50,60,70", "modern=2,3,4,5,6,7"])
        load, _, modern, _ = experiment.figure(hopfield_rows(experiment)).axes
        for axes, label in ((load, "N = 70"), (modern, "N = 7:")):
            assert any(str(line.get_label()).startswith(label) for line in axes.lines)


def hopfield_rows(experiment):
    names = ("error", "pattern", "mixture", "one", "several", "gap")
    return [{**point, **dict.fromkeys(names, 0.2)} for batch in experiment.batches() for point in batch]


@pytest.mark.parametrize("words", [["pools=0.5", "length=1"], ["pools=5"]])
def test_keys_that_occur_just_twice_are_measured(words):
    experiment = Forgetting.quick().with_settings(["width=8", "streams=2", "seeds=1", *words])
    for batch in experiment.batches():
        assert len(experiment.measure(batch, CPU)) == len(batch)


class TestModelKeys:
    @pytest.fixture
    def keys(self, monkeypatch):
        """Let a model have 12 keys of width 8."""
        keys = torch.randn(12, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        monkeypatch.setattr("rebind.lab.closed_form.mlp_keys", lambda model, layer, device: keys)
        return keys

    def test_every_seed_writes_some_of_them(self, keys):
        experiment = ClosedForm.quick().with_settings(["keys=model", "width=8", "seeds=3"])
        chosen, _ = experiment.associations("model", 5, CPU)
        known = l2_normalize(keys)
        assert chosen.shape == (3, 5, 8)
        assert all((known == key).all(-1).any() for key in chosen.flatten(0, 1))
        assert not torch.equal(chosen[0], chosen[1])

    @pytest.mark.parametrize(("width", "n"), [(9, 5), (8, 13)])
    def test_too_few_or_too_wide_keys_are_an_error(self, keys, width, n):
        experiment = ClosedForm.quick().with_settings(["keys=model", f"width={width}"])
        with raises(InputError, "model_keys_do_not_fit") as caught:
            experiment.associations("model", n, CPU)
        assert "width=8" in caught.value.advice

    @pytest.mark.slow
    def test_keys_of_a_language_model_are_far_from_random(self):
        keys = l2_normalize(mlp_keys("smollm2", 12, CPU))
        assert keys.shape[-1] == 1536
        overlap = (keys @ keys.mT).square()
        assert float((overlap.sum() - len(keys)) / (len(keys) * (len(keys) - 1))) > 5 / 1536
        with raises(InputError, "no_such_layer"):
            mlp_keys("smollm2", 30, CPU)
