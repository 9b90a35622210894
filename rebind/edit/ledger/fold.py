"""The weights of an edited model: always the fold of some edits over the base weights, in the order of the ledger.

Nothing else is ever written to a site, and edited weights are never stored. To undo an edit is to fold again without
it, so the result equals, bit for bit, that of a run in which the edit was never made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from rebind.edit.ledger.edit import Edit
from rebind.edit.methods import get_method
from rebind.edit.moments import Moments, OldKeys
from rebind.edit.solve import weights_restored
from rebind.errors import InputError, NumericalError
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write
from rebind.models.sites import memory_of, module_at, write_memory

MAX_PARTIAL_BYTES = 2**30

Gain = Callable[[Edit, Sequence[Edit]], Tensor]  # (edit, earlier edits at the site) → the edit's gain there


def apply_edits(
    weights: Tensor, site: str, edits: Sequence[Edit], gain: Gain | None = None, earlier: Sequence[Edit] = ()
) -> Tensor:
    """Return `weights`, which already hold the `earlier` edits, with these edits applied, in the same dtype.

    Weights are folded in float64 and cast once: casting after each edit would make the result depend on how edits
    were grouped, and in bfloat16 small edits would be rounded away one by one. `gain` computes the gain of an edit for
    methods in which it depends on the edits before it.
    """
    for write in writes_at(site, edits, weights, gain, earlier):
        weights = write.apply(weights)
    return weights


def writes_at(
    site: str, edits: Sequence[Edit], like: Tensor, gain: Gain | None = None, earlier: Sequence[Edit] = ()
) -> Iterator[Write]:
    """Yield the writes of the edits at a site, in order, with the dtype and the device of `like`."""
    before = [edit for edit in earlier if site in edit.sites]
    for edit in edits:
        if site in edit.sites:
            write = edit.write(site)
            if gain is not None:
                write = replace(write, gain=gain(edit, tuple(before)))
            yield Write(*(tensor.to(like) for tensor in write.tensors()))
            before.append(edit)


def cast_weights(weights: Tensor, dtype: torch.dtype, site: str) -> Tensor:
    """Return folded weights as the model holds them: a new tensor of the model's dtype, which must be finite."""
    cast = weights.to(dtype, copy=True)
    if not torch.isfinite(cast).all():
        raise NumericalError(
            f"The edits make the weights of {site} infinite in {dtype}",
            expected="finite weights",
            advice="Undo the last edit, or load the model in a wider dtype",
            code="weights_not_finite",
        )
    return cast


def require_same_moments(edits: Sequence[Edit], moments: Moments) -> None:
    """Raise if an edit was made with the moments of another text: it cannot be applied with these."""
    source = moments.source if edits else None
    for edit in edits:
        if edit.settings["moments"] != source:
            raise InputError(
                f"Edit {edit.id or '(new)'} was made with moments of {edit.settings['moments']}, but this editor "
                f"has moments of {source}",
                advice="Open the editor with the same {corpus} and {moment_tokens}",
                settings={"corpus": None, "moment_tokens": None},
                code="other_moments",
            )


class EditedWeights:
    """The weights of a model's edited sites: what they were, and what edits make of them.

    `moments` provides what methods need to protect the edits before theirs. Between two calls a partial fold, not yet
    rounded, is kept if it takes at most `max_partial_bytes`: writing one edit after another takes linear time.
    """

    def __init__(self, model: nn.Module, moments: Moments, *, max_partial_bytes: int = MAX_PARTIAL_BYTES) -> None:
        self.model, self.moments = model, moments
        self.base: dict[str, Tensor] = {}  # the base weights of every site that was ever edited, [d_v, d_k]
        self.old_keys: dict[str, OldKeys] = {}
        self._max_partial_bytes = max_partial_bytes
        self._partial_edits: tuple[Edit, ...] = ()
        self._partial: dict[str, Tensor] = {}  # each site's weights after those edits

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write folded weights into the model."""
        for site, memory in weights.items():
            write_memory(module_at(self.model, site), memory)

    def fold(self, edits: Sequence[Edit]) -> dict[str, Tensor]:
        """Return the weights of every site after these edits; the model is not changed."""
        self.remember_base([site for edit in edits for site in edit.sites])
        self._load_old_keys_for(edits)
        if edits:
            self._update_partial(tuple(edits[:-1]))  # without the last one, which may still be rejected
        return {site: cast_weights(self._fold_site(site, edits), base.dtype, site) for site, base in self.base.items()}

    def _update_partial(self, edits: tuple[Edit, ...]) -> None:
        fits = (
            sum(base.numel() * solving_dtype(base).itemsize for base in self.base.values()) <= self._max_partial_bytes
        )
        # Identity, not equality: edits of another ledger can have the same ids.
        is_prefix = list(map(id, self._partial_edits)) == list(map(id, edits[: len(self._partial_edits)]))
        if not fits or not is_prefix:
            self._partial_edits, self._partial = (), {}
        if fits and len(edits) > len(self._partial_edits):
            self._partial_edits, self._partial = edits, {site: self._fold_site(site, edits) for site in self.base}

    def _fold_site(self, site: str, edits: Sequence[Edit]) -> Tensor:
        earlier = self._partial_edits if edits else ()
        base = self.base[site]
        weights = self._partial[site] if edits and site in self._partial else base.to(solving_dtype(base))
        return apply_edits(weights, site, edits[len(earlier) :], self.gain_at(site), earlier)

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
        with self.base_weights():
            moments = self.moments.collect(missing)
        for site in missing:
            device = memory_of(module_at(self.model, site)).device
            self.old_keys[site] = OldKeys(moments[site].mean().to(device))

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """Run a block with the base weights in the model."""
        with weights_restored([module_at(self.model, site) for site in self.base]):
            self.write(self.base)
            yield

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
        growth = {}
        for site, base in self.base.items():
            wide = base.float()
            moved = torch.linalg.vector_norm(memory_of(module_at(self.model, site)).to(wide) - wide)
            size = torch.linalg.vector_norm(wide).clamp_min(torch.finfo(wide.dtype).tiny)
            growth[site] = float(moved / size)
        return growth

    def _load_old_keys_for(self, edits: Sequence[Edit]) -> None:
        """Load the old keys that the gains of these edits need."""
        remembering = [edit for edit in edits if get_method(edit.method).remembers]
        require_same_moments(remembering, self.moments)
        self.load_old_keys(list(dict.fromkeys(site for edit in remembering for site in edit.sites)))
