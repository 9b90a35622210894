"""The weights of an edited model: always the fold of some edits over the base weights.

Nothing else is ever written to a site. To undo an edit is to fold again without it, and an edit that is tried and
rejected leaves the same bytes as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rebind.edit.drift import relative_growth
from rebind.edit.ledger.edit import Edit, Gain, apply_edits, cast_weights
from rebind.edit.methods import get_method
from rebind.edit.moments.collect import Moments, OldKeys
from rebind.edit.solve.solve import weights_restored
from rebind.errors import InputError
from rebind.memory.precision import solving_dtype
from rebind.models.sites import memory_of, module_at, write_memory

MAX_PARTIAL_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class PartialFold:
    """Each site's weights after some edits, not yet rounded."""

    edits: tuple[Edit, ...] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def is_prefix_of(self, edits: Sequence[Edit]) -> bool:
        """Return whether `edits` begin with these very objects: edits of another ledger can have the same ids."""
        return len(self.edits) <= len(edits) and all(a is b for a, b in zip(self.edits, edits, strict=False))


class EditedWeights:
    """The weights of a model's edited sites: what they were, and what edits make of them.

    `moments` provides what methods need to protect the edits before theirs. Between two calls a partial fold is kept
    if it takes at most `max_partial_bytes`.
    """

    def __init__(self, model: nn.Module, moments: Moments, *, max_partial_bytes: int = MAX_PARTIAL_BYTES) -> None:
        self.model, self.moments = model, moments
        self.base: dict[str, Tensor] = {}  # the base weights of every site that was ever edited, [d_v, d_k]
        self.old_keys: dict[str, OldKeys] = {}
        self._max_partial_bytes = max_partial_bytes
        self._partial = PartialFold()

    def apply(self, edits: Sequence[Edit]) -> None:
        """Write the fold of these edits into the model: all sites or, if the fold fails, none."""
        folded = self.fold(edits)
        try:
            self._write(folded)
        except BaseException:  # an interrupt between two sites
            self._write(folded)
            raise

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for site, memory in weights.items():
            write_memory(module_at(self.model, site), memory)

    def fold(self, edits: Sequence[Edit]) -> dict[str, Tensor]:
        """Return the weights of every site after these edits; the model is not changed."""
        self.remember_base([site for edit in edits for site in edit.sites])
        self._load_old_keys_for(edits)
        if edits:
            self._update_partial(tuple(edits[:-1]))  # without the last one, which may still be rejected
        partial = self._partial if edits else PartialFold()
        return {
            site: cast_weights(self._fold_site(site, edits, partial), base.dtype, site)
            for site, base in self.base.items()
        }

    def _update_partial(self, edits: tuple[Edit, ...]) -> None:
        """Keep the fold of these edits, so that writing one edit after another does not take quadratic time."""
        size = sum(base.numel() * solving_dtype(base).itemsize for base in self.base.values())
        fits = size <= self._max_partial_bytes
        partial = self._partial if fits and self._partial.is_prefix_of(edits) else PartialFold()
        if fits and len(edits) > len(partial.edits):
            partial = PartialFold(edits, {site: self._fold_site(site, edits, partial) for site in self.base})
        self._partial = partial

    def _fold_site(self, site: str, edits: Sequence[Edit], partial: PartialFold) -> Tensor:
        base = self.base[site]
        weights = partial.weights[site] if site in partial.weights else base.to(solving_dtype(base))
        return apply_edits(weights, site, edits[len(partial.edits) :], self.gain_at(site), partial.edits)

    def remember_base(self, sites: Sequence[str]) -> None:
        """Copy the weights of sites that have never been edited."""
        for site in sites:
            if site not in self.base:
                self.base[site] = memory_of(module_at(self.model, site)).detach().clone()

    def load_old_keys(self, sites: Sequence[str]) -> None:
        """Load or compute the old keys of these sites, always on the base model."""
        missing = [site for site in sites if site not in self.old_keys]
        if not missing:
            return
        with weights_restored([module_at(self.model, site) for site in self.base]):
            self._write(self.base)
            moments = self.moments.collect(missing)
        for site in missing:
            device = memory_of(module_at(self.model, site)).device
            self.old_keys[site] = OldKeys(moments[site].mean().to(device))

    def gain_at(self, site: str) -> Gain:
        """Return a function for the gain of an edit at a site: the stored gain, unless it depends on earlier edits."""

        def gain(edit: Edit, earlier: Sequence[Edit]) -> Tensor:
            stored, method = edit.write(site), get_method(edit.method)
            if not method.remembers:
                return stored.gain
            keys = stored.keys.double().to(self.old_keys[site].moment.device)
            earlier_keys = [keys[:0], *(other.write(site).keys.to(keys) for other in earlier)]
            lam = float(edit.settings["lam"])  # type: ignore[arg-type]
            return method.gain(keys, self.old_keys[site], lam, torch.cat(earlier_keys)).float()

        return gain

    def growth(self) -> dict[str, float]:
        """Return ‖W' − W‖ / ‖W‖ of every edited site, as the model stands."""
        return relative_growth(self.base, {site: memory_of(module_at(self.model, site)) for site in self.base})

    def _load_old_keys_for(self, edits: Sequence[Edit]) -> None:
        """Load the old keys that the gains of these edits need."""
        remembering = [edit for edit in edits if get_method(edit.method).remembers]
        source = self.moments.source if remembering else None
        for edit in remembering:
            if edit.settings["moments"] != source:
                raise InputError(
                    f"Edit {edit.id or '(new)'} was made with moments of {edit.settings['moments']}, but this editor "
                    f"has moments of {source}",
                    advice="Open the editor with the same {corpus} and {moment_tokens}",
                    settings={"corpus": None, "moment_tokens": None},
                    code="other_moments",
                )
        self.load_old_keys(list(dict.fromkeys(site for edit in remembering for site in edit.sites)))
