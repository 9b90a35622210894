"""A speed-up, off and on: seconds of both, and how far their results lie apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A speed-up, off and on."""

    phase: str
    name: str  # what is done without it
    on: float  # seconds
    off: float
    difference: float  # relative, of the result

    @property
    def factor(self) -> float:
        return self.off / self.on


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Timer:
    """The quickest of some calls: the first loads kernels."""

    device: torch.device
    repeats: int = 1

    def __call__(self, call: Callable[[], Tensor], *, once: bool = False) -> tuple[float, Tensor]:
        seconds = []
        for _ in range(1 if once else self.repeats):
            self._wait()
            begin = time.perf_counter()
            result = call()
            self._wait()
            seconds.append(time.perf_counter() - begin)
        return min(seconds), result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
