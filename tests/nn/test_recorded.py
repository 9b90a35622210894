"""Training steps recorded as CUDA graphs: when they are, and what happens to steps that cannot be."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from accelerate import PartialState

from rebind.errors import CudaGraphWarning, InputError
from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.training import config as settings
from rebind.nn.training import step, train
from rebind.nn.training.data import SegmentBatches
from tests.nn.training_runs import TINY, config, corpus, losses
from tests.support import raises

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("changes", [{}, {"carry": True}, {"compile": True}, {"sharded": True}, {"accumulate": 2}])
def test_what_cannot_be_recorded(changes):
    device = {"device": "cuda"} if changes else {}
    with raises(InputError, "not_recordable"):
        config("x", record=True, **device, **changes)
    assert not config("x", **device, **changes).should_record()


@pytest.mark.parametrize(
    ("record", "processes", "parameters", "expected"),
    [
        (None, 1, settings.LARGEST_RECORDED, True),
        (None, 1, settings.LARGEST_RECORDED + 1, False),
        (True, 1, settings.LARGEST_RECORDED + 1, True),
        (False, 1, 1, False),
        (None, 2, 1, False),
    ],
)
def test_which_models_are_recorded(record, processes, parameters, expected):
    assert config("x", device="cuda", record=record).should_record(processes, parameters) == expected


class PlayedStep(step.RecordedStep):
    """A recorded step that computes on the CPU instead of replaying a graph."""

    def __init__(self, loss_of, parameters, clip_norm, inputs, targets):
        assert all(parameter.grad is None for parameter in parameters)
        self.loss_of, self.parameters, self.clip_norm, self.count = loss_of, parameters, clip_norm, 0

    def __call__(self, inputs, targets):
        self.count += 1
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.loss_of(inputs, targets)
        loss.backward()
        return loss.detach(), torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)


@pytest.fixture
def take_steps(monkeypatch):
    """Take steps of a model on the CPU as if it were a GPU; return the losses, and the recorded step, if any."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (26, 100))

    def run(record: bool | None, count: int = step.STEPS_BEFORE_RECORDING + 3):
        torch.manual_seed(0)
        model = RebindForCausalLM(RebindConfig(vocab_size=20, layer_kinds="delta", **{**TINY, "dropout": 0.0}))
        run = config("x", device="cuda", record=record, precision="float32")
        steps = step.TrainingStep(run, PartialState(), model, step.build_optimizer(run.optimizer, model))
        batches = SegmentBatches((torch.arange(400) ** 2 % 20).numpy(), run.length, run.batch_size)
        return [float(steps.run(1e-2, batches.batch(index), [])[0]) for index in range(count)], steps.recording

    return run


def test_recorded_steps_are_the_same_steps(take_steps, monkeypatch):
    monkeypatch.setattr(step, "RecordedStep", PlayedStep)
    recorded, recording = take_steps(record=None)
    assert recording.count == 3
    expected, none = take_steps(record=False)
    assert none is None
    assert recorded == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("problem", [RuntimeError("not permitted\nmore"), torch.OutOfMemoryError("no room")])
def test_a_step_that_cannot_be_recorded_runs_without_a_graph(take_steps, monkeypatch, problem):
    def fail(*_):
        raise problem

    monkeypatch.setattr(step, "RecordedStep", fail)
    with pytest.warns(CudaGraphWarning, match=r"not permitted|no room"):
        losses, _ = take_steps(record=True)
    assert losses == take_steps(record=False)[0]


@pytest.mark.parametrize(("record", "free", "is_kept"), [(True, 10, True), (None, 26, True), (None, 24, False)])
def test_a_recording_leaves_memory_free_unless_it_was_requested(take_steps, monkeypatch, record, free, is_kept):
    monkeypatch.setattr(step, "RecordedStep", PlayedStep)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    with nullcontext() if is_kept else pytest.warns(CudaGraphWarning, match="24%"):
        _, recording = take_steps(record=record)
    assert (recording is not None) == is_kept


@needs_gpu
@pytest.mark.parametrize("kind", ["delta", "gated_delta", "dpfp-sum", "attention", "ttt-linear"])
def test_on_a_gpu_recorded_steps_are_the_same_steps(tmp_path, kind):
    model = {**TINY, "dropout": 0.0}  # a graph draws other random numbers
    changes = {"steps": 12, "device": "cuda", "precision": "float32", "layers": kind, "model": model}
    run = config(corpus(tmp_path), **changes)
    plain = train(config(run.data.source, record=False, **changes), tmp_path / "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CudaGraphWarning)
        recorded = train(config(run.data.source, record=True, **changes), tmp_path / "recorded")
    torch.testing.assert_close(losses(recorded.folder), losses(plain.folder), rtol=1e-3, atol=0.0)
