"""Steps recorded as CUDA graphs: hundreds of small kernels that the host starts with one call.

A recording plays on the stream and in the memory it was made in. A `Place` has both, for one recording after another:
what an earlier one leaves is used again by the next, without asking the device for memory and without giving it back,
both of which wait for everything that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Place:
    """A stream and graph memory. What is played here runs in turn, so all recordings may share the memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._anchor: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = None

    def memory(self) -> Any:
        """The handle of the graph memory, with this place's stream the current one.

        A pool that no graph uses any more cannot be used again, so a recording of one kernel holds on to it.
        """
        if self._anchor is None:
            graph, touched = torch.cuda.CUDAGraph(), torch.zeros(1, device=self.device)
            graph.capture_begin()
            touched.zero_()
            graph.capture_end()
            self._anchor = graph, touched
        return self._anchor[0].pool()

    def release(self) -> None:
        """Let go of the graph memory, to be called when nothing is recorded here; `empty_cache` then gives it back."""
        if self._anchor is not None:
            self._anchor[0].reset()
            self._anchor = None


class Recorded:
    """A step at a place, run as it is at first and then recorded and replayed.

    It must find its inputs in the same tensors every time and change tensors in place; it must not look at a value.
    """

    def __init__(self, step: Callable[[], None], place: Place, plain: int = 1) -> None:
        self.step, self.place = step, place
        self.plain = plain  # runs before it is recorded: they set up what a graph must find in place
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, count: int = 1) -> None:
        """With the place's stream the current one."""
        for _ in range(count):
            if self.plain:
                self.plain -= 1
                self.step()
                continue
            if self.graph is None:
                self.graph = self._record()
            self.graph.replay()

    def forget(self) -> None:
        """Give up the recording, once nothing of it is running."""
        if self.graph is not None:
            self.graph.reset()
            self.graph = None

    def _record(self) -> torch.cuda.CUDAGraph:
        graph, memory = torch.cuda.CUDAGraph(), self.place.memory()
        # torch.cuda.graph() would wait for the device and collect garbage first, with every other stream idle
        graph.capture_begin(pool=memory)
        try:
            self.step()
        finally:
            graph.capture_end()
        return graph
