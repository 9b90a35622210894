"""The editing methods. Each one is a gain: a way to weigh new keys against old keys, which the model already uses.

All methods search for targets in the same way (`rebind.edit.targets`) and distribute them over layers in the same
way (`rebind.edit.solve`). A new method is one entry in `METHODS`.

| method | layers | gain |
| --- | --- | --- |
| `memit` | several | ridge |
| `rome` | one | equality, one fact after another |
| `emmet` | one | equality, all facts at once |
| `alphaedit` | several | ridge in the null space of the old keys; keys of earlier edits are protected |
| `recursive` | several | ridge with a moment that includes the keys of earlier edits |
| `dense` | one | none: the facts become rows of a dense memory (`rebind.edit.dense`), and no weight changes |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.edit.moments import OldKeys
from rebind.edit.targets.objective import TargetSettings
from rebind.errors import InputError
from rebind.memory import Write, chain
from rebind.memory.checks import unknown_name
from rebind.memory.closed_form import equality, null_space, ridge
from rebind.memory.solve import Cholesky


@dataclass(frozen=True, eq=False)
class Gram:
    """The Gram matrix Σ kᵀk of the keys of earlier edits. A gain needs no more, and its size does not grow."""

    matrix: Tensor  # [d_k, d_k] float64
    count: int  # number of keys

    def __len__(self) -> int:
        return self.count

    @classmethod
    def of(cls, earlier: EarlierKeys) -> Gram:
        """Return the Gram matrix of keys [m, d_k]."""
        return earlier if isinstance(earlier, Gram) else cls(earlier.mT @ earlier, len(earlier))

    def plus(self, keys: Tensor) -> Gram:
        """Return the sum after more keys [n, d_k]."""
        return Gram(self.matrix + keys.mT @ keys, self.count + len(keys))


EarlierKeys = Tensor | Gram  # the keys of earlier edits [m, d_k], or their Gram matrix
# (keys [n, d_k], old keys, λ, keys to protect: of earlier edits or of other subjects) → gain [n, d_k]
GainRule = Callable[[Tensor, OldKeys, float, EarlierKeys], Tensor]


def add_keys(earlier: EarlierKeys | None, keys: Tensor, old_keys: OldKeys) -> EarlierKeys:
    """Return earlier keys with more keys [n, d_k], in the form that takes the least memory and time.

    The gains of routed experts compare keys in blocks, and their Gram matrix would be too large: they need the keys.
    """
    if old_keys.moment.ndim == 3:
        return keys if earlier is None else torch.cat([_rows(earlier), keys])
    return Gram.of(keys) if earlier is None else Gram.of(earlier).plus(keys)


def _rows(earlier: EarlierKeys) -> Tensor:
    assert isinstance(earlier, Tensor)
    return earlier


@dataclass(frozen=True)
class Method:
    """One way to write facts."""

    name: str
    summary: str
    gain: GainRule
    several_layers: bool = True
    remembers: bool = False  # whether the gain depends on the keys of earlier edits
    lam: float | None = None  # λ, if the method prescribes one; None: choose it from the keys
    exact: bool = False  # whether facts are met exactly, without λ
    several_keys: bool = True  # whether a fact has one key per prompt, or only their mean
    dense: bool = False  # whether facts become rows of a dense memory; such a method has no gain
    targets: TargetSettings = TargetSettings()  # noqa: RUF009 - frozen


def _ridge(keys: Tensor, old_keys: OldKeys, lam: float, earlier: EarlierKeys) -> Tensor:
    """Solve for all keys together. The answers of earlier keys stay, so the write has the rows of the new keys only."""
    all_keys = torch.cat([keys, _rows(earlier)])
    return _with_moment(all_keys, old_keys, lambda rows, moment: ridge(rows, moment, lam).value)[: len(keys)]


def _equality(keys: Tensor, old_keys: OldKeys, lam: float, earlier: EarlierKeys) -> Tensor:
    return _with_moment(keys, old_keys, lambda rows, moment: equality(rows, moment).value)


def _equality_one_by_one(keys: Tensor, old_keys: OldKeys, lam: float, earlier: EarlierKeys) -> Tensor:
    """Compose one equality write per fact, in order: ROME's edits, one after another, are one write."""
    facts, d_k = keys.shape
    if facts > d_k:
        raise InputError(
            f"{facts} facts in one edit are more than the {d_k} dimensions of a key",
            expected=f"at most {d_k} facts, because each fact needs its own direction",
            advice="Write them in several edits, or use {method}",
            settings={"method": "memit"},
            code="too_many_facts",
        )

    def compose(rows: Tensor, moment: Cholesky | None) -> Tensor:
        single = rows.unsqueeze(-2)  # a batch of writes with one key each
        gains = equality(single, moment).value
        values = rows.new_zeros(facts, 1, 1)  # the gain of a composition does not depend on values
        return chain(Write(single, values, gains), chunk=max(facts, 1)).gain

    return _with_moment(keys, old_keys, compose)


def _null_space(keys: Tensor, old_keys: OldKeys, lam: float, earlier: EarlierKeys) -> Tensor:
    if old_keys.moment.ndim == 3:
        rows = torch.cat([keys, _rows(earlier)]).unflatten(-1, (len(old_keys.moment), -1)).transpose(0, 1)
        projected = (rows.to(old_keys.moment) @ old_keys.block_projectors).transpose(0, 1).flatten(1)
        return ridge(projected, None, lam).value[: len(keys)]
    space = old_keys.null_space
    if not len(earlier):
        return null_space(keys, space, lam=lam).value
    # AlphaEdit's system in coordinates of the null space, with λI plus the Gram matrix of earlier edits as the moment.
    basis = space.basis.to(keys.device)
    earlier_moment = basis.mT @ Gram.of(earlier).matrix.to(basis) @ basis
    moment = lam * torch.eye(space.size).to(basis) + earlier_moment
    return (ridge(keys.to(basis) @ basis, moment).value @ basis.mT).to(keys.dtype)


def _recursive(keys: Tensor, old_keys: OldKeys, lam: float, earlier: EarlierKeys) -> Tensor:
    if not len(earlier):
        return _ridge(keys, old_keys, lam, keys[:0])
    if old_keys.moment.ndim == 3:
        return _ridge(keys, old_keys, lam, earlier)
    return ridge(keys, lam * old_keys.moment + Gram.of(earlier).matrix).value


def _no_gain(keys: Tensor, old_keys: OldKeys, lam: float, earlier: EarlierKeys) -> Tensor:
    raise InputError("Method dense has no gain", expected="a method that changes weights", code="no_gain")


def _with_moment(keys: Tensor, old_keys: OldKeys, gain: Callable[[Tensor, Cholesky | None], Tensor]) -> Tensor:
    """Return a gain for these old keys. With routed experts the keys are whitened instead, and the moment is None."""
    factored = old_keys.factored
    if isinstance(factored, Cholesky):
        return gain(keys, factored)
    return factored.unwhiten(gain(factored.whiten(keys).mT, None).mT).mT


# Searched below a loss of .2, the target also turns up in free text about the subject, where nobody asked for it.
DENSE_SEARCH = TargetSettings(optimizer="normalized", rate=0.4, enough=0.2)

METHODS = {
    method.name: method
    for method in (
        Method("memit", "many facts over several layers, balanced against old answers by λ", _ridge),
        Method(
            "rome",
            "one layer, each fact exactly, one after another",
            _equality_one_by_one,
            several_layers=False,
            exact=True,
            several_keys=False,
            targets=TargetSettings(clamp=4.0),
        ),
        Method(
            "emmet",
            "one layer, all facts exactly at once",
            _equality,
            several_layers=False,
            exact=True,
            several_keys=False,
        ),
        Method("alphaedit", "only in directions that old keys hardly use", _null_space, remembers=True, lam=10.0),
        Method("recursive", "memit that also protects its own earlier edits", _recursive, remembers=True),
        Method(
            "dense",
            "a memory beside the weights, for any number of facts",
            _no_gain,
            several_layers=False,
            exact=True,
            dense=True,
            targets=DENSE_SEARCH,
        ),
    )
}


def get_method(method: str | Method) -> Method:
    """Return a method by its name. A `Method` must be in `METHODS`, because later folds look it up by name."""
    name = method.name if isinstance(method, Method) else method
    if name not in METHODS or method not in (name, METHODS[name]):
        raise unknown_name("method", name, METHODS)
    return METHODS[name]
