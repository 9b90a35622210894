"""Edits, and the weights that they add up to.

An edit holds one `Write` per site, computed against the base model. Edited weights are never stored: they are the
fold of the active edits' writes over the base weights, in the order of the ledger. To undo an edit is to fold again
without it, so the result equals, bit for bit, that of a run in which the edit was never made.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.log import JSON, digest_of
from rebind.errors import InputError, NumericalError
from rebind.memory.checks import unknown_name
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write
from rebind.version import __version__

PARTS = ("keys", "values", "gain")  # the tensors of a write, as they are named in an edit
JSON_FIELDS = ("method", "settings", "scores", "versions", "created", "forced")  # stored as they are


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit:
    """Facts that were written into a model together, with everything needed to write them again."""

    id: str = ""  # assigned by the ledger
    facts: tuple[Fact, ...]
    method: str
    settings: Mapping[str, JSON]
    sites: tuple[str, ...]
    tensors: Mapping[str, Tensor]  # "{site}/keys", "{site}/values", "{site}/gain" for each site; "targets"
    scores: Mapping[str, JSON] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""  # UTC, ISO 8601; empty: the ledger fills in the time of the append
    forced: bool = False  # whether the edit was written although it failed a check

    def write(self, site: str) -> Write:
        """Return the write at one of the edit's sites."""
        if site not in self.sites:
            raise unknown_name("site", site, self.sites)
        try:
            return Write(*(self.tensors[f"{site}/{part}"] for part in PARTS))
        except KeyError as missing:
            raise InputError(f"Edit {self.id or '(new)'} has no tensor {missing}", code="edit_incomplete") from None

    @property
    def digest(self) -> str:
        """What identifies the edit in any ledger of any model: its facts, method and settings."""
        facts = [fact.to_json() for fact in self.facts]
        return digest_of({"facts": facts, "method": self.method, "settings": self.settings})

    def to_json(self) -> dict[str, JSON]:
        """Return everything but the id and the tensors."""
        facts = [fact.to_json() for fact in self.facts]
        return {"facts": facts, "sites": list(self.sites), **{name: getattr(self, name) for name in JSON_FIELDS}}

    @classmethod
    def from_json(cls, id: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Edit:
        """Return the edit that `to_json` described."""
        facts = tuple(Fact.from_json(record) for record in stored["facts"])
        fields = {name: stored[name] for name in JSON_FIELDS}
        return cls(id=id, facts=facts, sites=tuple(stored["sites"]), tensors=tensors, **fields)


def pack_writes(writes: Mapping[str, Write]) -> dict[str, Tensor]:
    """Return the tensors of one write per site, named as in `Edit.tensors`."""
    return {
        f"{site}/{part}": tensor.cpu()
        for site, write in writes.items()
        for part, tensor in zip(PARTS, write.tensors(), strict=True)
    }


def library_versions() -> dict[str, str]:
    """Return the versions of everything that the numbers of an edit depend on."""
    return {
        "rebind": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


# The fold

Gain = Callable[[Edit, Sequence[Edit]], Tensor]  # (edit, earlier edits at the site) → the edit's gain there


def fold(base: Tensor, site: str, edits: Sequence[Edit], gain: Gain | None = None) -> Tensor:
    """Return the weights [d_v, d_k] of a site after `edits`, given those of the base model.

    The edits are applied in float64 and the result is cast once: casting after each edit would make the result
    depend on how edits were grouped, and in bfloat16 small edits would be rounded away one by one. `gain` computes
    the gain of an edit for methods in which it depends on the edits before it.
    """
    return cast_weights(apply_edits(base.detach().to(solving_dtype(base)), site, edits, gain), base.dtype, site)


def apply_edits(
    weights: Tensor, site: str, edits: Sequence[Edit], gain: Gain | None = None, earlier: Sequence[Edit] = ()
) -> Tensor:
    """Return `weights`, which already hold the `earlier` edits, with these edits applied, in the same dtype."""
    for write in writes_at(site, edits, weights, gain, earlier):
        weights = write.apply(weights)
    return weights


def writes_at(
    site: str, edits: Sequence[Edit], like: Tensor, gain: Gain | None = None, earlier: Sequence[Edit] = ()
) -> Iterator[Write]:
    """Yield the writes of the edits at a site, in order, with the dtype and the device of `like`."""
    before = [edit for edit in earlier if site in edit.sites]
    for edit in edits:
        if site not in edit.sites:
            continue
        write = edit.write(site)
        if gain is not None:
            write = replace(write, gain=gain(edit, tuple(before)))
        keys, values, gains = (tensor.to(like) for tensor in write.tensors())
        yield Write(keys, values, gains)
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
