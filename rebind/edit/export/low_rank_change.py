"""What the edits changed: the change of each site, exactly low-rank.

The edits of a site compose to one write, and what a write adds to a memory is one row of the right factor for
each fact. It is returned only where base and change together make the weights that the model holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from rebind.edit.ledger.edit import Edit, Gain, writes
from rebind.errors import InputError, NumericalError, ShapeError
from rebind.memory.checks import unknown_name
from rebind.memory.low_rank import LowRank
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write
from rebind.models.sites import memory_of, module_at

GainAt: TypeAlias = Callable[[str], Gain]

NO_EDITS = "write a fact first, or redo an edit that was undone"


def changes(
    base: Mapping[str, Tensor], edits: Sequence[Edit], edited: Mapping[str, Tensor], *, gain_at: GainAt | None = None
) -> dict[str, LowRank]:
    """What the edits add to each site: one row a fact, at most min(d_v, d_k), in float64.

    Args:
        base: the unedited memory [d_v, d_k] of each site.
        edits: those that are active, in order.
        edited: the memories as they are now. They must be what base and edits make, else nothing is returned.
        gain_at: what `fold` was given as `gain`, for each site, where gains depend on earlier edits.
    """
    sites = dict.fromkeys(site for edit in edits for site in edit.sites)
    if not sites:
        raise InputError(f"got {len(edits)} edits that touch no site, expected at least one that does: {NO_EDITS}")
    found = {}
    for site in sites:
        for what, memories in (("base", base), ("edited", edited)):
            if site not in memories:
                raise unknown_name(f"site of the {what} weights", site, memories)
        full = base[site].detach().to(solving_dtype(base[site]))
        composed = _compose(list(writes(site, edits, full, gain_at and gain_at(site))))
        change = composed.delta(full)
        limit = min(full.shape)
        found[site] = change.truncate(limit) if change.rank > limit else change
        _require_same(site, base[site], edited[site], found[site])
    return found


def rounding_errors(
    base: Mapping[str, Tensor], edited: Mapping[str, Tensor], changes: Mapping[str, LowRank]
) -> dict[str, float]:
    """‖(edited − base) − Δ‖ / ‖Δ‖ for each site: how much of a change the weights' dtype rounded away."""
    errors = {}
    for site, change in changes.items():
        dense = change.dense()
        errors[site] = relative_error(edited[site].to(dense) - base[site].to(dense), dense)
    return errors


def require_changes(changes: Mapping[str, LowRank]) -> None:
    """Nothing is written of edits that change nothing."""
    if not any(change.rank for change in changes.values()):
        raise InputError(f"got no changes to write, expected those of at least one edit: {NO_EDITS}")


def require_fitting(model: nn.Module, changes: Mapping[str, LowRank]) -> None:
    """The changes are of the shape of the weights that the model has there."""
    for site, change in changes.items():
        holds = list(memory_of(module_at(model, site)).shape)
        got = [change.left.shape[-2], change.right.shape[-1]]
        if got != holds:
            raise ShapeError(
                f"the change of {site} is {got}, the model holds {holds} there (as [d_v, d_k]): "
                f"take the model that was edited, or its base"
            )


def relative_error(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖; where nothing was expected, the gap itself."""
    norm = float(torch.linalg.vector_norm(expected))
    gap = float(torch.linalg.vector_norm(got - expected))
    return gap / norm if norm else gap


def _compose(writes: list[Write]) -> Write:
    """One write that does them all.

    Neighbours first, then neighbours of those: composition is associative, and so a row is copied log n
    times instead of n.
    """
    while len(writes) > 1:
        pairs = [later @ earlier for earlier, later in zip(writes[::2], writes[1::2], strict=False)]
        writes = pairs if len(writes) % 2 == 0 else [*pairs, writes[-1]]
    return writes[0]


def _require_same(site: str, base: Tensor, edited: Tensor, change: LowRank) -> None:
    """The model holds base + change, cast once. Against the cast: in bf16 its rounding may outweigh the change."""
    full, dense = base.to(change.left), change.dense()
    gap = torch.linalg.vector_norm(edited.to(dense) - (full + dense).to(edited.dtype).to(dense))
    norm = torch.linalg.vector_norm(dense)
    allowed = 1e-3 * norm + 1e3 * torch.finfo(dense.dtype).eps * torch.linalg.vector_norm(full)
    if not gap <= allowed:  # NaN too
        raise NumericalError(
            f"the weights of {site} are {float(gap / norm):.1e} of the change away from base and edits together, "
            f"expected less than 1e-3: something else wrote to the model, so refresh the editor and export again"
        )
