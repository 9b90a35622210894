"""CUDA graphs: after a failed recording, random numbers continue as if it had not been tried."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from rebind.cuda_graphs import capture_graph

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class _Generator:
    """What `capture_graph` uses of torch's generator, which believes that a failed capture goes on."""

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
    generator = _Generator("cuda:0")
    generator.set_state(7)

    @contextmanager
    def graph(_):
        generator.state["capturing"] = True
        yield
        generator.state["capturing"] = False

    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch, "Generator", _Generator)
    return generator


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_capture_that_fails_leaves_the_generator_as_it_was(generator, problem):
    def fails():
        generator.state["next"] = 11
        raise problem

    with pytest.raises(problem), capture_graph(None):
        fails()
    assert generator.state == {"next": 7, "capturing": False}


def test_a_capture_that_succeeds_leaves_it_alone(generator):
    own = generator.state
    with capture_graph(None):
        pass
    assert generator.state is own


@needs_gpu
def test_on_a_gpu_random_numbers_go_on():
    torch.manual_seed(0)
    torch.randn(4, device="cuda")
    expected = torch.randn(4, device="cuda")
    torch.manual_seed(0)
    x = torch.randn(4, device="cuda")
    with pytest.raises(RuntimeError), capture_graph(torch.cuda.CUDAGraph()):
        float(torch.rand_like(x).sum())
    torch.cuda.synchronize()
    assert torch.equal(torch.randn(4, device="cuda"), expected)
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph):
        drawn = torch.rand_like(x)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)
