"""CUDA graphs: kernels that were launched once, one by one, and are replayed with one call.

Many steps take a host longer to launch than a GPU to compute. What is recorded must find its inputs in the same tensors
every time, and must not depend on values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

from rebind.errors import CudaGraphWarning

Recording = TypeVar("Recording")


def record_graph(call: Callable[[], object], *, warm_up: int = 1) -> Callable[[], object]:
    """Record a call as a CUDA graph and return its replay.

    The call runs `warm_up` times before: that compiles and allocates what must not be part of the graph.
    """
    here, side = torch.cuda.current_stream(), _side_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            call()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph):
        call()
    return graph.replay


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Put what is launched here into the graph. If that fails, random numbers can still be drawn afterwards.

    Before torch 2.13 a generator believes that a failed capture goes on, and refuses to draw: it gets a new state, from
    which the same numbers follow.
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


def record_or_warn(record: Callable[[], Recording], what: str) -> Recording | None:
    """Return a recording, or None with a warning that `what` runs without one, if a graph cannot hold what it does."""
    try:
        return record()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as problem:
        torch.cuda.synchronize()
        reason = str(problem).splitlines()[0]
        warnings.warn(
            f"{what} cannot be recorded as a CUDA graph ({reason}) and runs without one, slower",
            CudaGraphWarning,
            stacklevel=3,
        )
        return None


@cache
def _side_stream() -> torch.cuda.Stream:
    """Return one stream for all recordings: each stream would keep a workspace of cuBLAS."""
    return torch.cuda.Stream()
