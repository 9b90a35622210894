"""CUDA graphs: after one that could not be recorded random numbers are drawn as if nobody had tried."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from rebind.cuda_graphs import captured

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class _Generator:
    """Torch's, as much as `captured` has to do with: a capture that fails leaves it taking the capture to go on."""

    def __init__(self, device) -> None:
        self.device, self.state = device, {"next": 0, "capturing": False}

    def get_state(self):
        return self.state["next"]

    def set_state(self, numbers) -> None:
        self.state["next"] = numbers

    def graphsafe_get_state(self):
        return self

    def graphsafe_set_state(self, other) -> None:
        self.state = other.state


@pytest.fixture
def generator(monkeypatch):
    made = _Generator("cuda:0")
    made.set_state(7)

    @contextmanager
    def graph(_):
        made.state["capturing"] = True
        yield
        made.state["capturing"] = False

    monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch, "Generator", _Generator)
    return made


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_capture_that_fails_leaves_the_generator_as_it_was(generator, problem):
    def fails():
        generator.state["next"] = 11
        raise problem

    with pytest.raises(problem), captured(None):
        fails()
    assert generator.state == {"next": 7, "capturing": False}


def test_a_capture_that_succeeds_leaves_it_alone(generator):
    own = generator.state
    with captured(None):
        pass
    assert generator.state is own


@needs_gpu
def test_on_a_gpu_random_numbers_go_on():
    torch.manual_seed(0)
    torch.randn(4, device="cuda")
    expected = torch.randn(4, device="cuda")
    torch.manual_seed(0)
    x = torch.randn(4, device="cuda")
    with pytest.raises(RuntimeError), captured(torch.cuda.CUDAGraph()):
        float(torch.rand_like(x).sum())
    torch.cuda.synchronize()
    assert torch.equal(torch.randn(4, device="cuda"), expected)
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        drawn = torch.rand_like(x)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)
