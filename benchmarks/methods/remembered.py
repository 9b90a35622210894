"""What an editor finds out again and again, remembered: targets and tokens of facts that many edits write.

A driver that writes the same facts with many methods, alone and together, would spend nearly all of its time on
searches whose results it has had before. On the base model a fact's target depends on nothing but the fact, the layer
and the settings, so all facts that will ever be wanted of one (layer, settings) are found in one search, when the first
of them is asked for. `Memory.of(editor)` puts both in an editor's way; what is written stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.targets import FactPrompts, TargetSettings, TargetStates
from rebind.edit.targets.kept import SubjectPrompts


class Targets:
    """A search that looks up what it has found before, and finds in one go what was planned."""

    def __init__(self, search: Any) -> None:
        self.search = search
        self.searched = 0  # facts
        self._planned: dict[tuple[int, TargetSettings], dict[FactPrompts, None]] = {}
        self._places: dict[tuple[int, TargetSettings], dict[FactPrompts, int]] = {}
        self._found: dict[tuple[int, TargetSettings], TargetStates] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self.search.dtype

    def plan(self, layer: int, settings: TargetSettings, requests: Iterable[FactPrompts]) -> None:
        """These will be asked for: they are found with the first that is."""
        self._planned.setdefault((layer, settings), {}).update(dict.fromkeys(requests))

    def find(self, layer: int, requests: Sequence[FactPrompts], settings: TargetSettings, *rest: Any) -> TargetStates:
        of = layer, settings
        places = self._places.setdefault(of, {})
        if any(request not in places for request in requests):
            wanted = dict.fromkeys([*requests, *self._planned.pop(of, {})])
            missing = [request for request in wanted if request not in places]
            new = self.search.find(layer, missing, settings, *rest)
            places |= {request: len(places) + index for index, request in enumerate(missing)}
            self._found[of] = TargetStates.concatenate([self._found[of], new]) if of in self._found else new
            self.searched += len(missing)
        found = self._found[of]
        return found.select(torch.tensor([places[request] for request in requests], device=found.states.device))


class Requests:
    """Facts as tokens in every framing; each is tokenised once, with what is kept about its subject at that time."""

    def __init__(self, make: Callable[..., list[FactPrompts]]) -> None:
        self.make = make
        self._made: dict[Fact, FactPrompts] = {}

    def __call__(
        self, facts: Sequence[Fact], about: Sequence[SubjectPrompts] | None = None, *, keep: bool = True
    ) -> list[FactPrompts]:
        kept = dict(zip(facts, [None] * len(facts) if about is None else about, strict=True))
        missing = [fact for fact in kept if fact not in self._made]
        if missing:
            known = [one for fact in missing if (one := kept[fact]) is not None]
            self._made.update(zip(missing, self.make(missing, known or None, keep=keep), strict=True))
        return [self._made[fact] for fact in facts]


@dataclass(frozen=True, eq=False)
class Memory:
    """Both, of one editor."""

    targets: Targets
    requests: Requests

    @classmethod
    def of(cls, editor: Editor) -> Memory:
        made = cls(Targets(editor.target_search), Requests(editor.fact_prompts))
        editor.target_search = made.targets  # type: ignore[assignment]
        editor.fact_prompts = made.requests  # type: ignore[method-assign]
        return made
