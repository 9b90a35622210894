"""A CUDA graph played on a CPU, for the tests of what is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def played(touched: Callable[[], list[Tensor]], recordings: Callable[[], Iterable], seen: Counter) -> type:
    """A class to put in CUDAGraph's place: what is captured has no effect on `touched`, a replay is the step again.

    `recordings` are those that may hold the graph; `seen` counts what was "recorded" and "replayed".
    """

    class Graph:
        def capture_begin(self, pool=None):
            self.held = [(tensor, tensor.detach().clone()) for tensor in touched()]

        def capture_end(self):
            seen["recorded"] += 1
            with torch.no_grad():
                for tensor, before in self.held:
                    tensor.copy_(before)

        def replay(self):
            seen["replayed"] += 1
            next(one for one in recordings() if one.graph is self).step()

        def reset(self):
            pass

    return Graph
