"""Where the seconds of an edit go, by phase, and how much memory it takes."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.facts.scores import FactScore
from rebind.edit.progress import Progress
from rebind.edit.solve import layer_writes as spread
from rebind.edit.solve.subject_keys import Subjects


class Clock:
    """Adds up seconds by phase; `progress` is what to give to an editor."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.phase: str | None = None
        self.progress = Progress(phase=self.enter)
        self._begun = 0.0

    def enter(self, name: str | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.phase is not None:
            self.spent[self.phase] = self.spent.get(self.phase, 0.0) + now - self._begun
        self.phase, self._begun = name, now

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Inside, another phase; the one before goes on after."""
        before = self.phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)


@contextmanager
def told_apart(editor: Editor, clock: Clock) -> Iterator[None]:
    """The editor counts keys to the solve, and the facts' scores to what goes on; here they are phases."""

    class Timed(Subjects):
        def keys(self, layer: int, module: nn.Module) -> Tensor:
            with clock.aside("keys"):
                return super().keys(layer, module)

        def states(self, layer: int) -> Tensor:
            with clock.aside("keys"):
                return super().states(layer)

    own = editor.score

    def score(facts: Sequence[Fact]) -> list[FactScore]:
        with clock.aside("checks"):
            return own(facts)

    with patch.object(spread, "Subjects", Timed), patch.object(editor, "score", score):
        yield


def peak_gib(editor: Editor) -> float:
    """Of the GPU since it was last reset, or of this process since it began."""
    if editor.trunk.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
