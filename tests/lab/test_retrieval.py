"""Models of the synthetic retrieval, in stacks: what they read, how they are trained and recorded."""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import pairwise

import pytest
import torch

from rebind.errors import InputError
from rebind.lab import capacity, overwrite
from rebind.lab.experiment import LabWarning
from rebind.lab.recorded import Place
from rebind.lab.retrieval import FEATURES, Recipe, Sequences, Stack, Task, Training, correct, faded, latest
from rebind.lab.stacks import Trainer, train, train_all
from rebind.memory import get_rule, rule_names
from rebind.ops import scan_rule
from tests.lab.graphs import played

CPU = torch.device("cpu")
DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]  # where Triton's kernels run, or are interpreted


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
        seen = Counter()

        def touched():
            moments = [tensor for one in trainer.adam.state.values() for tensor in one.values()]
            return [*trainer.stack.parameters.values(), trainer.at, trainer.now, *moments]

        graph = played(touched, lambda: trainer.recordings, seen)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
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
