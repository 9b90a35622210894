"""The change that edits made to each site, as an exactly low-rank matrix.

The edits of a site compose to one write, and the change that a write makes to a memory has one row per fact. The
change is returned only if it explains the weights that the model holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rebind.edit.ledger.edit import Edit, Gain, writes_at
from rebind.errors import InputError, NumericalError, ShapeError
from rebind.memory.low_rank import LowRank
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write
from rebind.models.sites import memory_of


def compute_changes(
    base: Mapping[str, Tensor],
    edits: Sequence[Edit],
    edited: Mapping[str, Tensor],
    *,
    gain_at: Callable[[str], Gain] | None = None,
) -> dict[str, LowRank]:
    """Compute what the edits add to each site: one row per fact, at most min(d_v, d_k) rows, in float64.

    Args:
        base: the unedited memory [d_v, d_k] of each site.
        edits: the active edits, in order.
        edited: the memories that the model holds now; they must equal base plus changes.
        gain_at: returns the `gain` argument of `fold` for a site, for methods in which it depends on earlier edits.
    """
    changes = {}
    for site in dict.fromkeys(site for edit in edits for site in edit.sites):
        weights = base[site].detach().to(solving_dtype(base[site]))
        writes = list(writes_at(site, edits, weights, gain_at and gain_at(site)))
        change = _compose(writes).delta(weights)
        rank_limit = min(weights.shape)
        changes[site] = change.truncate(rank_limit) if change.rank > rank_limit else change
        _require_explained(site, base[site], edited[site], changes[site])
    require_changes(changes)
    return changes


def require_changes(changes: Mapping[str, LowRank]) -> None:
    """Raise if there is nothing to export."""
    if not any(change.rank for change in changes.values()):
        raise InputError(
            "There are no changes to export",
            expected="at least one active edit",
            advice="Write a fact first, or redo an edit",
            code="no_changes",
        )


def require_matching(model: nn.Module, changes: Mapping[str, LowRank]) -> None:
    """Raise if a change belongs to a module that the model does not have, or has in another shape."""
    advice, code = "Pass the model that was edited, or its base", "change_of_other_model"
    modules = dict(model.named_modules())
    for site, change in changes.items():
        if site not in modules:
            raise InputError(f"{type(model).__name__} has no module {site}", advice=advice, code=code)
        shape = list(memory_of(modules[site]).shape)
        change_shape = [change.left.shape[-2], change.right.shape[-1]]
        if change_shape != shape:
            problem = f"The change of {site} has shape {change_shape}"
            raise ShapeError(problem, expected=f"{shape} ([d_v, d_k])", advice=advice, code=code)


def _compose(writes: list[Write]) -> Write:
    """Return one write that equals all of them in order.

    Neighbors are composed first, then neighbors of those: composition is associative, and this way a row is copied
    log n times instead of n times.
    """
    while len(writes) > 1:
        pairs = [later @ earlier for earlier, later in zip(writes[::2], writes[1::2], strict=False)]
        writes = pairs if len(writes) % 2 == 0 else [*pairs, writes[-1]]
    return writes[0]


def _require_explained(site: str, base: Tensor, edited: Tensor, change: LowRank) -> None:
    """Raise unless the model holds base plus change, cast once. In bfloat16 the cast may outweigh the change."""
    weights, dense = base.to(change.left), change.dense()
    gap = torch.linalg.vector_norm(edited.to(dense) - (weights + dense).to(edited.dtype).to(dense))
    norm = torch.linalg.vector_norm(dense)
    allowed = 1e-3 * norm + 1e3 * torch.finfo(dense.dtype).eps * torch.linalg.vector_norm(weights)
    if not gap <= allowed:  # also for NaN
        raise NumericalError(
            f"The weights of {site} differ from base and edits by {float(gap / norm):.1e} of the change",
            expected="less than 1e-3",
            advice="Something else wrote to the model: call refresh on the editor, then export again",
            code="weights_not_explained",
        )
