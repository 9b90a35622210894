"""Time, memory, and what this machine is and can do."""

from __future__ import annotations

import importlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

import torch

from rebind.cuda_graphs import record_graph

FEWEST = 3  # rounds
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    elif device.startswith("mps"):
        torch.mps.synchronize()


def timed(call: Callable[[], object], device: str, inner: int = 1) -> float:
    """Return milliseconds per call.

    On a CPU with one thread it is processor time, which other programs do not lengthen: on a quiet machine it equals
    wall time.
    """
    wait(device)
    if device.startswith("cuda"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / inner
    now = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    begin = now()
    for _ in range(inner):
        call()
    wait(device)
    return 1e3 * (now() - begin) / inner


def clocked(call: Callable[[], Result], device: str) -> tuple[float, Result]:
    """Return the seconds of one call, and what it returned."""
    wait(device)
    begin = time.perf_counter()
    result = call()
    wait(device)
    return time.perf_counter() - begin, result


def try_to_record(call: Callable[[], object], device: str) -> Callable[[], object] | None:
    """Return the call as a CUDA graph, its kernels with no Python between them; None if it cannot be recorded."""
    if not device.startswith("cuda"):
        return None
    try:
        return record_graph(call)
    except Exception:  # other libraries may do anything that cannot be recorded
        torch.cuda.synchronize()
        return None


def race(calls: dict[Key, Callable[[], object]], device: str, rounds: int, seconds: float) -> dict[Key, float]:
    """Return the median milliseconds of every call, for at most `rounds` rounds and about `seconds` in all.

    Every round times all of the calls, so that a change in the machine's load affects them alike; short calls are
    repeated within a round.
    """
    once = {key: min(timed(call, device) for _ in range(2)) for key, call in calls.items()}
    window = 100 if device == "cpu" else 5  # ms per timing
    inner = {key: max(1, min(20, int(window / max(ms, 1e-3)))) for key, ms in once.items()}
    total = sum(once[key] * inner[key] for key in calls) / 1e3
    rounds = max(FEWEST, min(rounds, int(seconds / max(total, 1e-6))))
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(timed(call, device, inner[key]))
    return {key: statistics.median(ms) for key, ms in times.items()}


def measure_rates(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Return how fast this machine copies ("io", bytes per second) and multiplies ("flop", FLOPs per second)."""
    size, n = (2**26, 1024) if device == "cpu" else (2**29, 8192)
    x = torch.empty(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copy = min(timed(lambda: y.copy_(x), device) for _ in range(10))
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = min(timed(lambda: a @ b, device) for _ in range(10))
    return {"io": 2 * size / copy * 1e3, "flop": 2 * n**3 / product * 1e3}


def peak_of_call(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return by how many MiB a call raises this process's resident memory, and its result; 0 where it is not Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the highest size so far is forgotten
    except OSError:
        return 0.0, call()
    before = _highest_kib()
    result = call()
    return (_highest_kib() - before) / 1024, result


def _highest_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def machine(*packages: str) -> dict[str, str | int]:
    """Describe processor, cores, threads, GPU and versions; `packages` are further ones whose versions matter."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "rebind", *packages)},
    }


def _version(name: str) -> str:
    try:
        return str(importlib.import_module(name).__version__)
    except (ImportError, AttributeError):
        return "none"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
