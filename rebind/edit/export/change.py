"""The change that edits make to each site, as an exact low-rank matrix, and the delta file that stores it.

The edits of a site compose to one write, and the change that a write makes to a memory has one row per key. The
change is returned only if base weights plus change equal the weights of the model. A delta file holds the change alone,
as safetensors, to be added to the base model again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn

from rebind.edit.dense.subjects import current_facts
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.edits import EditSequence
from rebind.edit.ledger.fold import cast_weights, stored_writes_at
from rebind.errors import InputError, LedgerWarning, NumericalError, ShapeError
from rebind.memory.low_rank import LowRank
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write
from rebind.models.sites import memory_of, module_at, write_memory
from rebind.storage import add_to_export, open_tensors, seal_tensors, write_file

WritesAt = Callable[[str, Sequence[Edit], Tensor], Iterable[Write]]  # (site, edits, a tensor with their dtype)
DELTA_FORMAT, DELTA_FILE = "rebind-delta-1", "delta.safetensors"


def compute_changes(
    base: Mapping[str, Tensor],
    edits: Sequence[Edit],
    edited: Mapping[str, Tensor],
    *,
    writes_at: WritesAt | None = None,
) -> dict[str, LowRank]:
    """Compute the change of each site by the edits: one row per key, at most min(d_v, d_k) rows, in float64.

    Args:
        base: the unedited memory [d_v, d_k] of each site.
        edits: the active edits, in order.
        edited: the current memories of the model; they must equal base plus changes.
        writes_at: returns the writes of edits at a site, as `EditedWeights.writes_at` does; by default the stored ones.
    """
    changes = {}
    for site in dict.fromkeys(site for kind in EditSequence.of(edits).kinds() for site in kind.sites):
        weights = base[site].detach().to(solving_dtype(base[site]))
        writes = list((writes_at or stored_writes_at)(site, edits, weights))
        change = _compose(writes).delta(weights)
        rank_limit = min(weights.shape)
        changes[site] = change.truncate(rank_limit) if change.rank > rank_limit else change
        _require_weights_match(site, base[site], edited[site], changes[site])
    require_changes(changes)
    return changes


def require_changes(changes: Mapping[str, LowRank]) -> None:
    """Raise if there is no change to export."""
    if not any(change.rank for change in changes.values()):
        raise InputError(
            "There are no changes to export",
            expected="at least one active edit",
            advice="Write a fact first, or redo an edit",
            code="no_changes",
        )


def require_changed_weights(edits: Sequence[Edit]) -> None:
    """Raise if all facts are in the dense memory, which changes no weights."""
    if current_facts(edits) and not any(kind.sites for kind in EditSequence.of(edits).kinds()):
        raise InputError(
            "All facts are in the dense memory, and this export holds changes of weights only",
            advice="Run rebind consolidate first, which moves facts into the weights, or use {memory} instead",
            settings={"memory": None},
            code="only_dense_facts",
        )


def require_dense_facts(edits: Sequence[Edit]) -> None:
    """Raise if no fact is in the dense memory."""
    if not current_facts(edits):
        advice = "Write a fact by method dense, or undo a consolidation"
        raise InputError("The dense memory is empty", advice=advice, code="no_dense_facts")


def warn_of_dense_facts(edits: Sequence[Edit]) -> None:
    """Warn of facts that are in the dense memory, which changes no weights."""
    if dense := len(current_facts(edits)):
        warnings.warn(
            f"{dense} of the facts are in the dense memory and not in this export. Save the memory or the whole model, "
            f"or move the facts into the weights first (consolidate).",
            LedgerWarning,
            stacklevel=3,
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


def require_new_file(file: Path, *, overwrite: bool) -> None:
    """Raise if a file exists and may not be replaced."""
    if file.exists() and not overwrite:
        raise InputError(
            f"{file} already exists",
            advice="Choose another name, or use {overwrite} to replace it",
            settings={"overwrite": True},
            code="file_exists",
        )


def _compose(writes: list[Write]) -> Write:
    """Return one write that equals all of them in order. Pairs are composed, so that a row is copied log n times."""
    while len(writes) > 1:
        pairs = [later @ earlier for earlier, later in zip(writes[::2], writes[1::2], strict=False)]
        writes = pairs if len(writes) % 2 == 0 else [*pairs, writes[-1]]
    return writes[0]


def _require_weights_match(site: str, base: Tensor, edited: Tensor, change: LowRank) -> None:
    """Raise unless the weights equal base plus change, cast once. In bfloat16 the cast may outweigh the change."""
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


# The delta file


def save_delta(
    changes: Mapping[str, LowRank],
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the changes as one safetensors file with `{site}/left` and `{site}/right`; return its path.

    `path` is a file name that ends in .safetensors, or a folder, which gets a delta.safetensors. If the metadata has
    a "fingerprint" (of the base model), `load_delta` can check it.
    """
    require_changes(changes)
    file = delta_file(path)
    require_new_file(file, overwrite=overwrite)
    tensors = {
        f"{site}/{part}": cpu_copy(tensor)
        for site, change in changes.items()
        for part, tensor in (("left", change.left), ("right", change.right))
    }
    data = seal_tensors(save(tensors, {**(metadata or {}), "format": DELTA_FORMAT}))
    add_to_export(file)  # a file inside an export is replaced together with it
    write_file(file, data)
    return file


def load_delta(path: str | Path, fingerprint: str | None = None) -> dict[str, LowRank]:
    """Read the changes that `save_delta` wrote; with a fingerprint, only if they belong to that base model."""
    file = delta_file(path)
    try:
        with open_tensors(file) as (reader, metadata):
            tensors = {name: reader.get_tensor(name) for name in tuple(reader.keys())}
        if metadata.get("format") != DELTA_FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {DELTA_FORMAT!r}")
        sites = dict.fromkeys(name.rpartition("/")[0] for name in tensors)
        changes = {site: LowRank(tensors[f"{site}/left"], tensors[f"{site}/right"]) for site in sites}
    except (OSError, SafetensorError, ValueError, KeyError) as problem:
        raise InputError(
            f"{file} cannot be read ({problem})", expected="a file that save_delta wrote", code="not_a_delta_file"
        ) from problem
    if fingerprint is not None and metadata.get("fingerprint", fingerprint) != fingerprint:
        raise InputError(
            f"{file} belongs to another model ({metadata['fingerprint'][:12]}…, not {fingerprint[:12]}…)",
            advice="Load the model that it belongs to",
            code="delta_of_other_model",
        )
    return changes


def apply_delta(model: nn.Module, delta: Mapping[str, LowRank]) -> None:
    """Add the changes to the weights of a model, all or none; each sum is computed in float64 and cast once."""
    require_matching(model, delta)
    edited = {}
    for site, change in delta.items():
        memory = memory_of(module_at(model, site))
        weights = memory.to(solving_dtype(memory))
        change = LowRank(change.left.to(weights), change.right.to(weights))
        edited[site] = cast_weights(weights + change.dense(), memory.dtype, site)
    for site, memory in edited.items():
        write_memory(module_at(model, site), memory)


def cpu_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU, as safetensors needs it."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def delta_file(path: str | Path) -> Path:
    """Return the file that `save_delta` writes for a path."""
    path = Path(path).expanduser()
    return path if path.suffix == ".safetensors" else path / DELTA_FILE
