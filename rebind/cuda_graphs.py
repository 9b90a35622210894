"""CUDA graphs: kernels that were launched once, one by one, and are replayed with one call.

Many steps take a host longer to launch than a GPU to compute. What is recorded must find its inputs in the
same tensors every time, and must not look at a value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

from rebind.errors import CudaGraphWarning

Made = TypeVar("Made")


def replay_of(call: Callable[[], object], *, warm: int = 1) -> Callable[[], object]:
    """The call as a graph, after so many runs that compile and set up what must not be in it."""
    here, aside = torch.cuda.current_stream(), _aside()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(warm):
            call()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        call()
    return graph.replay


@contextmanager
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """What is launched here goes into the graph; where that fails, random numbers can still be drawn afterwards.

    Before torch 2.13 the generator of a capture that failed takes it to go on, and refuses to draw: it gets a new state
    with the numbers that were next.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.get_state()
    try:
        with torch.cuda.graph(graph):
            yield
    except BaseException:
        renewed = torch.Generator(generator.device)
        renewed.set_state(before)
        generator.graphsafe_set_state(renewed.graphsafe_get_state())
        raise


def or_none(make: Callable[[], Made], what: str) -> Made | None:
    """A recording, or None, with a warning that `what` goes on without, where code does what a graph does not hold."""
    try:
        return make()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as problem:
        torch.cuda.synchronize()
        warnings.warn(
            f"{what} cannot be recorded as a CUDA graph ({str(problem).splitlines()[0]}): it goes on without, slower",
            CudaGraphWarning,
            stacklevel=3,
        )
        return None


@cache
def _aside() -> torch.cuda.Stream:
    """One stream for all: each would keep a workspace of cuBLAS."""
    return torch.cuda.Stream()
