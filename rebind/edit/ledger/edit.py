"""What an edit is, and what edits make of weights.

An edit is, at each site it touches, one `Write` computed against the base model. The edited weights are
never kept: they are the fold of the active edits' writes over the base weights, in ledger order. Undoing
an edit is folding again without it, so the result equals, bit for bit, that of a run that never had it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.log import JSON, digest_of
from rebind.errors import InputError, NumericalError
from rebind.memory.checks import unknown_name
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write

PARTS = ("keys", "values", "gain")  # of a write, as an edit's tensors are named


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit:
    """Facts written into a model together, with all that is needed to write them again."""

    id: str = ""  # given by the ledger
    facts: tuple[Fact, ...]
    method: str
    settings: Mapping[str, JSON]
    sites: tuple[str, ...]
    tensors: Mapping[str, Tensor]  # "{site}/keys", "{site}/values", "{site}/gain" for each site; "targets"
    scores: Mapping[str, JSON] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""  # UTC, ISO 8601; the time of the append unless given
    forced: bool = False  # written although a check spoke against it

    def write(self, site: str) -> Write:
        """The edit's write at one of its sites."""
        if site not in self.sites:
            raise unknown_name(f"site of edit {self.id or '(new)'}", site, self.sites)
        parts = {part: f"{site}/{part}" for part in PARTS}
        for name in parts.values():
            if name not in self.tensors:
                raise InputError(
                    f"edit {self.id or '(new)'} has no tensor {name!r}: each site needs {', '.join(parts)}"
                )
        return Write(**{part: self.tensors[name] for part, name in parts.items()})

    @property
    def digest(self) -> str:
        """Which edit this is, whatever ledger or model it is in: facts, method and settings."""
        facts = [fact.to_json() for fact in self.facts]
        return digest_of({"facts": facts, "method": self.method, "settings": self.settings})

    def described(self) -> dict[str, JSON]:
        """Everything but the tensors, as the log keeps it."""
        return {
            "facts": [fact.to_json() for fact in self.facts],
            "method": self.method,
            "settings": self.settings,
            "sites": list(self.sites),
            "scores": self.scores,
            "versions": self.versions,
            "created": self.created,
            "forced": self.forced,
        }


def tensors_of(writes: Mapping[str, Write]) -> dict[str, Tensor]:
    """Writes by site as an edit keeps them."""
    return {
        f"{site}/{part}": tensor.cpu()
        for site, write in writes.items()
        for part, tensor in zip(PARTS, write.tensors(), strict=True)
    }


@dataclass(frozen=True)
class Diff:
    """The active edits of two ledgers, told apart by facts, method and settings."""

    only_here: tuple[Edit, ...]
    only_there: tuple[Edit, ...]
    both: tuple[Edit, ...]


Gain = Callable[[Edit, Sequence[Edit]], Tensor]  # an edit's at a site, given the edits before it there


def fold(base: Tensor, site: str, edits: Sequence[Edit], gain: Gain | None = None) -> Tensor:
    """The weights [d_v, d_k] of a site after `edits`, from those of the base model.

    The sum is kept in float64 and cast once, at the end: casting after each edit would make the result depend
    on how edits were grouped, and in bf16 small edits would be rounded away one by one. Methods whose gain
    depends on what was written before give it as `gain(edit, earlier edits at this site)`.
    """
    return settled(summed(base.detach().to(solving_dtype(base)), site, edits, gain), base.dtype, site, edits)


def summed(
    weights: Tensor, site: str, edits: Sequence[Edit], gain: Gain | None = None, earlier: Sequence[Edit] = ()
) -> Tensor:
    """`weights`, which hold the `earlier` edits, with these too, in their own dtype."""
    for write in writes(site, edits, weights, gain, earlier):
        weights = write.apply(weights)
    return weights


def writes(
    site: str, edits: Sequence[Edit], like: Tensor, gain: Gain | None = None, earlier: Sequence[Edit] = ()
) -> Iterator[Write]:
    """The edits' writes at a site after the `earlier` edits, first to last, in the dtype and where `like` is."""
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


def settled(weights: Tensor, dtype: torch.dtype, site: str, edits: Sequence[Edit]) -> Tensor:
    """A sum of edits as a model holds it: a tensor of its own."""
    cast = weights.to(dtype, copy=True)
    if not torch.isfinite(cast).all():
        count = sum(site in edit.sites for edit in edits)
        raise NumericalError(
            f"{count} edits make {site} infinite in {dtype}, expected finite weights: undo the last "
            f"of them, or load the model in a wider dtype"
        )
    return cast
