"""The task of multi-query recall, and the stack of models against one model of `rebind.nn` layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from rebind.errors import InputError
from rebind.lab.mqar import EXPERIMENT, QUICK, best, hardest
from rebind.lab.recall import (
    NORMALISERS,
    SOFTMAX,
    Model,
    Questions,
    Recaller,
    Stack,
    Task,
    parameters,
    state,
)
from rebind.lab.recall_training import _at, _Trainer, evaluate, train
from rebind.lab.recorded import Recorded
from rebind.nn.layers.attention import Attention
from tests.lab.graphs import played

SMALL = replace(QUICK, vocabulary=40, layers=2, heads=2)
MODELS = [Model(1e-2, 0), Model(1e-2, 1), Model(3e-3, 1)]


def drawn(task: Task, count: int, seed: int) -> Questions:
    return task.draw(count, torch.Generator().manual_seed(seed))


def for_models(task: Task, models: int) -> Questions:
    each = [drawn(task, 3, seed) for seed in range(models)]
    return Questions(*(torch.stack([getattr(one, name) for one in each]) for name in ("tokens", "places", "answers")))


def one_model(rule: str, width: int, seed: int) -> Recaller:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recaller(rule, width, SMALL)


class TestTask:
    @pytest.mark.parametrize(("length", "pairs"), [(16, 4), (64, 4), (65, 16)])
    def test_every_key_comes_again_with_its_value(self, length, pairs):
        asked = drawn(Task(length, pairs, 200), 50, 0)
        keys, values = asked.tokens[:, : 2 * pairs : 2], asked.tokens[:, 1 : 2 * pairs : 2]
        assert torch.equal(asked.tokens.gather(1, asked.places), keys)
        assert torch.equal(asked.answers, values)

    def test_keys_are_low_and_values_high_and_none_comes_twice(self):
        asked = drawn(Task(64, 16, 40), 50, 0)
        keys, values = asked.tokens[:, :32:2], asked.tokens[:, 1:32:2]
        assert int(keys.min()) >= 1
        assert int(keys.max()) < 20 <= int(values.min())
        for rows in (keys, values, asked.places):
            assert all(len(row.unique()) == 16 for row in rows)

    def test_the_rest_is_filler(self):
        asked = drawn(Task(64, 4, 40), 10, 0)
        after = asked.tokens[:, 8:]
        assert (after != 0).sum(1).tolist() == [4] * 10
        assert bool((asked.places % 2 == 0).all())
        assert int(asked.places.min()) >= 8

    def test_distances_follow_the_power_law(self):
        """One key: p(g) ∝ g^−0.99, as Zoology draws them."""
        places = drawn(Task(64, 1, 40), 20_000, 0).places.flatten()
        found = torch.bincount((places - 2) // 2, minlength=31) / 20_000
        law = torch.arange(1, 32, dtype=torch.float64) ** (0.01 - 1)
        assert torch.allclose(found.double(), law / law.sum(), atol=0.012)

    @pytest.mark.parametrize(
        ("size", "says"),
        [("64", "length x pairs"), ("ax4", "length x pairs"), ("16x5", "4 tokens"), ("400x30", "raise")],
    )
    def test_refuses(self, size, says):
        with pytest.raises(InputError, match=says):
            Task.parse(size, 40)


class TestStack:
    @pytest.mark.parametrize("rule", [rule for rule in NORMALISERS if rule != SOFTMAX])
    def test_is_many_models_of_layers(self, rule):
        task = Task(32, 6, SMALL.vocabulary)
        asked = for_models(task, len(MODELS))
        found = Stack(MODELS, rule, 16, SMALL).logits(asked)
        for row, model in enumerate(MODELS):
            every = one_model(rule, 16, model.seed)(asked.tokens[row])
            wanted = every.gather(1, asked.places[row].unsqueeze(-1).expand(-1, -1, SMALL.vocabulary))
            torch.testing.assert_close(found[row], wanted, atol=2e-6, rtol=1e-4)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    @pytest.mark.parametrize("rule", list(NORMALISERS))
    def test_a_gpu_finds_the_same(self, rule):
        asked = for_models(Task(32, 6, SMALL.vocabulary), len(MODELS))
        there = Questions(*(getattr(asked, name).cuda() for name in ("tokens", "places", "answers")))
        found = []
        for device, given in ((torch.device("cpu"), asked), (torch.device("cuda"), there)):
            stack = Stack(MODELS, rule, 16, SMALL, device)
            logits = stack.logits(given)
            (slope,) = torch.autograd.grad(logits.square().mean(), stack.theta)
            found.append((logits.detach().cpu(), slope.cpu()))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)

    def test_softmax_is_attention_between_the_same_projections(self):
        """One layer, spelt out."""
        config = replace(SMALL, layers=1, heads=1)
        asked = for_models(Task(16, 4, config.vocabulary), 1)
        stack = Stack(MODELS[:1], SOFTMAX, 8, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            one = Recaller(SOFTMAX, 8, config)
        mix = one.mixers[0]
        x = one.embed(asked.tokens[0])
        normed = one.norms[0](x)
        projected = torch.cat([part(normed) for part in (mix.q_proj, mix.k_proj, mix.v_proj)], dim=-1)
        (q, k, v), _ = mix.conv(projected, mix.conv.initial(len(x)), parts=[8, 8, 8])
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
        x = x + mix.o_proj(mix.norm(scores.softmax(-1) @ v))
        every = one.norm(x) @ one.embed.weight.mT
        wanted = every.gather(1, asked.places[0].unsqueeze(-1).expand(-1, -1, config.vocabulary))
        torch.testing.assert_close(stack.logits(asked)[0], wanted, atol=2e-6, rtol=1e-4)

    def test_models_do_not_see_each_other(self):
        """A model alone ends where it ends in company; one that diverges harms nobody."""
        config = replace(SMALL, layers=1, heads=1, steps=6, every=6, sequences=8, tested=("16x4",))
        together = train([Model(1e-2, 0), Model(3.0, 1)], "delta", 8, config, torch.device("cpu"))
        alone = train([Model(1e-2, 0)], "delta", 8, config, torch.device("cpu"))
        assert together[0].accuracies == pytest.approx(alone[0].accuracies, abs=0.04)

    @pytest.mark.parametrize("rule", ["delta", SOFTMAX])
    def test_rounds_of_replays_are_rounds_of_steps(self, rule, monkeypatch):
        """The way of a GPU, played on a CPU: of each size two plain steps, one recorded without effect, replays."""
        tasks = [Task.parse(size, SMALL.vocabulary) for size in ("16x4", "32x8")]
        seen = Counter()

        def touched():
            adam = trainer.adam
            return [trainer.stack.theta, adam.first, adam.second, adam.at, *(at for _, at in trainer.lessons.values())]

        class FakePlace:
            def memory(self):
                return None

        graph = played(touched, lambda: trainer.recorded.values(), seen)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
        trainer, plain = (_Trainer(Stack(MODELS, rule, 8, SMALL), FakePlace()) for _ in range(2))
        for turn in range(2):
            for one in (trainer, plain):
                with monkeypatch.context() as patched:
                    if one is plain:
                        patched.setattr(Recorded, "run", lambda recorded: recorded.step())
                    one.take([tasks[at] for at in (0, 1, 0, 0, 1, 1, 0, 1, 0)])
                if not turn:
                    one.keep([0, 2])
            assert torch.equal(trainer.stack.theta, plain.stack.theta)
            assert torch.equal(trainer.adam.at, torch.tensor([9 * (turn + 1)]))
        assert seen == {"recorded": 4, "replayed": 2 * 9 - 4 * 2}

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    @pytest.mark.parametrize("rule", list(NORMALISERS))
    def test_a_recorded_step_is_a_step(self, rule, monkeypatch):
        """On a GPU, with a model that leaves in between."""
        device = torch.device("cuda")
        tasks = [Task.parse(size, SMALL.vocabulary) for size in ("16x4", "32x8")]
        steps, found = [tasks[at] for at in (0, 1, 0, 0, 1, 1, 0, 1, 0)], []
        for recorded in (True, False):
            with monkeypatch.context() as patched, _at(device) as place:
                if not recorded:
                    patched.setattr(Recorded, "run", lambda one: one.step())
                trainer = _Trainer(Stack(MODELS, rule, 16, SMALL, device), place)
                trainer.take(steps)
                torch.cuda.synchronize()
                trainer.keep([0, 2])
                trainer.take(steps)
                found.append(trainer.stack.theta.detach().cpu())
                trainer.keep([])
        torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)

    def test_those_that_leave_leave_the_others_as_they_were(self):
        stack = Stack(MODELS, "delta", 8, SMALL)
        asked = for_models(Task(16, 4, SMALL.vocabulary), 3)
        before = stack.logits(asked)
        stack.keep([0, 2])
        kept = Questions(*(getattr(asked, name)[[0, 2]] for name in ("tokens", "places", "answers")))
        assert torch.equal(stack.logits(kept), before[[0, 2]])

    def test_an_untrained_model_guesses(self):
        stack = Stack(MODELS, "sum", 16, replace(SMALL, sequences=200))
        found = torch.tensor(evaluate(stack, [Task(16, 4, 40)]))
        assert float(found.max()) < 0.2


def test_state_is_what_the_layer_says():
    assert state("delta", 16, SMALL) == 2 * 8 * 8
    assert state(SOFTMAX, 16, SMALL) == 32 * Attention(16, 2).state_size == 32 * 2 * 16


def test_rules_have_the_same_parameters_but_for_gates():
    counts = {rule: parameters(rule, 64, SMALL) for rule in NORMALISERS}
    assert counts["sum"] == counts[SOFTMAX] == min(counts.values())
    assert max(counts.values()) < 1.02 * counts["sum"]


def test_the_best_rate_of_each_seed_counts():
    at = hardest(QUICK)
    assert QUICK.tested[at] == "32x8"
    rows = [
        {"rule": "sum", "width": 8, "rate": rate, "seed": seed, "accuracies": [0.9, 0.9, got]}
        for rate, seed, got in [(0.1, 0, 0.3), (0.2, 0, 0.5), (0.1, 1, 0.7), (0.2, 1, 0.6)]
    ]
    assert [(row["rate"], row["accuracy"]) for row in best(QUICK, rows)] == [(0.2, 0.5), (0.1, 0.7)]


def test_the_full_size_is_zoologys():
    full = EXPERIMENT.config
    assert (full.vocabulary, full.layers) == (8192, 2)
    assert full.tested[-1] == "1024x256"
    assert set(full.rules) == set(NORMALISERS)
