"""The weights of an edited model: always the fold of some edits over the base weights.

Nothing else is ever written to a site. So undoing an edit is folding again without it, and whatever is tried and
given up leaves the same bytes as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rebind.edit.drift import growths
from rebind.edit.ledger.edit import Edit, Gain, settled, summed
from rebind.edit.ledger.log import JSON
from rebind.edit.methods import Old, get_method
from rebind.edit.solve.layer_writes import Place, unchanged
from rebind.errors import InputError
from rebind.memory.precision import solving_dtype
from rebind.models.sites import memory_of, module_at, write_memory

Learn = Callable[[Sequence[Place]], Mapping[str, Tensor]]  # E[kkᵀ] of each place, on the model as it stands
KEPT = 2**30  # bytes of sums that are kept from one fold to the next


@dataclass(frozen=True, eq=False)
class Begun:
    """Edits that were folded, and each site's weights after them, not yet rounded."""

    edits: tuple[Edit, ...] = ()
    sums: Mapping[str, Tensor] = field(default_factory=dict)

    def begins(self, edits: Sequence[Edit]) -> bool:
        """Whether these edits begin with them: the very same ones, as another ledger may have others of their names."""
        return len(self.edits) <= len(edits) and all(a is b for a, b in zip(self.edits, edits, strict=False))


class Weights:
    """The sites of a model that were touched: what they were, and what edits make of them.

    `learn` computes second moments of old keys; `origin` says what from. Methods that remember earlier edits need
    them whenever their edits are folded.
    """

    def __init__(self, model: Any, learn: Learn, origin: Callable[[], Mapping[str, JSON]]) -> None:
        self.model, self._learn, self._origin = model, learn, origin
        self.base: dict[str, Tensor] = {}  # what each touched site's weights were, as [d_v, d_k]
        self.old: dict[str, Old] = {}
        self._begun = Begun()

    def apply(self, edits: Sequence[Edit]) -> None:
        """Write the fold of these edits into the model, or nothing at all; an interrupt waits for the last site."""
        folded = self.folded(edits)
        try:
            self._write(folded)
        except BaseException:
            self._write(folded)  # some sites alone would be a model that no edits make
            raise

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, memory in weights.items():
            write_memory(module_at(self.model, name), memory)

    def folded(self, edits: Sequence[Edit]) -> dict[str, Tensor]:
        """The weights of every touched site after these edits; raises what `apply` would, and changes nothing."""
        self.remember([site for edit in edits for site in edit.sites])
        self._learn_for(edits)
        if edits:
            self._sum_up(tuple(edits[:-1]))  # the last may still be taken back
        begun = self._begun if edits else Begun()
        return {
            name: settled(self._summed(name, edits, begun), base.dtype, name, edits) for name, base in self.base.items()
        }

    def _sum_up(self, edits: tuple[Edit, ...]) -> None:
        """Keep the sums after these edits, found from those that are kept, if these begin with the same.

        Edits come one after another, and every time all of them are folded: that would be quadratic in their number.
        """
        wide = sum(base.numel() * solving_dtype(base).itemsize for base in self.base.values())
        begun = self._begun if wide <= KEPT and self._begun.begins(edits) else Begun()
        if wide <= KEPT and len(edits) > len(begun.edits):
            begun = Begun(edits, {name: self._summed(name, edits, begun) for name in self.base})
        self._begun = begun

    def _summed(self, name: str, edits: Sequence[Edit], begun: Begun) -> Tensor:
        base = self.base[name]
        so_far = begun.sums[name] if name in begun.sums else base.to(solving_dtype(base))
        return summed(so_far, name, edits[len(begun.edits) :], self.gain_at(name), begun.edits)

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

    def gain_at(self, site: str) -> Gain:
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
