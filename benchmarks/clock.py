"""Where the seconds of an edit go, by phase, and how much memory it takes."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from rebind.edit import drafts
from rebind.edit.dense import draft as dense_drafts
from rebind.edit.editor import Editor
from rebind.edit.progress import Progress
from rebind.edit.solve import SubjectStates
from rebind.models.prompts import Prompt
from rebind.models.scoring import FactScore
from rebind.models.sites import Site


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

    class Timed(SubjectStates):
        def keys(self, site: Site) -> Tensor:
            with clock.aside("keys"):
                return super().keys(site)

        def states_after(self, layer: int) -> Tensor:
            with clock.aside("keys"):
                return super().states_after(layer)

    model = editor.edited.model
    own = model.score

    def score(prompts: Sequence[Prompt]) -> list[FactScore]:
        with clock.aside("checks"):
            return own(prompts)

    with (
        patch.object(drafts, "SubjectStates", Timed),
        patch.object(dense_drafts, "SubjectStates", Timed),
        patch.object(model, "score", score),
    ):
        yield


def peak_gib(editor: Editor) -> float:
    """Of the GPU since it was last reset, or of this process since it began."""
    if editor.language_model.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
