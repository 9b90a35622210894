"""The change alone: one safetensors file, to be added to the base model again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from rebind.edit.export.listing import add_to_list
from rebind.edit.export.low_rank_change import require_changes, require_fitting
from rebind.errors import InputError, NumericalError
from rebind.files import write_atomically
from rebind.memory.low_rank import LowRank
from rebind.memory.precision import solving_dtype
from rebind.models.sites import memory_of, module_at, write_memory

DELTA_FORMAT, DELTA_FILE = "rebind-delta-1", "delta.safetensors"


def save_delta(
    changes: Mapping[str, LowRank],
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """The changes as one safetensors file of `{site}/left` and `{site}/right`, in the dtype they have.

    `path` is a file name that ends in .safetensors, or a folder to put delta.safetensors in. A "fingerprint" in
    the metadata names the base model; `load_delta` can ask for it.
    """
    require_changes(changes)
    told = {**(metadata or {}), "format": DELTA_FORMAT}
    for name, value in told.items():
        if not isinstance(value, str):
            raise InputError(
                f"metadata {name!r} is a {type(value).__name__}, expected a text: safetensors keeps only texts there, "
                f"so convert it, with json.dumps for instance"
            )
    file = delta_file(path)
    if file.exists() and not overwrite:
        raise InputError(f"{file} is there already, expected a new name: choose another, or pass overwrite=True")
    tensors = {
        f"{site}/{part}": storable(tensor)
        for site, change in changes.items()
        for part, tensor in (("left", change.left), ("right", change.right))
    }
    data = save(tensors, told)
    add_to_list(file, data)
    write_atomically(file, data)
    return file


def load_delta(path: str | Path, fingerprint: str | None = None) -> dict[str, LowRank]:
    """The changes that `save_delta` wrote; with a fingerprint, only if they were made for that base model."""
    file = delta_file(path)
    told = delta_metadata(file)
    if fingerprint is not None and told.get("fingerprint", fingerprint) != fingerprint:
        raise InputError(
            f"{file} was made for model {told['fingerprint'][:12]}…, this one is {fingerprint[:12]}…: "
            f"load the model it was made for"
        )
    with _readable(file), safe_open(str(file), framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in tuple(stored.keys())}
    sites = dict.fromkeys(name.rpartition("/")[0] for name in tensors)
    try:
        return {site: LowRank(tensors[f"{site}/left"], tensors[f"{site}/right"]) for site in sites}
    except KeyError as problem:
        raise InputError(
            f"{file} has no tensor {problem}, expected left and right of each site: save it anew"
        ) from None


def delta_metadata(path: str | Path) -> dict[str, str]:
    """What `save_delta` was told about the changes."""
    file = delta_file(path)
    with _readable(file), safe_open(str(file), framework="pt") as stored:
        told = dict(stored.metadata() or {})
    if told.get("format") != DELTA_FORMAT:
        raise InputError(
            f"{file} has format {told.get('format')!r}, expected {DELTA_FORMAT!r}: pass a file that save_delta wrote"
        )
    return told


def apply_delta(model: nn.Module, delta: Mapping[str, LowRank]) -> None:
    """Add the changes to the model's weights, to all of them or to none; summed in float64, cast once."""
    require_fitting(model, delta)
    changed = {}
    for site, change in delta.items():
        memory = memory_of(module_at(model, site))
        full = memory.to(solving_dtype(memory))
        changed[site] = (full + LowRank(change.left.to(full), change.right.to(full)).dense()).to(memory.dtype)
        if not torch.isfinite(changed[site]).all():
            raise NumericalError(
                f"the change makes {site} infinite in {memory.dtype}, expected finite weights: "
                f"load the model in a wider dtype"
            )
    for site, memory in changed.items():
        write_memory(module_at(model, site), memory)


def storable(tensor: Tensor) -> Tensor:
    """As safetensors wants it: on the CPU, in order, sharing storage with nothing."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def delta_file(path: str | Path) -> Path:
    path = Path(path).expanduser()
    return path if path.suffix == ".safetensors" else path / DELTA_FILE


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as problem:
        raise InputError(f"{file} cannot be read ({problem}), expected a file that save_delta wrote") from problem
