"""The weights of an edited model: always the fold of some edits over the base weights, in the order of the ledger.

Nothing else is ever written to a site, and edited weights are never the truth: what is stored of them is a snapshot.
To undo an edit is to fold again without it, so the result equals, bit for bit, that of a run in which the edit was
never made. A fold resumes where an earlier fold of the same first edits was remembered (`partial_folds`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.edits import EditSequence
from rebind.edit.ledger.partial_folds import (
    MAX_PARTIAL_FOLDS,
    ROOM_FOR_OTHERS,
    PartialFold,
    StoredPartialFolds,
    milestones,
    thinned,
)
from rebind.edit.ledger.snapshots import Snapshots
from rebind.edit.ledger.table import Kind
from rebind.edit.ledger.tensors import damaged
from rebind.edit.methods import EarlierKeys, add_keys, get_method
from rebind.edit.moments import Moments, OldKeys
from rebind.edit.solve import weights_restored
from rebind.errors import InputError, NumericalError
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write
from rebind.models.sites import memory_of, module_at, write_memory

MAX_PARTIAL_BYTES = 2**30


def stored_writes_at(site: str, edits: Iterable[Edit], like: Tensor) -> Iterator[Write]:
    """Yield the writes of edits at a site, as they are stored, with the dtype and the device of `like`."""
    for edit in edits:
        if site in edit.sites:
            yield edit.write(site, like)


def cast_weights(weights: Tensor, dtype: torch.dtype, site: str) -> Tensor:
    """Return folded weights as the model holds them: a new tensor of the model's dtype, which must be finite.

    Weights are folded in float64 and cast once: casting after each edit would make the result depend on how edits
    were grouped, and in bfloat16 small edits would be rounded away one by one.
    """
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
    edits = EditSequence.of(edits)
    if not len(edits):
        return
    source = json.dumps(moments.source, sort_keys=True)
    if any(kind.moments != source for kind in edits.kinds()):
        edit = edits.where(lambda kind: kind.moments != source)[0]
        raise InputError(
            f"Edit {edit.id or '(new)'} was made with moments of {edit.settings['moments']}, but this editor "
            f"has moments of {moments.source}",
            advice="Open the editor with the same {corpus} and {moment_tokens}",
            settings={"corpus": None, "moment_tokens": None},
            code="other_moments",
        )


def remembers(kind: Kind) -> bool:
    """Return whether the gain of edits of a kind depends on the edits before them."""
    return get_method(kind.method).remembers


def remembering_sites(kinds: Iterable[Kind]) -> frozenset[str]:
    """Return the sites at which gains depend on the keys of earlier edits."""
    return frozenset(site for kind in kinds if remembers(kind) for site in kind.sites)


class EditedWeights:
    """The weights of a model's edited sites: what they were, and what edits make of them.

    `moments` provides what methods need to protect the edits before theirs. Between two calls some partial folds, not
    yet rounded, are kept if they take at most `max_partial_bytes`: writing one edit after another takes linear time.
    """

    def __init__(self, model: nn.Module, moments: Moments, *, max_partial_bytes: int = MAX_PARTIAL_BYTES) -> None:
        self.model, self.moments = model, moments
        self.base: dict[str, Tensor] = {}  # the base weights of every site that was ever edited, [d_v, d_k]
        self.old_keys: dict[str, OldKeys] = {}
        self._max_partial_bytes = max_partial_bytes
        self._partial_folds: list[PartialFold] = []
        self._unstored_seconds = 0.0  # that folding took since a snapshot was written

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write folded weights into the model."""
        for site, memory in weights.items():
            write_memory(module_at(self.model, site), memory)

    def fold(self, edits: Sequence[Edit], snapshots: Snapshots | None = None) -> dict[str, Tensor]:
        """Return the weights of every site after these edits; the model is not changed."""
        edits = EditSequence.of(edits).where(lambda kind: bool(kind.sites))
        kinds = edits.kinds()
        self.remember_base([site for kind in kinds for site in kind.sites])
        self._load_old_keys_for(edits)
        folded = self._fold(edits, remembering_sites(kinds), snapshots)
        return {
            site: cast_weights(folded.weights.get(site, base), base.dtype, site) for site, base in self.base.items()
        }

    def _fold(self, edits: EditSequence, protected: frozenset[str], snapshots: Snapshots | None) -> PartialFold:
        if not len(edits):
            return PartialFold(edits.tokens, {}, {})
        stored = None if snapshots is None else StoredPartialFolds(snapshots, next(iter(self.base.values())).device)
        start = max((one for one in self._partial_folds if one.precedes(edits.tokens)), key=_count, default=None)
        if stored is not None and (found := stored.best(edits.tokens, 0 if start is None else start.count)):
            start = found
        begin = time.perf_counter()
        partial_folds = self._fold_on(start or PartialFold(edits.tokens[:0], {}, {}), edits, protected)
        self._unstored_seconds += time.perf_counter() - begin
        self._remember(partial_folds, edits)
        if stored is not None and stored.offer(partial_folds, edits, self._unstored_seconds):
            self._unstored_seconds = 0.0
        return partial_folds[-1]

    def _fold_on(self, start: PartialFold, edits: EditSequence, protected: frozenset[str]) -> list[PartialFold]:
        """Return the partial folds of a fold that begins at one: the last one is its end."""
        earlier = self._earlier_keys(start, edits[: start.count], protected)
        weights = {site: tensor.to(self.base[site].device) for site, tensor in start.weights.items()}
        marks, partial_folds = milestones(start.count, len(edits)), [PartialFold(start.tokens, dict(weights), earlier)]
        for number, edit in enumerate(edits[start.count :], start=start.count + 1):
            edit, earlier = edit.loaded(), dict(earlier)
            for site in edit.sites:
                base = self.base[site]
                before = weights[site] if site in weights else base.to(solving_dtype(base))
                write = edit.write(site, before)
                if site in protected:
                    write = self._with_gain(site, edit, write, earlier.get(site))
                    earlier[site] = self._add_keys(site, earlier.get(site), write.keys)
                weights[site] = write.apply(before)
            if number in marks:
                partial_folds.append(PartialFold(edits.tokens[:number], dict(weights), earlier))
        return partial_folds

    def _remember(self, partial_folds: Sequence[PartialFold], edits: EditSequence) -> None:
        """Keep the most useful partial folds: those of these edits, and the end of the fold before, for a redo."""
        known = {one.count: one for one in self._partial_folds if one.precedes(edits.tokens)}
        known |= {one.count: one for one in partial_folds if one.count}
        others = [one for one in self._partial_folds if not one.precedes(edits.tokens)][-1:]
        largest = max((one.size for one in known.values()), default=1)
        limit = min(MAX_PARTIAL_FOLDS, self._max_partial_bytes // max(largest, 1))
        last = len(edits) - 1  # without the last edit, which may still be rejected
        if limit < ROOM_FOR_OTHERS:
            others = []
        counts = [last] if limit == 1 and last in known else thinned(list(known), len(edits), limit - len(others))
        self._partial_folds = [*others, *(known[count] for count in counts)]

    def _earlier_keys(
        self, start: PartialFold, edits: EditSequence, protected: frozenset[str]
    ) -> dict[str, EarlierKeys]:
        """Return the keys of the edits before a partial fold, by site, also those that nothing needed until now."""
        earlier = {site: keys for site, keys in start.earlier.items() if site in protected}
        missing = protected - set(earlier)
        for edit in edits.where(lambda kind: not missing.isdisjoint(kind.sites)) if missing else ():
            loaded = edit.loaded()
            for site in missing.intersection(edit.sites):
                earlier[site] = self._add_keys(site, earlier.get(site), loaded.write(site).keys)
        return earlier

    def _add_keys(self, site: str, earlier: EarlierKeys | None, keys: Tensor) -> EarlierKeys:
        old_keys = self.old_keys[site]
        return add_keys(earlier, keys.double().to(old_keys.moment.device), old_keys)

    def _with_gain(self, site: str, edit: Edit, write: Write, earlier: EarlierKeys | None) -> Write:
        """Return the write of an edit with its gain: the stored one, unless there are earlier edits to protect."""
        method = get_method(edit.method)
        if not method.remembers or earlier is None or not len(earlier):
            return write
        keys = write.keys.double().to(self.old_keys[site].moment.device)
        lam = edit.settings.get("lam")
        if not isinstance(lam, (int, float)):
            raise damaged(f"Edit {edit.id or '(new)'} has no λ")
        gain = method.gain(keys, self.old_keys[site], float(lam), earlier)
        return replace(write, gain=gain.float().to(write.gain))  # rounded as a stored gain is

    def writes_at(self, site: str, edits: Sequence[Edit], like: Tensor) -> Iterator[Write]:
        """Yield the writes of edits at a site, in order, with the dtype and the device of `like`."""
        edits = EditSequence.of(edits).where(lambda kind: site in kind.sites)
        is_protected = site in remembering_sites(edits.kinds())
        earlier: EarlierKeys | None = None
        for edit in edits:
            write = edit.write(site, like)
            if is_protected:
                write = self._with_gain(site, edit, write, earlier)
                earlier = self._add_keys(site, earlier, write.keys)
            yield write

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

    def growth(self) -> dict[str, float]:
        """Return ‖W' − W‖ / ‖W‖ of every edited site, as the model stands."""
        growth = {}
        for site, base in self.base.items():
            wide = base.float()
            moved = torch.linalg.vector_norm(memory_of(module_at(self.model, site)).to(wide) - wide)
            size = torch.linalg.vector_norm(wide).clamp_min(torch.finfo(wide.dtype).tiny)
            growth[site] = float(moved / size)
        return growth

    def _load_old_keys_for(self, edits: EditSequence) -> None:
        """Load the old keys that the gains of these edits need."""
        require_same_moments(edits.where(remembers), self.moments)
        self.load_old_keys(sorted(remembering_sites(edits.kinds())))


def _count(fold: PartialFold) -> int:
    return fold.count
