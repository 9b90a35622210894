"""Recorded training steps. What needs no GPU: when they are refused, and what the loop does with one."""

from __future__ import annotations

import warnings

import pytest
import torch

from rebind.errors import CudaGraphWarning, InputError
from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.training import loop, train, updates
from rebind.nn.training import recorded as recorded_module
from rebind.nn.training.processes import Processes
from rebind.nn.training.recorded import WARM
from tests.nn.training_runs import TINY, config, corpus

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("changes", [{}, {"carry": True}, {"compile": True}, {"sharded": True}, {"accumulate": 2}])
def test_what_cannot_be_recorded_is_refused(tmp_path, changes):
    device = {} if not changes else {"device": "cuda"}
    with pytest.raises(InputError, match="record"):
        config(corpus(tmp_path), record=True, **device, **changes)


@pytest.mark.parametrize(
    ("changes", "fits", "records"),
    [
        ({"device": "cuda"}, True, True),
        ({"device": "cuda"}, False, False),
        ({"device": "cuda", "record": True}, False, True),
        ({"device": "cuda", "record": False}, True, False),
        ({"device": "cuda", "carry": True}, True, False),
        ({}, True, False),
    ],
)
def test_models_up_to_a_size_are_recorded_unasked(tmp_path, monkeypatch, changes, fits, records):
    model = RebindForCausalLM(RebindConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    monkeypatch.setattr(updates, "LARGEST", model.num_parameters() - (not fits))
    alone = Processes(0, 1, torch.device("cpu"))
    made = updates.Updates(config(corpus(tmp_path), **changes), alone, model, torch.optim.SGD(model.parameters()), 1)
    assert made.records == records


class _Played:
    """A recorded step as the loop sees it, played on the CPU."""

    def __init__(self, loss_of, parameters, clip, inputs, targets) -> None:
        assert all(parameter.grad is None for parameter in parameters)
        self.loss_of, self.parameters, self.clip, self.played = loss_of, parameters, clip, 0

    def __call__(self, inputs, targets):
        self.played += 1
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.loss_of(inputs, targets)
        loss.backward()
        return loss.detach(), torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)


def test_the_loop_makes_the_same_steps(tmp_path, monkeypatch):
    """Some eagerly, the others from the recording; killed and resumed or not."""
    text = corpus(tmp_path)
    plain = train(config(text, steps=8), tmp_path / "plain")
    made = []
    monkeypatch.setattr(updates, "record", lambda *given, asked: made.append(1) or _Played(*given))
    monkeypatch.setattr(loop.TrainConfig, "require_recordable", lambda *given: None)
    found = train(config(text, steps=8, record=True), tmp_path / "recorded")
    assert made == [1]
    for one, true in zip(_losses(found), _losses(plain), strict=True):
        assert one == pytest.approx(true, rel=1e-6)


def test_a_step_that_cannot_be_recorded_is_made_all_the_same(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(recorded_module, "RecordedStep", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(loop.TrainConfig, "require_recordable", lambda *given: None)
    with pytest.warns(CudaGraphWarning, match="not permitted"):
        found = train(config(corpus(tmp_path), steps=WARM + 3, record=True), tmp_path / "run")
    assert len(_losses(found)) == WARM + 3


@pytest.mark.parametrize("asked", [True, None])
def test_without_memory_for_a_recording_unasked_steps_are_made(tmp_path, monkeypatch, asked):
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(recorded_module, "RecordedStep", fails)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(loop.TrainConfig, "require_recordable", lambda *given: None)
    run = config(corpus(tmp_path), steps=WARM + 3, record=asked)
    if asked:
        with pytest.raises(torch.OutOfMemoryError):
            train(run, tmp_path / "run")
    else:
        with pytest.warns(CudaGraphWarning, match="too little memory"):
            found = train(run, tmp_path / "run")
        assert len(_losses(found)) == WARM + 3


@pytest.mark.parametrize(("asked", "free", "kept"), [(True, 10, True), (None, 26, True), (None, 24, False)])
def test_an_unasked_recording_leaves_memory_to_others(tmp_path, monkeypatch, asked, free, kept):
    made = []
    monkeypatch.setattr(recorded_module, "RecordedStep", lambda *given: made.append(_Played(*given)) or made[-1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    monkeypatch.setattr(loop.TrainConfig, "require_recordable", lambda *given: None)
    run = config(corpus(tmp_path), steps=WARM + 3, record=asked)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = train(run, tmp_path / "run")
    assert len(_losses(found)) == WARM + 3
    assert len(made) == 1
    assert made[0].played == (3 if kept else 0)
    assert any("too little memory" in str(one.message) for one in told) != kept


@needs_gpu
@pytest.mark.parametrize("kind", ["delta", "gated_delta", "dpfp-sum", "attention", "ttt-linear"])
def test_on_a_gpu_recorded_steps_are_the_steps(tmp_path, kind):
    text = corpus(tmp_path)
    settings = {"steps": 12, "device": "cuda", "precision": "float32", "layers": kind}
    settings["model"] = {**TINY, "dropout": 0.0}  # a graph draws other random numbers
    plain = train(config(text, record=False, **settings), tmp_path / "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CudaGraphWarning)
        found = train(config(text, record=True, **settings), tmp_path / "recorded")
    for one, true in zip(_losses(found), _losses(plain), strict=True):
        assert one == pytest.approx(true, rel=1e-3)


def _losses(result) -> list[float]:
    return [row["loss"] for row in loop.Log(result.folder / loop.LOG).rows() if "loss" in row]
