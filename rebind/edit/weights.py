"""The weights of an edited model: always the fold of some edits over the base weights.

Nothing else is ever written to a site. So undoing an edit is folding again without it, and whatever is tried and
given up leaves the same bytes as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rebind.edit.drift import growths
from rebind.edit.edits import Edit, fold
from rebind.edit.log import JSON
from rebind.edit.methods import Old, get_method
from rebind.edit.sites import memory_of, module_at, write_memory
from rebind.edit.spread import Place, unchanged
from rebind.errors import InputError

Learn = Callable[[Sequence[Place]], Mapping[str, Tensor]]  # E[kkᵀ] of each place, on the model as it stands


class Weights:
    """The sites of a model that were touched: what they were, and what edits make of them.

    `learn` computes second moments of old keys; `origin` says what from. Methods that remember earlier edits need
    them whenever their edits are folded.
    """

    def __init__(self, model: Any, learn: Learn, origin: Callable[[], Mapping[str, JSON]]) -> None:
        self.model, self._learn, self._origin = model, learn, origin
        self.base: dict[str, Tensor] = {}  # what each touched site's weights were, as [d_v, d_k]
        self.old: dict[str, Old] = {}

    def apply(self, edits: Sequence[Edit]) -> None:
        """Write the fold of these edits into the model, or nothing at all."""
        for name, weights in self.folded(edits).items():
            write_memory(module_at(self.model, name), weights)

    def folded(self, edits: Sequence[Edit]) -> dict[str, Tensor]:
        """The weights of every touched site after these edits; raises what `apply` would, and changes nothing."""
        self.remember([site for edit in edits for site in edit.sites])
        self._learn_for(edits)
        return {name: fold(base, name, edits, self.gain_at(name)) for name, base in self.base.items()}

    def remember(self, sites: Sequence[str]) -> None:
        """Keep what the sites are now, if they were never touched before."""
        for name in sites:
            if name not in self.base:
                self.base[name] = memory_of(module_at(self.model, name)).detach().clone()

    def learn_old_keys(self, places: Sequence[Place]) -> None:
        """The old keys of these places, found on the base model whatever is written in it now."""
        missing = [place for place in places if place.name not in self.old]
        if not missing:
            return
        with unchanged([module_at(self.model, name) for name in self.base]):
            for name, base in self.base.items():
                write_memory(module_at(self.model, name), base)
            moments = self._learn(missing)
        for place in missing:
            self.old[place.name] = Old(moments[place.name].to(memory_of(place.module).device))

    def gain_at(self, site: str) -> Callable[[Edit, Sequence[Edit]], Tensor]:
        """An edit's gain at a site: as stored, or found again where it depends on the edits before it."""

        def gain(edit: Edit, earlier: Sequence[Edit]) -> Tensor:
            stored = edit.write(site)
            method = get_method(edit.method)
            if not method.remembers:
                return stored.gain
            keys = stored.keys.double().to(self.old[site].moment.device)
            lam = float(edit.settings["lam"])  # type: ignore[arg-type]
            return method.gain(keys, self.old[site], lam, keys_of(earlier, site, keys)).float()

        return gain

    def growth(self) -> dict[str, float]:
        """‖W' − W‖ / ‖W‖ of every touched site, as the model stands."""
        return growths(self.base, {name: memory_of(module_at(self.model, name)) for name in self.base})

    def _learn_for(self, edits: Sequence[Edit]) -> None:
        """Moments that the gains of these edits need."""
        mine = dict(self._origin())
        sites = dict[str, None]()
        for edit in edits:
            if get_method(edit.method).remembers:
                if edit.settings["moments"] != mine:
                    raise InputError(
                        f"edit {edit.id or '(new)'} was solved with moments of {edit.settings['moments']}, this editor "
                        f"has {mine}: open it with that corpus and moment_tokens"
                    )
                sites |= dict.fromkeys(edit.sites)
        self.learn_old_keys([Place(name, 0, module_at(self.model, name)) for name in sites])


def keys_of(edits: Sequence[Edit], site: str, like: Tensor) -> Tensor:
    """The keys that edits wrote at a site, [m, d_k]."""
    rows = [edit.write(site).keys.to(like) for edit in edits if site in edit.sites]
    return torch.cat(rows) if rows else like.new_zeros(0, like.shape[-1])
