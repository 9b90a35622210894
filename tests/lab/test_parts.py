"""What the experiments are made of: theory, fits, and models that train in stacks."""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise

import pytest
import torch

from rebind.errors import InputError
from rebind.lab import capacity, closed_form, forgetting, hopfield, overwrite
from rebind.lab.experiment import LabWarning, configure
from rebind.lab.reading import _doubled, constant, corrected, rows, similarity
from rebind.lab.real import mlp_keys
from rebind.lab.recorded import Place
from rebind.lab.report import courses, curve, slope, spread
from rebind.lab.retrieval import FEATURES, Recipe, Sequences, Stack, Task, Training, correct, faded, hot, latest
from rebind.lab.squash import squashed, unwrite, write
from rebind.lab.stacks import Trainer, train, train_all
from rebind.lab.theory import delta_errors, hopfield_error, interference, least_squares
from rebind.memory import get_feature, get_rule, l2_normalise, rule_names
from rebind.memory.programmer import FastWeightProgrammer
from rebind.ops import scan_rule
from tests.support import assert_close

CPU = torch.device("cpu")
DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]  # where Triton's kernels run, or are interpreted


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


def test_a_place_is_measured_or_not():
    found = curve([{"x": 0.3, "y": 1.0}, {"x": 2.0, "y": 5.0}], "x", "y")
    assert found.has(0.1 + 0.2, 2)
    assert not found.has(0.3, 1.9)


def test_a_course_goes_on_where_a_seed_ended():
    rows = [{"steps": 100, "losses": [0.5]}, {"steps": 250, "losses": [0.75, 0.5, 0.25]}, {"steps": 100, "losses": []}]
    found = courses(rows, 100)
    assert found.x == [100, 200, 250]
    assert found.mean == [0.625, 0.5, 0.375]
    assert (found.low, found.high) == ([0.5, 0.5, 0.25], [0.75, 0.5, 0.5])
    assert courses(rows[2:], 100).x == []


@pytest.mark.parametrize("experiment", [capacity.EXPERIMENT, overwrite.EXPERIMENT])
def test_figures_draw_whole_courses(experiment):
    """One seed is solved at the first evaluation; the other ends between two."""
    pytest.importorskip("matplotlib")
    config = experiment.quick
    rows = [
        {
            **point,
            "short": 0.1,
            "diverged": False,
            **({"losses": [0.5], "steps": 100} if point["seed"] else {"losses": [0.5, 0.25, 0.25], "steps": 250}),
            "loss": 0.25,
        }
        for batch in experiment.batches(config)
        for point in batch
    ]
    learning = experiment.figure(config, rows).axes[-1].lines[0]
    assert list(learning.get_xdata()) == [100, 200, 250]
    assert list(learning.get_ydata()) == [0.5, 0.375, 0.375]


def test_solved_is_solved_by_every_seed():
    found = curve([{"x": 4, "y": 9e-4}, {"x": 4, "y": 1e-3}, {"x": 8, "y": 5e-4}, {"x": 8, "y": 1.1e-3}], "x", "y")
    assert capacity.solved(found) == 4


def test_every_rule_of_overwrite_has_a_name_and_tanh_no_published_loss():
    assert not [place for place in overwrite.PUBLISHED if "tanh" in place]
    config = configure(overwrite.QUICK, ["rules=mamba2", "sizes=8"])
    rows = [
        {**point, "loss": 0.3, "short": 0.1, "steps": 10, "diverged": False}
        for batch in overwrite.batches(config)
        for point in batch
    ]
    assert overwrite.table(config, rows).rows[0][1] == "Mamba-2"
    assert "mamba2" not in overwrite.Overwrite().rules


def test_closed_form_claims_nothing_of_loads_it_did_not_measure():
    def says(words):
        config = configure(closed_form.QUICK, ["width=16", "seeds=1", *words])
        rows = [{**point, "error": 0.5} for batch in closed_form.batches(config) for point in batch]
        return "; ".join(f"{claim.says} ({claim.got})" for claim in closed_form.claims(config, rows))

    every = says([])
    assert all(part in every for part in ("at n = d:", "at 2d", "at d/2", "up to n = d,", "(n−1)/d", "1 − d/n"))
    few = says(["loads=0.375,0.75"])
    assert not [part for part in ("at n = d:", "at 2d", "at d/2", "up to n = d,", "1 − d/n") if part in few]
    assert "up to n = 12," in few
    assert "(n−1)/d" in few
    assert "recursive batch by batch" in says(["loads=1.5"])


def hopfield_rows(config):
    names = {
        "load": ["error"],
        "correlated": ["error"],
        "ends": ["pattern", "mixture"],
        "modern": ["one", "several"],
        "beta": ["one", "several"],
        "attention": ["gap"],
    }
    return [
        {**point, **dict.fromkeys(names[point["part"]], 0.2)} for batch in hopfield.batches(config) for point in batch
    ]


def test_hopfield_claims_nothing_of_places_it_did_not_measure():
    def says(words):
        config = configure(hopfield.QUICK, words)
        return [claim.says for claim in hopfield.claims(config, hopfield_rows(config))]

    assert len(says([])) == 11
    few = says(["loads=0.13,0.15", "rates=0.25", "betas=0.1,0.3", "overlaps=0.1,0.2"])
    assert [one for one in says([]) if one not in few] == [
        "the classical network breaks down near 0.138 N",
        "below it the wrong bits are those of mean-field theory",
        "the larger the network, the sharper the knee",
        "correlated patterns are lost at a load that random ones survive",
        "the modern network retrieves at 2^(N/8) patterns",
        "and far beyond what a classical one of its size holds",
        "further steps go where the first one headed: to the mean at β = 0.2, to the pattern at 0.5",
    ]


def test_the_sixth_network_is_drawn_too():
    pytest.importorskip("matplotlib")
    config = configure(hopfield.QUICK, ["units=20,30,40,50,60,70", "modern=2,3,4,5,6,7"])
    load, _, modern, _ = hopfield.figure(config, hopfield_rows(config)).axes
    for axes, wanted in ((load, "N = 70"), (modern, "N = 7:")):
        assert any(str(line.get_label()).startswith(wanted) for line in axes.lines)


@pytest.mark.parametrize("words", [["pools=0.5", "length=1"], ["pools=5"]])
def test_keys_that_come_just_twice_are_measured(words):
    config = configure(forgetting.QUICK, ["width=8", "streams=2", "seeds=1", *words])
    for batch in forgetting.batches(config):
        assert len(forgetting.measure(config, batch, CPU)) == len(batch)


def doubles(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def gradients(made, inputs):
    """Of a sum with other weights at every place."""
    weights = torch.rand(made.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.autograd.grad((made * weights).sum(), inputs, retain_graph=True)


def same_with_gradients(got, expected, inputs):
    torch.testing.assert_close(got, expected)
    for one, other in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)


def favor_shares(feature, k, q):
    """c / (Σ c + 1e-6), c = φ(q)·φ(k), all of it in logarithms."""

    def exponents(x):
        x = x * feature.dim**-0.25
        angle = x @ feature.projection.to(x).mT
        return torch.cat([angle, -angle], dim=-1) - x.square().sum(-1, keepdim=True) / 2

    logs = torch.logsumexp(exponents(q).unsqueeze(-2) + exponents(k).unsqueeze(-3), dim=-1) - math.log(feature.width)
    least = torch.full_like(logs[..., :1], math.log(1e-6))
    return (logs - torch.logsumexp(torch.cat([logs, least], dim=-1), dim=-1, keepdim=True)).exp()


class TestReading:
    """What is written by hand is what autograd makes of the definitions."""

    @pytest.mark.parametrize("name", [name for name in FEATURES if name != "softmax"])
    @pytest.mark.parametrize("length", [1, 9])
    def test_similarity_is_that_of_the_features(self, name, length):
        kind, options = FEATURES[name]
        feature = get_feature(kind, 6, **options)
        k, q = doubles(2, 3, length, 6), doubles(2, 3, 1, 6, seed=1)
        signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
        k_signed, q_signed = k * signs, (q - 0.5) * 2
        got = similarity(feature, constant(feature, k), k_signed, q_signed)
        products = got.scaled if got.shift is None else got.scaled * got.shift.exp()
        expected = feature(q_signed) @ feature(k_signed).mT
        same_with_gradients(products, expected, (k, q))
        same_with_gradients(got.share(got.scaled), expected / (expected.sum(-1, keepdim=True) + 1e-6), (k, q))

    def test_a_key_in_the_corner_of_relu_is_not_moved(self):
        feature = get_feature("dpfp", 4, nu=1)
        k, q = -doubles(1, 3, 4).detach(), -doubles(1, 1, 4, seed=1).detach()
        k[0, 1] = 0.0
        k[0, 2, 1] = 0.0
        k.requires_grad_(), q.requires_grad_()
        expected = feature(q) @ feature(k).mT
        same_with_gradients(similarity(feature, constant(feature, k), k, q).scaled, expected, (k, q))

    @pytest.mark.parametrize("queries", [1, 5])
    @pytest.mark.parametrize("scale", ["w", 1e-3, 1.0, 5.0, 50.0])
    def test_favor_reads_whatever_the_keys_are(self, queries, scale):
        """In float32 what logarithms give in float64, gradients too: where e^‖w‖² overflows, where all underflows."""
        feature = get_feature("favor", 64, m=128)
        longest = feature.projection.norm(dim=-1).topk(4).indices
        if scale == "w":  # keys and queries at projections with ‖w‖² of 90 and more, and some elsewhere
            k = torch.cat([feature.projection[longest] * 64**0.25, feature.projection[:3]])[None]
        else:
            k = scale * torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        k, q = k.float(), k[:, :queries].float()
        found = {}
        for dtype in (torch.float32, torch.float64):
            keys, asked = k.to(dtype).requires_grad_(), q.to(dtype).requires_grad_()
            if dtype == torch.float32:
                got = similarity(feature, constant(feature, keys), keys, asked)
                read = got.share(got.scaled)
            else:
                read = favor_shares(feature, keys, asked)
            weights = torch.arange(1, 8, dtype=dtype) / 8
            found[dtype] = (read, *torch.autograd.grad((read * weights).sum(), (keys, asked)))
        rough = 2e-2 if scale == 50.0 else 2e-3  # exponents of 1e5 have their last digit at 1e-2
        for one, other in zip(found[torch.float32], found[torch.float64], strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(
                one.double(), other, rtol=rough, atol=rough * max(1e-3, float(other.detach().abs().max()))
            )

    @pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
    def test_one_query_is_corrected_as_many(self, length):
        """In chunks and with a gradient by hand, or by one triangular system: the same."""
        k, q, erase = doubles(2, length, 5), doubles(2, 1, 5, seed=1), doubles(2, length, seed=2)
        keys = k / k.sum(-1, keepdim=True)
        twice = correct(keys, q.expand(-1, 2, -1), erase)[:, :1]
        same_with_gradients(corrected(keys, q, erase), twice, (k, q, erase))

    @pytest.mark.parametrize("count", [1, 2, 32, 64])
    def test_doubling_inverts(self, count):
        matrix = 4 * doubles(3, 2, count, count).detach()
        one = torch.eye(count, dtype=torch.float64)
        lower = one + matrix.tril(-1)
        inverse = _doubled(matrix, one.expand_as(matrix).contiguous())
        assert torch.equal(inverse, inverse.tril())
        expected = torch.linalg.solve_triangular(lower, one.expand_as(lower), upper=False)
        torch.testing.assert_close(inverse, expected, rtol=1e-9, atol=0)

    def test_doubling_does_not_cancel(self):
        """Of the same key over and over, in float32: powers of this matrix reach 1e18, its inverse only 1."""
        inverse = _doubled(torch.ones(1, 64, 64), torch.eye(64).expand(1, 64, 64).contiguous())
        assert torch.equal(inverse[0], torch.eye(64) - torch.diag(torch.ones(63), -1))

    def test_squashed_memories_are_the_programmers(self):
        phi_k = doubles(2, 5, 3)
        values = torch.tensor([[0, 1, 0, 3, 1], [2, 2, 2, 0, 1]])
        memory, one_hots = torch.zeros(2, 4, 3, dtype=torch.float64), hot(values, 4).double()
        for t in range(5):
            memory = FastWeightProgrammer().step(memory, one_hots[:, t], phi_k[:, t])
        same_with_gradients(squashed(phi_k, values, 4), memory, (phi_k,))
        torch.testing.assert_close(squashed(phi_k.detach(), values, 4), memory.detach())

    @pytest.mark.parametrize(("length", "width", "nu"), [(1, 2, 1), (33, 5, 3), (40, 24, 2), (70, 64, 1)])
    @pytest.mark.parametrize("device", DEVICES)
    def test_kernels_multiply_as_the_definition(self, length, width, nu, device):
        kernels = pytest.importorskip("rebind.lab.dpfp_kernels")
        generator = torch.Generator().manual_seed(0)
        k, q = (torch.randn(3, n, width, generator=generator, dtype=torch.float64) for n in (length, 1))
        k[0, 0, 0] = 0.0  # a corner of relu
        slope = torch.randn(3, 1, length, generator=generator, dtype=torch.float64)
        feature = get_feature("dpfp", width, nu=nu)
        k.requires_grad_(), q.requires_grad_()
        expected = feature(q) @ feature(k).mT
        truth = torch.autograd.grad(expected, (k, q), slope)
        keys, query = (x.detach().float().to(device) for x in (k, q))
        assert_close(kernels.products(keys, query, nu).cpu().double(), expected.detach()[:, 0], 1e-5)
        for one, true in zip(kernels.slopes(keys, query, slope[:, 0].float().to(device), nu), truth, strict=True):
            assert_close(one.cpu().double(), true, 1e-5)

    @pytest.mark.parametrize(("length", "width"), [(1, 1), (5, 3), (70, 24), (130, 64)])
    @pytest.mark.parametrize("device", DEVICES)
    def test_kernels_correct_as_the_definition(self, length, width, device):
        kernels = pytest.importorskip("rebind.lab.correct_kernels")
        k = torch.nn.functional.normalize(doubles(3, length, width).detach(), dim=-1).requires_grad_()
        q, erase = doubles(3, 1, width), torch.rand(3, length, dtype=torch.float64, requires_grad=True)
        slope = doubles(3, 1, length).detach()
        expected = corrected(k, q, erase)
        truth = torch.autograd.grad(expected, (k, q, erase), slope)
        on_device = [one.detach().float().to(device) for one in (k, q, erase)]
        x, rest = kernels.sweep(*on_device)
        assert_close(x.cpu().double(), expected.detach()[:, 0], 1e-5)
        found = kernels.unsweep(on_device[0], on_device[2], x, rest, slope[:, 0].float().to(device))
        for one, true in zip(found, truth, strict=True):
            assert_close(one.cpu().double(), true, 1e-5)

    @pytest.mark.parametrize(("length", "size", "width"), [(1, 1, 1), (7, 5, 3), (12, 40, 70), (60, 4, 9)])
    @pytest.mark.parametrize("device", DEVICES)
    def test_kernels_squash_as_the_definition(self, length, size, width, device):
        kernels = pytest.importorskip("rebind.lab.squash_kernels")
        generator = torch.Generator().manual_seed(0)
        phi_k = torch.randn(2, length, width, generator=generator) * torch.tensor([1e-3, 3.0]).view(2, 1, 1)
        values = torch.randint(size, (2, length), generator=generator)
        slope = torch.randn(2, size, width, generator=generator)
        expected, (states,) = write(phi_k.double(), values, size, True)
        got, kept = kernels.write(phi_k.to(device), values.to(device), size, True)
        alone, _ = kernels.write(phi_k.to(device), values.to(device), size, False)
        torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-6, atol=2e-9)
        assert torch.equal(alone, got)
        d_phi = kernels.unwrite(slope.to(device), values.to(device), *kept)
        torch.testing.assert_close(d_phi.cpu().double(), unwrite(slope.double(), values, states), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("once", [True, False])
    def test_rows_give_their_gradients_back(self, once):
        task = Task(5, 5, replacement=not once)
        keys, _ = task.draw(3, [torch.Generator().manual_seed(seed) for seed in (0, 1)])
        table = doubles(2, 5, 4)
        back = keys.argsort(-1) if once else hot(keys, 5).double()
        expected = torch.stack([one[index] for one, index in zip(table, keys, strict=True)])
        same_with_gradients(rows(table, keys, back), expected, (table,))


class Event:
    """Of a GPU, played on a CPU."""

    def record(self):
        pass

    def query(self):
        return True


class FakePlace:
    stream = None

    def memory(self):
        return None


class TestRetrieval:
    @pytest.mark.parametrize("queries", [1, 2])
    @pytest.mark.parametrize("rule", rule_names())
    def test_reading_is_the_scan(self, rule, queries):
        """No state is formed, yet what is read is what the recurrence leaves."""
        generator = torch.Generator().manual_seed(1)
        k, q = (torch.rand(3, n, 5, generator=generator, dtype=torch.float64) for n in (9, queries))
        v = torch.randn(3, 9, 4, generator=generator, dtype=torch.float64)
        found = get_rule(rule)
        gates = {name: torch.rand(3, 9, generator=generator, dtype=torch.float64) for name in found.gates}
        got = found.coefficients(k, **gates)
        read = faded(correct(k, q, got.erase), got.decay, got.write) @ v
        given = {name: gate.unsqueeze(-1) for name, gate in gates.items()}
        _, state = scan_rule(rule, k.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), **given)
        torch.testing.assert_close(read, q @ state[:, 0].mT, atol=1e-11, rtol=1e-9)

    @pytest.mark.parametrize(
        ("task", "feature", "rule"),
        [(Task(6, 6, False), name, "sum") for name in FEATURES]
        + [(Task(6, 12, True), "dpfp-2", rule) for rule in overwrite.RULES],
    )
    def test_a_lesson_is_one_query_of_a_test(self, task, feature, rule):
        """Training reads one key a sequence by other code than evaluation, which reads them all."""
        stack = Stack(Recipe(task, feature, rule), [0, 1], Training(key_width=8), CPU)
        drawn = task.lessons(4, [torch.Generator().manual_seed(seed) for seed in (5, 6)])
        lesson = Sequences.of(drawn, task)
        asked = torch.arange(task.size).expand(2, 4, -1)
        every = stack.read(Sequences(lesson.keys, lesson.values, asked, asked))
        expected = every.gather(2, lesson.queries.unsqueeze(-1).expand(-1, -1, -1, task.size))
        torch.testing.assert_close(stack.read(lesson), expected, atol=1e-5, rtol=1e-4)

    def test_the_latest_value_is_wanted(self):
        keys, values = torch.tensor([[0, 1, 0, 2, 1]]), torch.tensor([[5, 6, 7, 8, 9]])
        assert latest(keys, values, torch.tensor([[0, 1, 2]])).tolist() == [[7, 9, 8]]

    def test_without_replacement_every_key_comes_once(self):
        (keys,), (values,) = Task(7, 7, replacement=False).draw(50, [torch.Generator().manual_seed(0)])
        assert (keys.sort(-1).values == torch.arange(7)).all()
        assert (values.sort(-1).values == torch.arange(7)).all()
        assert len({tuple(row) for row in keys.tolist()}) > 40

    @pytest.mark.parametrize("rule", ["sum", "delta", "tanh"])
    def test_a_stack_trains_as_its_models_would_alone(self, rule):
        config = Training(key_width=8, batch=4, steps=12, every=4, tested=3)
        recipe = Recipe(Task(4, 8, replacement=True), "dpfp-1", rule)
        together = train(recipe, [0, 1], config, CPU)
        for seed, found in enumerate(together):
            (alone,) = train(recipe, [seed], config, CPU)
            assert found.losses == pytest.approx(alone.losses, rel=1e-4)
            assert found.short == pytest.approx(alone.short, rel=1e-4)
        assert together[0].loss != pytest.approx(together[1].loss, rel=1e-3)

    def test_models_that_are_done_leave(self):
        """A model whose loss no longer falls ends; the others train as if it had never been there."""
        config = Training(key_width=8, batch=8, steps=120, every=10, patience=2, rate=0.02)
        recipe = Recipe(Task(6, 12, replacement=True), "dpfp-1", "sum")
        found = train(recipe, [0, 1, 2], config, CPU)
        assert len({one.steps for one in found}) > 1
        for seed, one in enumerate(found):
            (alone,) = train(recipe, [seed], config, CPU)
            assert (one.steps, one.loss) == (alone.steps, pytest.approx(alone.loss, rel=1e-2))

    def test_rounds_in_any_order_find_the_same(self):
        """Stacks side by side, as a GPU trains them, do not meet: nothing of one depends on the others' turns."""
        config = Training(key_width=8, batch=4, steps=12, every=4, tested=3)
        task = Task(4, 8, replacement=True)
        jobs = [(Recipe(task, "dpfp-1", "delta"), [0, 1]), (Recipe(task, "linear", "rfa"), [1])]
        apart = dict(train_all(jobs, config, CPU))
        trainers = [Trainer(*job, config, CPU) for job in jobs]
        for at in (0, 1, 1, 0, 1, 0):
            trainers[at].advance()
            trainers[at].settle()
        assert [trainer.trained for trainer in trainers] == [apart[0], apart[1]]

    def test_lessons_may_be_drawn_ahead(self):
        """As on a GPU: a round's lessons lie in one place, and the steps look up their own."""
        config = Training(key_width=8, batch=4, steps=6, every=3, tested=3)
        trainer = Trainer(Recipe(Task(4, 4, replacement=False), "dpfp-1"), [0, 1], config, CPU)
        trainer.ahead = 3
        drawn = trainer._drawn()
        assert drawn.shape[:3] == (3, 2, 4)
        assert not torch.equal(drawn[0], drawn[1])
        trainer._begin(drawn)
        for step in range(3):
            assert trainer.at.tolist() == [step]
            trainer._step()
        lessons = [drawn[step : step + 1] for step in range(3)]
        other = Trainer(Recipe(Task(4, 4, replacement=False), "dpfp-1"), [0, 1], config, CPU)
        for lesson in lessons:
            other._begin(lesson)
            other._step()
        for name, parameter in trainer.stack.parameters.items():
            assert torch.equal(parameter, other.stack.parameters[name])

    def test_rounds_of_replays_are_rounds_of_steps(self, monkeypatch):
        """The way of a GPU, played on a CPU: one step as it is, one recorded without effect, then replays."""
        config = Training(key_width=8, batch=8, steps=120, every=10, patience=2, rate=0.02)
        recipe = Recipe(Task(6, 12, replacement=True), "dpfp-1", "sum")
        seen = {"recorded": 0, "replayed": 0}

        class Graph:
            def capture_begin(self, pool=None):
                adam = trainer.adam.state.values()
                self.touched = [
                    *trainer.stack.parameters.values(),
                    trainer.at,
                    trainer.now,
                    *(t for one in adam for t in one.values()),
                ]
                self.before = [tensor.detach().clone() for tensor in self.touched]

            def capture_end(self):
                seen["recorded"] += 1
                with torch.no_grad():
                    for tensor, value in zip(self.touched, self.before, strict=True):
                        tensor.copy_(value)

            def replay(self):
                seen["replayed"] += 1
                recorded = next(one for one in trainer.recordings if one.graph is self)
                recorded.step()

            def reset(self):
                pass

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(Trainer, "_adam", lambda self: torch.optim.Adam(self.stack.parameters.values(), lr=0.02))
        trainer = Trainer(recipe, [0, 1, 2], config, CPU, FakePlace())
        plain = Trainer(recipe, [0, 1, 2], config, CPU, FakePlace())
        for one in (trainer, plain):
            while not one.over:
                if one is plain:
                    for recorded in plain.recordings:
                        recorded.plain = 1_000
                one.advance()
                one.settle()
        assert trainer.trained == plain.trained
        ends = sorted({one.steps for one in trainer.trained})
        assert len(ends) > 1, "some should leave before others"
        rounds = [end - start for start, end in pairwise([0, *ends])]
        looks = sum(1 for steps in rounds if steps > config.every)  # an evaluation is recorded at its second time
        evaluations = trainer.taken // config.every
        assert seen == {
            "recorded": len(ends) + looks,
            "replayed": trainer.taken - len(ends) + evaluations - len(ends),
        }

    def test_a_model_that_diverges_ends_alone(self):
        """Its row has the last finite loss and says so; the others go on as if it had never been there."""
        config = Training(key_width=8, batch=4, steps=12, every=4, tested=3)
        recipe = Recipe(Task(4, 8, replacement=True), "dpfp-1", "delta")
        trainer = Trainer(recipe, [0, 1], config, CPU)
        trainer.advance()
        trainer.settle()
        with torch.no_grad():
            trainer.stack.parameters["embed"][0, 0, 0] = float("nan")
        trainer.advance()
        with pytest.warns(LabWarning, match="seed 0, is not finite after 8 steps"):
            trainer.settle()
        trainer.advance()
        trainer.settle()
        lost, other = trainer.trained
        assert (lost.diverged, lost.steps, lost.loss, lost.short) == (True, 8, lost.losses[0], lost.losses[0])
        (alone,) = train(recipe, [1], config, CPU)
        assert not other.diverged
        assert other.losses == pytest.approx(alone.losses, rel=1e-4)

    def test_a_model_that_was_never_finite_has_its_first_loss(self):
        config = Training(key_width=8, batch=4, steps=12, every=4, tested=3)
        trainer = Trainer(Recipe(Task(4, 4, replacement=False), "favor-64"), [0], config, CPU)
        with torch.no_grad():
            trainer.stack.parameters["key"].fill_(float("inf"))
        trainer.advance()
        with pytest.warns(LabWarning, match="diverged"):
            trainer.settle()
        (found,) = trainer.trained
        assert found.losses == []
        assert 0 < found.loss < 2

    def test_a_diverged_model_is_in_the_table_and_fails_a_claim(self):
        for experiment in (capacity.EXPERIMENT, overwrite.EXPERIMENT):
            points = [point for batch in experiment.batches(experiment.quick) for point in batch]
            rows = [
                {**point, "loss": 0.3, "short": 0.1, "steps": 10, "losses": [0.3], "diverged": not at}
                for at, point in enumerate(points)
            ]
            assert "0.3 (1 of 2 diverged)" in experiment.table(experiment.quick, rows).rows[0]
            (said,) = [one for one in experiment.claims(experiment.quick, rows) if "NaN" in one.says]
            assert not said.holds

    @pytest.mark.parametrize("feature", ["favor-64", "linear", "softmax"])
    def test_every_feature_learns_under_delta(self, feature):
        """FAVOR+ with the delta rule has been seen to end in NaN; drawn once and scaled, it does not."""
        config = Training(key_width=8, batch=8, steps=60, every=20, rate=1e-2)
        (found,) = train(Recipe(Task(5, 10, replacement=True), feature, "delta"), [0], config, CPU)
        assert found.losses[-1] < found.losses[0] < 0.5

    def test_an_unknown_feature_is_named(self):
        with pytest.raises(InputError, match="feature 'dpfp-9' is unknown, expected one of linear, dpfp-1"):
            Stack(Recipe(Task(3, 3, False), "dpfp-9"), [0], Training(), CPU)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    @pytest.mark.parametrize("rule", ["sum", "rfa", "tanh", "delta", "gated_delta", "longhorn"])
    def test_a_recorded_step_is_a_step(self, rule):
        """On a GPU: replays of a graph leave the parameters that steps without one would; models leave in between."""
        config = Training(key_width=8, batch=8, steps=30, every=10, tested=3)
        recipe = Recipe(Task(6, 12, replacement=True), "dpfp-2", rule)
        device = torch.device("cuda")
        recorded, plain = (Trainer(recipe, [0, 1], config, device, Place(device)) for _ in range(2))
        for turn in range(3):
            for trainer in (recorded, plain):
                for one in trainer.recordings if trainer is plain else ():
                    one.plain = 1_000
                trainer.advance()
                torch.cuda.synchronize()
                if turn == 1:
                    with torch.cuda.stream(trainer.place.stream):
                        trainer._keep([1])
            torch.testing.assert_close(recorded.now, plain.now)
        for name, parameter in recorded.stack.parameters.items():
            torch.testing.assert_close(parameter, plain.stack.parameters[name])

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    def test_a_gpu_repeats_itself(self):
        """Side by side or alone, to the bit: no sum whose order is left to chance."""
        config = Training(key_width=8, batch=8, steps=60, every=10, patience=2, rate=0.02)
        once, often = Task(40, 40, replacement=False), Task(20, 40, replacement=True)
        jobs = [(Recipe(once, feature), [0, 1]) for feature in FEATURES]
        jobs += [(Recipe(often, "dpfp-1", rule), [0, 1]) for rule in ("sum", "rfa", "tanh", "delta", "longhorn")]
        together = dict(train_all(jobs, config, torch.device("cuda")))
        for number, job in enumerate(jobs):
            assert train(*job, config, torch.device("cuda")) == together[number]


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
