"""Time, and the rates that set its floors."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from rebind.bench.contenders import Shape
from rebind.cuda_graphs import replay_of

CHUNK = 64  # of the floors: the chunk size that GPU kernels use
FEWEST = 3  # rounds
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    elif device.startswith("mps"):
        torch.mps.synchronize()


def alone(device: str) -> bool:
    """Whether one thread does it all."""
    return device == "cpu" and torch.get_num_threads() == 1


def timed(call: Callable[[], object], device: str, inner: int = 1) -> float:
    """Milliseconds a call.

    With one thread on a CPU it is the processor's time, which other programs do not lengthen: on a quiet machine the
    same as the wall's.
    """
    wait(device)
    if not device.startswith("cuda"):
        now = time.process_time if alone(device) else time.perf_counter
        begin = now()
        for _ in range(inner):
            call()
        wait(device)
        return 1e3 * (now() - begin) / inner
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(inner):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / inner


def recorded(call: Callable[[], object], device: str) -> Callable[[], object] | None:
    """The call as a CUDA graph, its kernels with no Python between them; None where there is no recording it."""
    if not device.startswith("cuda"):
        return None
    try:
        return replay_of(call)
    except Exception:  # whatever a peer may do that cannot be recorded
        torch.cuda.synchronize()
        return None


def clocked(call: Callable[[], Result], device: str) -> tuple[float, Result]:
    """Seconds of one call, and what it returned."""
    wait(device)
    begin = time.perf_counter()
    result = call()
    wait(device)
    return time.perf_counter() - begin, result


class Others:
    """Watches what other programs take of the CPU; where /proc is missing, nothing."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.perf_counter(), _busy(), time.process_time()

    @property
    def disturb(self) -> bool:
        """Whether they have taken more than a tenth of a core, or so: the kernel counts in hundredths of a second."""
        wall, taken = time.perf_counter() - self._wall, _busy() - self._busy - (time.process_time() - self._own)
        return taken > 0.02 + 0.1 * wall


def _busy() -> float:
    """Seconds that all cores have worked since the machine started."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0
    user, nice, system, _, _, *interrupts = (float(x) for x in path.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Race(Generic[Key]):
    """Medians in milliseconds, and whether other programs left the machine alone meanwhile."""

    medians: dict[Key, float]
    calm: bool


def race(calls: dict[Key, Callable[[], object]], device: str, rounds: int, budget: float) -> Race[Key]:
    """Time all of the calls in every round; short calls are repeated within one.

    A change in the machine's load so meets all alike. With several threads of a CPU, timings in which other programs
    took part are left out and made again once they are still, for up to three times `budget`, about how many seconds
    it may take.
    """
    once = {key: min(timed(call, device) for _ in range(2)) for key, call in calls.items()}
    window = 100 if device == "cpu" else 5  # ms: long enough to see what others do
    inner = {key: max(1, min(20, int(window / max(ms, 1e-3)))) for key, ms in once.items()}
    total = sum(once[key] * inner[key] for key in calls) / 1e3
    rounds = max(FEWEST, min(rounds, int(budget / max(total, 1e-6))))
    calm: dict[Key, list[float]] = {key: [] for key in calls}
    disturbed: dict[Key, list[float]] = {key: [] for key in calls}
    end = time.perf_counter() + 3 * max(budget, FEWEST * total)
    while missing := [key for key in calls if len(calm[key]) < rounds]:
        for key in missing:
            others = Others()
            ms = timed(calls[key], device, inner[key])
            if device != "cpu" or alone(device) or not others.disturb:
                calm[key].append(ms)
            else:
                disturbed[key].append(ms)
                _until_still(end)
        if time.perf_counter() > end and all(len(calm[key]) + len(disturbed[key]) >= FEWEST for key in calls):
            break
    enough = all(len(found) >= FEWEST for found in calm.values())
    kept = calm if enough else {key: calm[key] + disturbed[key] for key in calls}
    return Race({key: statistics.median(found) for key, found in kept.items()}, enough)


def _until_still(end: float) -> None:
    """Sleep until other programs do, or it is too late."""
    while time.perf_counter() < end:
        others = Others()
        time.sleep(0.2)
        if not others.disturb:
            return


@dataclass(frozen=True)
class Rates:
    """What this machine can do."""

    bytes_a_s: float
    flops_a_s: float

    @classmethod
    def of(cls, device: str, dtype: torch.dtype) -> Rates:
        big = device != "cpu"
        size, n = (2**29, 8192) if big else (2**26, 1024)
        x = torch.empty(size, dtype=torch.uint8, device=device)
        y = torch.empty_like(x)
        copy = min(timed(lambda: y.copy_(x), device) for _ in range(10))
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        product = min(timed(lambda: a @ b, device) for _ in range(10))
        return cls(2 * size / copy * 1e3, 2 * n**3 / product * 1e3)


@dataclass(frozen=True)
class Floors:
    """What the chunk form cannot do without, forward and for both passes: docs/scan.md counts it."""

    bytes_forward: float
    bytes_both: float
    flops_forward: float
    flops_both: float

    @classmethod
    def of(cls, shape: Shape, rule: str, dtype: torch.dtype) -> Floors:
        """Bytes: q, k, v and the coefficients read and the output written; backward, those and the output's
        cotangent read and the gradients written. FLOPs: products counted one by one."""
        b, t, h, d = shape
        numbers = {"gated delta": 2, "delta": 1, "sum": 0, "softmax": 0}[rule]
        row = d * torch.empty(0, dtype=dtype).element_size()
        moved, moved_back = 4 * row + 4 * numbers, 7 * row + 8 * numbers
        if rule == "softmax":
            work, work_back = 2 * t * d, 5 * t * d
        elif rule == "sum":
            work, work_back = 2 * (2 * CHUNK * d + 2 * d * d), 2 * (5 * CHUNK * d + 4 * d * d)
        else:
            work = 2 * (4 * CHUNK * d + 3 * d * d + CHUNK**2 // 3)
            work_back = 2 * (10 * CHUNK * d + 7 * d * d)
        count = b * t * h
        return cls(count * moved, count * (moved + moved_back), count * work, count * (work + work_back))
