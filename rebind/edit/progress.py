"""What an editor tells of its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Called as the work goes on; each may be replaced by something that draws a bar."""

    phase: Callable[[str], None] = lambda name: None
    moments: Callable[[int, int], None] = lambda done, wanted: None  # tokens
    targets: Callable[[int, int, float], None] = lambda step, done, loss: None  # step, facts done, mean loss
