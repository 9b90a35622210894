"""What a measurement was made on, and what it took of memory."""

from __future__ import annotations

import importlib
import os
import platform
import threading
from pathlib import Path

import torch

MIB = 2**20


def machine(*packages: str) -> dict[str, str | int]:
    """Processor, cores, threads, GPU and versions; `packages` are further ones whose versions matter."""
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
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class Peak:
    """Watches this process's resident memory from a second thread; 0 where /proc is missing."""

    def __enter__(self) -> Peak:
        self._before = self._highest = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.mib = (self._highest - self._before) / MIB

    def _watch(self) -> None:
        while not self._stop.wait(0.0005):
            self._highest = max(self._highest, _resident())


def _resident() -> int:
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0
