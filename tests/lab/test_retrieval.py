"""Models of the synthetic retrieval: what they read, its gradients, and how stacks of them train."""

from __future__ import annotations

import math

import pytest
import torch

from rebind.errors import NumericalWarning
from rebind.lab.retrieval.capacity import PUBLISHED, Capacity, largest_solved
from rebind.lab.retrieval.models import FEATURES, Reader, corrected, faded, one_hot, similarity, tanh_memory
from rebind.lab.retrieval.overwrite import RULES, Overwrite
from rebind.lab.retrieval.task import Sequences, Task, latest
from rebind.lab.retrieval.training import RetrievalTraining, group_sizes
from rebind.lab.stacks import stack_padded, train_all
from rebind.memory import get_feature, get_rule
from rebind.memory.programmer import FastWeightProgrammer
from rebind.ops import scan_rule
from tests.support import assert_close

CPU = torch.device("cpu")
DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]  # where Triton's kernels run, or are interpreted
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def assert_same_with_gradients(result, expected, inputs):
    torch.testing.assert_close(result, expected)
    weights = torch.rand(expected.shape, generator=torch.Generator().manual_seed(9), dtype=expected.dtype)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs, retain_graph=True) for x in (result, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


class TestReading:
    @pytest.mark.parametrize("queries", [1, 2])
    @pytest.mark.parametrize("rule", ["sum", "rfa", "mamba2", "delta", "longhorn", "gated_delta"])
    def test_it_is_the_scan(self, rule, queries):
        """No memory is formed, yet what is read is what the recurrence leaves, gradients included."""
        k, q, v = uniform(3, 9, 5), uniform(3, queries, 5, seed=1), uniform(3, 9, 4, seed=2)
        gates = {name: uniform(3, 9, seed=3) for name in get_rule(rule).gates}
        factors = get_rule(rule).coefficients(k, **gates)
        read = faded(corrected(k, q, factors.erase), factors.decay, factors.write) @ v
        per_head = {name: gate.unsqueeze(-1) for name, gate in gates.items()}
        _, memory = scan_rule(rule, k.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), **per_head)
        assert_same_with_gradients(read, q @ memory[:, 0].mT, (k, q, v))

    @pytest.mark.parametrize("name", [name for name in FEATURES if name != "softmax"])
    @pytest.mark.parametrize("queries", [1, 3])
    def test_similarity_is_that_of_the_features(self, name, queries):
        kind, options = FEATURES[name]
        feature = get_feature(kind, 6, **options)
        k, q = uniform(2, 3, 9, 6), uniform(2, 3, queries, 6, seed=1)
        signed_k, signed_q = k * torch.tensor([1.0, -1, -1, 1, 1, -1], dtype=torch.float64), (q - 0.5) * 2
        products, least = similarity(feature, signed_k, signed_q)
        expected = feature(signed_q) @ feature(signed_k).mT
        shares = products / (products.sum(-1, keepdim=True) + least)
        assert_same_with_gradients(shares, expected / (expected.sum(-1, keepdim=True) + 1e-6), (k, q))

    @pytest.mark.parametrize("queries", [1, 5])
    @pytest.mark.parametrize("scale", ["w", 1e-3, 1.0, 5.0, 50.0])
    def test_favor_reads_whatever_the_keys_are(self, queries, scale):
        """float32 gives what logarithms give in float64, where e^‖w‖² overflows and where all underflows."""
        feature = get_feature("favor", 64, m=128)
        if scale == "w":  # keys and queries at projections with ‖w‖² of 90 and more, and some elsewhere
            longest = feature.projection.norm(dim=-1).topk(4).indices
            k = torch.cat([feature.projection[longest] * 64**0.25, feature.projection[:3]])[None]
        else:
            k = scale * torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        k, weights, results = k.float(), torch.arange(1, 8) / 8, []  # both start from the same rounded keys
        for dtype in (torch.float32, torch.float64):
            keys, queried = (x.to(dtype, copy=True).requires_grad_() for x in (k, k[:, :queries]))
            if dtype == torch.float32:
                products, least = similarity(feature, keys, queried)
                shares = products / (products.sum(-1, keepdim=True) + least)
            else:
                shares = favor_shares(feature, keys, queried)
            results.append((shares, *torch.autograd.grad((shares * weights.to(dtype)).sum(), (keys, queried))))
        rough = 2e-2 if scale == 50.0 else 2e-3  # exponents of 1e5 have their last digit at 1e-2
        for one, other in zip(*results, strict=True):
            assert one.isfinite().all()
            bound = rough * max(1e-3, float(other.detach().abs().max()))
            torch.testing.assert_close(one.double(), other, rtol=rough, atol=bound)

    @pytest.mark.parametrize(
        ("replacement", "feature", "rule"),
        [(False, name, "sum") for name in FEATURES] + [(True, "dpfp-2", rule) for rule in RULES],
    )
    def test_a_lesson_is_one_query_of_a_test_and_padding_changes_nothing(self, replacement, feature, rule):
        """Training reads one key by other code than evaluation, which reads all; small models read as if alone."""
        reader = Reader(feature, rule, 8, CPU)
        sizes = (4, 6)
        models = [reader.initial_parameters(size, seed) for seed, size in enumerate(sizes)]
        parameters = {name: stack_padded([model[name] for model in models]) for name in models[0]}
        lesson = Task(sizes, replacement).draw_lessons(4, generators(5, 6))
        read = reader.read(parameters, lesson)
        everything = torch.arange(6).expand(2, 4, -1) if replacement else lesson.keys
        every = reader.read(parameters, Sequences(lesson.keys, everything, everything, lesson.values))
        place = lesson.queries if replacement else lesson.targets
        expected = every.gather(2, place.unsqueeze(-1).expand(-1, -1, -1, read.shape[-1]))
        torch.testing.assert_close(read, expected, atol=1e-5, rtol=1e-4)
        parts = {name: None if part is None else part[:1] for name, part in vars(lesson).items()}
        first = slice(-8, None) if replacement else slice(None, 4)  # without the padding
        alone = {name: tensor.unsqueeze(0) for name, tensor in models[0].items()}
        parts |= {name: parts[name][..., first] for name in ("keys", "values") if parts[name] is not None}
        torch.testing.assert_close(reader.read(alone, Sequences(**parts)), read[:1, ..., :4], atol=1e-6, rtol=1e-4)

    def test_tanh_memories_are_the_programmers(self):
        phi_k, values = uniform(2, 5, 3), torch.tensor([[0, 1, 0, 3, 1], [2, 2, 2, 0, 1]])
        memory, hot = torch.zeros(2, 4, 3, dtype=torch.float64), one_hot(values, 4).double()
        for t in range(5):
            memory = FastWeightProgrammer().step(memory, hot[:, t], phi_k[:, t])
        assert_same_with_gradients(tanh_memory(phi_k, values, 4), memory, (phi_k,))


def favor_shares(feature, k, q):
    """Return c / (Σ c + 1e-6), c = φ(q)·φ(k), computed in logarithms."""

    def exponents(x):
        x = x * feature.dim**-0.25
        angle = x @ feature.projection.to(x).mT
        return torch.cat([angle, -angle], dim=-1) - x.square().sum(-1, keepdim=True) / 2

    logs = torch.logsumexp(exponents(q).unsqueeze(-2) + exponents(k).unsqueeze(-3), dim=-1) - math.log(feature.width)
    least = torch.full_like(logs[..., :1], math.log(1e-6))
    return (logs - torch.logsumexp(torch.cat([logs, least], dim=-1), dim=-1, keepdim=True)).exp()


@pytest.mark.parametrize("device", DEVICES)
class TestKernels:
    @pytest.mark.parametrize(("length", "width"), [(1, 1), (5, 3), (15, 24), (33, 64)])
    def test_corrections_are_those_of_the_definition(self, length, width, device):
        kernels = pytest.importorskip("rebind.lab.retrieval.kernels")
        k = torch.nn.functional.normalize(uniform(3, length, width).detach(), dim=-1).requires_grad_()
        q, erase, gradient = uniform(3, width, seed=1), uniform(3, length, seed=2), uniform(3, length, seed=3)
        expected = corrected(k, q.unsqueeze(1), erase)[:, 0]
        truth = torch.autograd.grad(expected, (k, q, erase), gradient)
        inputs = [x.detach().float().to(device).requires_grad_() for x in (k, q, erase)]
        result = kernels.Corrected.apply(*inputs)
        assert_close(result.detach().cpu().double(), expected.detach(), 1e-5)
        ours = torch.autograd.grad(result, inputs, gradient.detach().float().to(device))
        for one, true in zip(ours, truth, strict=True):
            assert_close(one.cpu().double(), true, 1e-5)

    @pytest.mark.parametrize(("length", "size", "width"), [(1, 1, 1), (7, 5, 3), (6, 12, 70), (30, 4, 9)])
    def test_tanh_memories_are_those_of_the_definition(self, length, size, width, device):
        kernels = pytest.importorskip("rebind.lab.retrieval.kernels")
        generator = torch.Generator().manual_seed(0)
        phi_k = torch.randn(2, length, width, generator=generator) * torch.tensor([1e-3, 3.0]).view(2, 1, 1)
        values = torch.randint(-1, size, (2, length), generator=generator)  # −1 is padding
        gradient = torch.randn(2, size, width, generator=generator)
        wide, ours = phi_k.double().requires_grad_(), phi_k.to(device).requires_grad_()
        expected, result = tanh_memory(wide, values, size), kernels.TanhMemory.apply(ours, values.to(device), size)
        rounding = max(2e-6, length * 2 * torch.finfo(torch.float32).eps)  # every step of tanh rounds
        torch.testing.assert_close(result.cpu().double(), expected, rtol=rounding, atol=2e-9)
        (slope,) = torch.autograd.grad(result, ours, gradient.to(device))
        (truth,) = torch.autograd.grad(expected, wide, gradient.double())
        torch.testing.assert_close(slope.cpu().double(), truth, rtol=1e-5, atol=1e-6)


class TestTask:
    def test_the_latest_value_is_the_target(self):
        keys, values = torch.tensor([[0, 1, 0, 2, 1]]), torch.tensor([[5, 6, 7, 8, 9]])
        assert latest(keys, values, torch.tensor([[0, 1, 2, 3]])).tolist() == [[7, 9, 8, -1]]

    def test_without_replacement_every_key_occurs_once(self):
        keys = Task([5, 7], replacement=False).draw_tests(50, generators(0, 1)).keys
        for model, size in zip(keys, (5, 7), strict=True):
            assert (model.sort(-1).values[:, 7 - size :] == torch.arange(size)).all()
            assert (model[:, size:] == -1).all()
            assert len({tuple(row) for row in model.tolist()}) > 30

    @pytest.mark.parametrize("replacement", [False, True])
    def test_a_model_sees_what_it_would_see_alone(self, replacement):
        both = Task([5, 7], replacement).draw_lessons(9, generators(0, 1))
        alone = Task([5], replacement).draw_lessons(9, generators(0))
        length = alone.keys.shape[-1]
        padded = both.keys[:1]
        assert torch.equal(padded[..., -length:] if replacement else padded[..., :length], alone.keys)
        assert torch.equal(both.queries[:1], alone.queries)
        if replacement:
            assert torch.equal(both.targets[:1], alone.targets)

    def test_groups_hold_sizes_up_to_a_factor_of_two(self):
        assert group_sizes((20, 40, 60, 80, 120, 140)) == {20: 20, 40: 20, 60: 60, 80: 60, 120: 60, 140: 140}


SMALL = Overwrite(key_width=8, batch=4, steps=12, every=4, tested=3, sizes=(3, 4))


def points(feature, rule, seeds, sizes=(3, 4)):
    return [{"feature": feature, "rule": rule, "size": size, "seed": seed} for size in sizes for seed in range(seeds)]


class TestTraining:
    @pytest.mark.parametrize("rule", ["sum", "delta", "tanh"])
    def test_a_stack_trains_as_its_models_would_alone(self, rule):
        together = SMALL.measure(points("dpfp-1", rule, 2), CPU)
        for point, row in zip(points("dpfp-1", rule, 2), together, strict=True):
            (alone,) = SMALL.measure([point], CPU)
            assert row["losses"] == pytest.approx(alone["losses"], rel=1e-4)
            assert row["short"] == pytest.approx(alone["short"], rel=1e-4)
        assert together[0]["loss"] != pytest.approx(together[1]["loss"], rel=1e-3)

    def test_models_that_are_done_leave(self):
        """A model with a loss that no longer falls ends; the others train as if it had never been there."""
        settings = Overwrite(key_width=8, batch=8, steps=120, every=10, patience=2, rate=0.02, sizes=(6,))
        rows = settings.measure(points("dpfp-1", "sum", 3, (6,)), CPU)
        assert len({row["steps"] for row in rows}) > 1
        for point, row in zip(points("dpfp-1", "sum", 3, (6,)), rows, strict=True):
            (alone,) = settings.measure([point], CPU)
            assert (row["steps"], row["loss"]) == (alone["steps"], pytest.approx(alone["loss"], rel=1e-2))

    def test_a_model_that_diverges_ends_alone(self):
        """Its row has the last finite loss and says so; the others continue as if it had never been there."""
        training = RetrievalTraining(SMALL, dict(enumerate(points("dpfp-1", "delta", 2, (4,)))), CPU)
        training.start_round()
        assert training.finish_round() == {}
        with torch.no_grad():
            training.stack.theta[0, 0] = float("nan")
        training.start_round()
        with pytest.warns(NumericalWarning, match="diverged"):
            rows = training.finish_round()
        lost = rows[0]
        assert (lost["diverged"], lost["steps"], lost["loss"], lost["short"]) == (True, 8, *lost["losses"] * 2)
        (other,) = train_all([training])
        (alone,) = SMALL.measure(points("dpfp-1", "delta", 2, (4,))[1:], CPU)
        assert not other["diverged"]
        assert other["losses"] == pytest.approx(alone["losses"], rel=1e-4)

    def test_a_model_that_was_never_finite_has_its_initial_loss(self):
        settings = Capacity(key_width=8, batch=4, steps=12, every=4, tested=3, sizes=(4,))
        training = RetrievalTraining(settings, {0: points("favor-64", "sum", 1, (4,))[0]}, CPU)
        with torch.no_grad():
            training.stack.theta.fill_(float("inf"))
        training.start_round()
        with pytest.warns(NumericalWarning, match="diverged"):
            row = training.finish_round()[0]
        assert (row["losses"], row["diverged"]) == ([], True)
        assert 0 < row["loss"] < 2

    @pytest.mark.parametrize("feature", ["favor-64", "linear", "softmax"])
    def test_every_feature_learns(self, feature):
        """FAVOR+ with the delta rule ended in NaN in the publication; scaled, it does not."""
        settings = Overwrite(key_width=8, batch=8, steps=60, every=20, rate=1e-2, sizes=(5,))
        rule = "sum" if feature == "softmax" else "delta"
        (row,) = settings.measure(points(feature, rule, 1, (5,)), CPU)
        assert row["losses"][-1] < row["losses"][0] < 0.5

    @gpu
    def test_a_gpu_repeats_itself(self):
        """Together or alone, recorded or not, to the bit: no sum has an order that is left to chance."""
        device = torch.device("cuda")
        for experiment, cases in (
            (Capacity, [(name, "sum") for name in FEATURES]),
            (Overwrite, [("dpfp-1", rule) for rule in RULES]),
        ):
            settings = experiment(key_width=8, batch=8, steps=60, every=10, patience=2, rate=0.02, sizes=(20, 40, 90))
            listed = [point for case in cases for point in points(*case, 2, settings.sizes)]
            together = settings.measure(listed, device)
            assert settings.measure(listed, device) == together
            for start in range(0, len(listed), 6):  # one feature and rule at a time
                assert settings.measure(listed[start : start + 6], device) == together[start : start + 6]


class TestReports:
    def test_largest_solved_by_every_seed_and_by_most(self):
        losses = {4: (9e-4, 1e-3, 5e-4), 8: (5e-4, 1.1e-3, 1e-3), 12: (5e-4, 2e-3, 2e-3)}
        rows = [{"size": size, "loss": loss} for size, seeds in losses.items() for loss in seeds]
        assert largest_solved(rows) == (4, 8)
        assert largest_solved(rows[6:]) == (0, 0)
        assert largest_solved([{"size": 4, "loss": 5e-4}, {"size": 4, "loss": 2e-3}]) == (0, 0)  # half is not most

    @pytest.mark.parametrize(("seeds", "holds"), [(3, True), (2, True), (1, False)])
    def test_most_seeds_are_compared_with_the_published_run(self, seeds, holds):
        """This many of three seeds of DPFP-1 solve the size that its published run solved."""

        def loss(feature, size, seed):
            largest = PUBLISHED.get(feature, (40, 0))[0]
            return 5e-4 if size < largest or (size == largest and (seed < seeds or feature != "dpfp-1")) else 0.2

        rows = [
            {**point, "loss": loss(**point), "diverged": False} for batch in Capacity().batches() for point in batch
        ]
        *_, claim = Capacity().claims(rows)
        assert (claim.statement.startswith("most seeds"), claim.holds) == (True, holds)
        line = next(line for line in Capacity().table(rows).rows if line[0] == "DPFP-1")
        assert line[-3:] == ["100" if seeds == 3 else "80", "100" if holds else "80", "100"]

    @pytest.mark.parametrize("experiment", [Capacity.quick(), Overwrite.quick()])
    def test_a_diverged_model_is_in_the_table_and_fails_a_claim(self, experiment):
        listed = [point for batch in experiment.batches() for point in batch]
        rows = [
            {**point, "loss": 0.3, "short": 0.1, "steps": 10, "losses": [0.3], "diverged": not at}
            for at, point in enumerate(listed)
        ]
        assert "0.3 (1 of 2 diverged)" in experiment.table(rows).rows[0]
        (claim,) = [claim for claim in experiment.claims(rows) if "NaN" in claim.statement]
        assert not claim.holds

    @pytest.mark.parametrize("experiment", [Capacity.quick(), Overwrite.quick()])
    def test_figures_show_complete_learning_curves(self, experiment):
        """One seed is solved at the first evaluation; the other ends between two."""
        pytest.importorskip("matplotlib")
        rows = [
            {**point, "short": 0.1, "diverged": False, "loss": 0.25}
            | ({"losses": [0.5], "steps": 100} if point["seed"] else {"losses": [0.5, 0.25, 0.25], "steps": 250})
            for batch in experiment.batches()
            for point in batch
        ]
        line = experiment.figure(rows).axes[-1].lines[0]
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([100, 200, 250], [0.5, 0.375, 0.375])
