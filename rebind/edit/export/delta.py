"""The delta file: the change alone, as safetensors, to be added to the base model again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from rebind.edit.export.low_rank_change import require_changes, require_matching
from rebind.errors import InputError, NumericalError
from rebind.memory.low_rank import LowRank
from rebind.memory.precision import solving_dtype
from rebind.models.sites import memory_of, module_at, write_memory
from rebind.storage import add_to_export, write_file

DELTA_FORMAT, DELTA_FILE = "rebind-delta-1", "delta.safetensors"


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
    if file.exists() and not overwrite:
        raise InputError(
            f"{file} already exists",
            advice="Choose another name, or use {overwrite} to replace it",
            settings={"overwrite": True},
            code="file_exists",
        )
    tensors = {
        f"{site}/{part}": storable(tensor)
        for site, change in changes.items()
        for part, tensor in (("left", change.left), ("right", change.right))
    }
    data = save(tensors, {**(metadata or {}), "format": DELTA_FORMAT})
    add_to_export(file)  # a file inside an export is replaced together with it
    write_file(file, data)
    return file


def load_delta(path: str | Path, fingerprint: str | None = None) -> dict[str, LowRank]:
    """Read the changes that `save_delta` wrote; with a fingerprint, only if they belong to that base model."""
    file = delta_file(path)
    try:
        with safe_open(str(file), framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in tuple(stored.keys())}
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
        edited[site] = (weights + change.dense()).to(memory.dtype)
        if not torch.isfinite(edited[site]).all():
            raise NumericalError(
                f"The change makes the weights of {site} infinite in {memory.dtype}",
                advice="Load the model in a wider dtype",
                code="weights_not_finite",
            )
    for site, memory in edited.items():
        write_memory(module_at(model, site), memory)


def storable(tensor: Tensor) -> Tensor:
    """Return a copy as safetensors needs it: on the CPU, contiguous, with storage of its own."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def delta_file(path: str | Path) -> Path:
    """Return the file that `save_delta` writes for a path."""
    path = Path(path).expanduser()
    return path if path.suffix == ".safetensors" else path / DELTA_FILE
