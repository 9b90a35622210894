"""How an editor reports the progress of its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Functions that an editor calls to report progress, for example to a progress bar; by default they do nothing."""

    phase: Callable[[str], None] = lambda name: None  # the name of the phase that begins
    moments: Callable[[int, int], None] = lambda done, total: None  # tokens read, tokens to read
    targets: Callable[[int, int, float], None] = lambda step, finished, loss: None  # step, finished facts, mean loss
