"""The task of multi-query recall, and the stack of models against one model of `rebind.nn` layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rebind.errors import InputError
from rebind.lab.mqar.experiment import Mqar
from rebind.lab.mqar.models import RecallerStack
from rebind.lab.mqar.task import NORMALIZERS, SOFTMAX, RecallTask
from rebind.lab.mqar.training import RecallTraining, new_recaller, state_size, train
from rebind.lab.stacks import train_all
from rebind.memory import get_rule
from rebind.nn.layers.attention import Attention
from tests.support import raises

CPU = torch.device("cpu")
SMALL = replace(Mqar.quick(), vocabulary=40, layers=2, heads=2)
SEEDS = (0, 1, 1)


def draw(task, count, seed):
    return task.draw(count, torch.Generator().manual_seed(seed))


def stacked(settings, rule, width):
    """Return three models in float64, their parameters as a stack, and a lesson for each."""
    models = [new_recaller(settings, rule, width, seed).double() for seed in SEEDS]
    parameters = {
        name: torch.stack([dict(m.named_parameters())[name] for m in models]) for name in models[0].state_dict()
    }
    lessons = [draw(RecallTask(32, 6, settings.vocabulary), 3, seed) for seed in range(len(SEEDS))]
    return models, parameters, tuple(torch.stack(parts) for parts in zip(*lessons, strict=True))


def all_logits(model, tokens):
    """Return the logits [B, T, vocabulary] of one model, layer by layer."""
    x = model.embed(tokens)
    for norm, mix in zip(model.norms, model.mixers, strict=True):
        x = x + mix(norm(x))[0]
    return model.norm(x) @ model.embed.weight.mT


def at_places(logits, places):
    return logits.gather(1, places.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))


class TestTask:
    @pytest.mark.parametrize(("length", "pairs"), [(16, 4), (64, 4), (65, 16)])
    def test_every_key_occurs_again_with_its_value(self, length, pairs):
        tokens, places, answers = draw(RecallTask(length, pairs, 200), 50, 0)
        assert torch.equal(tokens.gather(1, places), tokens[:, : 2 * pairs : 2])
        assert torch.equal(answers, tokens[:, 1 : 2 * pairs : 2])

    def test_keys_are_low_and_values_high_and_all_are_distinct(self):
        tokens, places, _ = draw(RecallTask(64, 16, 40), 50, 0)
        keys, values = tokens[:, :32:2], tokens[:, 1:32:2]
        assert int(keys.min()) >= 1
        assert int(keys.max()) < 20 <= int(values.min())
        for rows in (keys, values, places):
            assert all(len(row.unique()) == 16 for row in rows)

    def test_zeros_fill_the_rest(self):
        tokens, places, _ = draw(RecallTask(64, 4, 40), 10, 0)
        assert (tokens[:, 8:] != 0).sum(1).tolist() == [4] * 10
        assert bool((places % 2 == 0).all())
        assert int(places.min()) >= 8

    def test_distances_follow_the_power_law(self):
        """One key: p(g) ∝ g^−0.99, as Zoology draws them."""
        _, places, _ = draw(RecallTask(64, 1, 40), 20_000, 0)
        shares = torch.bincount((places.flatten() - 2) // 2, minlength=31) / 20_000
        law = torch.arange(1, 32, dtype=torch.float64) ** (0.01 - 1)
        assert torch.allclose(shares.double(), law / law.sum(), atol=0.012)

    @pytest.mark.parametrize(
        ("size", "code"),
        [
            ("64", "invalid_task_size"),
            ("ax4", "invalid_task_size"),
            ("16x5", "invalid_task_size"),
            ("400x30", "vocabulary_too_small"),
        ],
    )
    def test_refuses(self, size, code):
        with raises(InputError, code):
            RecallTask.parse(size, 40)


class TestStack:
    @pytest.mark.parametrize("rule", [rule for rule in NORMALIZERS if rule != SOFTMAX])
    def test_it_is_many_models_of_layers(self, rule):
        models, parameters, (tokens, places, answers) = stacked(SMALL, rule, 16)
        logits = RecallerStack(SMALL, rule).logits(parameters, tokens, places)
        for row, model in enumerate(models):
            expected = at_places(all_logits(model, tokens[row]), places[row])
            torch.testing.assert_close(logits[row], expected, atol=1e-12, rtol=1e-10)
        losses = RecallerStack(SMALL, rule).loss(parameters, (tokens, places, answers))
        expected = torch.nn.functional.cross_entropy(logits[1].flatten(0, 1), answers[1].flatten())
        torch.testing.assert_close(losses[1], expected)

    def test_softmax_is_attention_between_the_same_projections(self):
        """One layer, step by step."""
        settings = replace(SMALL, layers=1, heads=1)
        (model, *_), parameters, (tokens, places, _) = stacked(settings, SOFTMAX, 8)
        mix, x = model.mixers[0], model.embed(tokens[0])
        normed = model.norms[0](x)
        projected = torch.cat([part(normed) for part in (mix.q_proj, mix.k_proj, mix.v_proj)], dim=-1)
        (q, k, v), _ = mix.conv(projected, mix.conv.initial_window(len(x)), parts=[8, 8, 8])
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(32, 32).triu(1).bool(), float("-inf"))
        x = x + mix.o_proj(mix.norm(scores.softmax(-1) @ v))
        every = model.norm(x) @ model.embed.weight.mT
        expected = at_places(every, places[0])
        logits = RecallerStack(settings, SOFTMAX).logits(parameters, tokens, places)
        torch.testing.assert_close(logits[0], expected, atol=1e-12, rtol=1e-10)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    @pytest.mark.parametrize("rule", list(NORMALIZERS))
    def test_a_gpu_computes_the_same(self, rule):
        _, parameters, lesson = stacked(SMALL, rule, 16)
        results = []
        for device in ("cpu", "cuda"):
            there = {name: tensor.detach().to(device).requires_grad_() for name, tensor in parameters.items()}
            losses = RecallerStack(SMALL, rule).loss(there, tuple(part.to(device) for part in lesson))
            results.append([losses, *torch.autograd.grad(losses.sum(), list(there.values()))])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other.cpu(), atol=1e-4, rtol=1e-3)


class TestTraining:
    def points(self, *rates):
        return [{"rule": "delta", "width": 8, "rate": rate, "seed": seed} for seed, rate in enumerate(rates)]

    def test_models_do_not_affect_each_other(self):
        """A model alone ends where it ends in company; one that diverges harms no other."""
        settings = replace(SMALL, layers=1, heads=1, steps=6, every=6, sequences=8, tested=("16x4",))
        together, alone = (train(settings, self.points(*rates), CPU) for rates in ((1e-2, 3.0), (1e-2,)))
        assert together[0]["accuracies"] == pytest.approx(alone[0]["accuracies"], abs=0.04)

    def test_a_course_has_the_hardest_size_up_to_the_trained_length(self):
        sizes = ("64x16", "16x4", "32x8")  # the first is longer than what is trained
        settings = replace(SMALL, layers=1, heads=1, steps=4, every=2, sequences=8, tested=sizes)
        training = RecallTraining(settings, dict(enumerate(self.points(1e-2))), CPU)
        scores = training.evaluate(longer=True)
        assert scores.shape == (1, 3)
        assert torch.equal(training.evaluate(), scores[:, 1:])
        (row,) = train_all([training])
        assert (row["steps"], len(row["course"]), len(row["accuracies"])) == (4, 2, 3)
        assert row["course"][-1] == row["accuracies"][settings.hardest()]

    def test_an_untrained_model_guesses(self):
        training = RecallTraining(replace(SMALL, sequences=200), dict(enumerate(self.points(1e-2))), CPU)
        assert float(training.evaluate().max()) < 0.2


def test_state_size_is_that_of_the_layer():
    assert state_size(SMALL, "delta", 16) == 2 * 8 * 8
    assert state_size(SMALL, SOFTMAX, 16) == 32 * Attention(16, 2).state_size == 32 * 2 * 16


def test_rules_have_the_same_parameters_except_for_gates():
    counts = {rule: sum(p.numel() for p in new_recaller(SMALL, rule, 64).parameters()) for rule in NORMALIZERS}
    assert counts["sum"] == counts[SOFTMAX] == min(counts.values())
    one_number = {rule for rule in counts if rule == SOFTMAX or not get_rule(rule).channels}
    assert one_number == {"sum", "mamba2", "longhorn", "delta", "gated_delta", SOFTMAX}
    assert max(counts[rule] for rule in one_number) < 1.02 * counts["sum"]
    for rule in counts.keys() - one_number:  # a matrix of the width of the model for each gate with channels
        matrices = SMALL.layers * len(get_rule(rule).channels) * 64**2
        assert matrices < counts[rule] - counts["sum"] < 1.1 * matrices


def test_the_best_rate_of_each_seed_counts():
    assert Mqar.quick().tested[Mqar.quick().hardest()] == "32x8"
    rows = [
        {"rule": "sum", "width": 8, "rate": rate, "seed": seed, "accuracies": [0.9, 0.9, accuracy]}
        for rate, seed, accuracy in [(0.1, 0, 0.3), (0.2, 0, 0.5), (0.1, 1, 0.7), (0.2, 1, 0.6)]
    ]
    assert [(row["rate"], row["accuracy"]) for row in Mqar.quick().best(rows)] == [(0.2, 0.5), (0.1, 0.7)]
