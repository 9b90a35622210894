"""What an editor finds out again and again, remembered: targets, tokens and weights of facts that many edits write.

A driver that writes the same facts with many methods, alone and together, would spend nearly all of its time on
searches whose results it has had before. On the base model a fact's target depends on nothing but the fact, the layer
and the settings, so all facts that will ever be wanted of one (layer, settings) are found in one search, when the first
of them is asked for. `Memory.of(editor)` puts all three in an editor's way; what is written stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rebind.edit.editor import Editor
from rebind.edit.edits import Edit, fold
from rebind.edit.facts import Fact
from rebind.edit.objective import Request, TargetSettings
from rebind.edit.targets import Found
from rebind.edit.weights import Weights
from rebind.memory.precision import solving_dtype


class Targets:
    """A search that looks up what it has found before, and finds in one go what was planned."""

    def __init__(self, search: Any) -> None:
        self.search = search
        self.searched = 0  # facts
        self._planned: dict[tuple[int, TargetSettings], dict[Request, None]] = {}
        self._places: dict[tuple[int, TargetSettings], dict[Request, int]] = {}
        self._found: dict[tuple[int, TargetSettings], Found] = {}

    def plan(self, layer: int, settings: TargetSettings, requests: Iterable[Request]) -> None:
        """These will be asked for: they are found with the first that is."""
        self._planned.setdefault((layer, settings), {}).update(dict.fromkeys(requests))

    def find(self, layer: int, requests: Sequence[Request], settings: TargetSettings, *rest: Any) -> Found:
        of = layer, settings
        places = self._places.setdefault(of, {})
        if any(request not in places for request in requests):
            wanted = dict.fromkeys([*requests, *self._planned.pop(of, {})])
            missing = [request for request in wanted if request not in places]
            new = self.search.find(layer, missing, settings, *rest)
            places |= {request: len(places) + index for index, request in enumerate(missing)}
            self._found[of] = Found.join([self._found[of], new]) if of in self._found else new
            self.searched += len(missing)
        found = self._found[of]
        return found.select(torch.tensor([places[request] for request in requests], device=found.hidden.device))


class Requests:
    """Facts as tokens behind every context; each is tokenised once."""

    def __init__(self, make: Callable[[Sequence[Fact]], list[Request]]) -> None:
        self.make = make
        self._made: dict[Fact, Request] = {}

    def __call__(self, facts: Sequence[Fact]) -> list[Request]:
        missing = [fact for fact in dict.fromkeys(facts) if fact not in self._made]
        if missing:
            self._made.update(zip(missing, self.make(missing), strict=True))
        return [self._made[fact] for fact in facts]


class Folds:
    """The weights after some edits, begun where the fold before ended when its edits are the first of these.

    A ledger is folded from the base at every edit, and gains that depend on earlier edits are solved for again each
    time. That is quadratic in the edits of a sequence; the sum is the same one, in the same order and in float64.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._before: tuple[Edit, ...] = ()
        self._after: dict[str, Tensor] = {}  # each site's weights after them

    def __call__(self, edits: Sequence[Edit]) -> dict[str, Tensor]:
        if not edits:  # an edit is solved for on the base, and folded behind the others after that
            return Weights.folded(self.weights, edits)
        self.weights.remember([site for edit in edits for site in edit.sites])
        self.weights._learn_for(edits)
        if not _begins(edits, self._before):
            self.forget()
        before, new = self._before, edits[len(self._before) :]
        for name, base in self.weights.base.items():
            so_far = self._after.get(name, base.to(solving_dtype(base)))
            self._after[name] = fold(so_far, name, new, self._gain(name, before))
        self._before = tuple(edits)
        return {name: after.to(self.weights.base[name].dtype, copy=True) for name, after in self._after.items()}

    def forget(self) -> None:
        self._before, self._after = (), {}

    def _gain(self, site: str, before: Sequence[Edit]) -> Callable[[Edit, Sequence[Edit]], Tensor]:
        own, there = self.weights.gain_at(site), [edit for edit in before if site in edit.sites]
        return lambda edit, earlier: own(edit, (*there, *earlier))


def _begins(edits: Sequence[Edit], with_these: Sequence[Edit]) -> bool:
    return [_told(edit) for edit in edits[: len(with_these)]] == [_told(edit) for edit in with_these]


def _told(edit: Edit) -> tuple[object, ...]:
    """What tells edits apart, tried ones and those the ledger holds: no two groups of facts begin with the same."""
    return edit.method, edit.settings["lam"], len(edit.facts), edit.facts[0].text


@dataclass(frozen=True, eq=False)
class Memory:
    """All three, of one editor."""

    targets: Targets
    requests: Requests
    folds: Folds

    @classmethod
    def of(cls, editor: Editor) -> Memory:
        made = cls(Targets(editor._search), Requests(editor._requests), Folds(editor.weights))
        editor._search = made.targets  # type: ignore[assignment]
        editor._requests = made.requests  # type: ignore[method-assign]
        editor.weights.folded = made.folds  # type: ignore[method-assign]
        return made
