"""How an editor reports the progress of its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Functions that an editor calls while it works, for example to draw a progress bar; by default they do nothing."""

    phase: Callable[[str], None] = lambda name: None
    moments: Callable[[int, int], None] = lambda done, total: None  # tokens
    targets: Callable[[int, int, float], None] = lambda step, done, loss: None  # step, finished facts, mean loss
