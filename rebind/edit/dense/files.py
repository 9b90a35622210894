"""A dense memory as a folder, so that it can travel without the model, the ledger and the editor.

    memory.json          format, fingerprint and name of the model, the layers, the facts, the digest of the tensors
    memory.safetensors   "{layer}/keys", "{layer}/values", "{layer}/thresholds", "{layer}/owner" (the value of each
                         row), "{layer}/mean", "{layer}/factor", and "{layer}/probe", the whitened states of the base
                         model after the prompts in "probe_ids"

The probes tell whether another model computes the states that the memory was made for: the same weights in another
dtype or quantized do, although their bits, and so their fingerprints, differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from rebind.memory.dense import Dense, Whitening
from rebind.storage import check_json, read_file, replace_folder, seal_json, write_file, write_json

FORMAT = "rebind-memory-2"
MEMORY_FOLDER = "memory"  # of a checkpoint that carries a memory
HEADER, TENSORS = "memory.json", "memory.safetensors"
PARTS = ("keys", "values", "thresholds", "owner", "mean", "factor", "probe")  # of a layer
PROBE_IDS = "probe_ids"


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """The memory of one layer, with everything that is needed to read it."""

    block: str  # the name of the module behind which it is read
    memory: Dense
    whitening: Whitening
    probe: Tensor  # [p, d]: whitened states of the base model at the last tokens of the probes
    stream_axis: int | None = None  # see `Trunk.stream_axis`


@dataclass(frozen=True, eq=False)
class StoredMemory:
    """A dense memory and the model that it belongs to."""

    fingerprint: str
    model: str  # its name
    layers: Mapping[int, StoredLayer]
    probe_ids: Sequence[Sequence[int]]  # prompts that no fact is about
    facts: Sequence[Fact] = field(default_factory=tuple)

    @property
    def rows(self) -> int:
        return sum(len(layer.memory) for layer in self.layers.values())


def save_memory(stored: StoredMemory, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a memory into a folder, completely or not at all; return the folder."""
    return replace_folder(folder, lambda target: fill_folder(stored, target), kind="memory", overwrite=overwrite)


def fill_folder(stored: StoredMemory, folder: Path) -> None:
    """Write the files of a memory."""
    tensors = {PROBE_IDS: _pad(stored.probe_ids)}
    layers = {}
    for number, layer in stored.layers.items():
        memory, whitening = layer.memory, layer.whitening
        rows = (memory.keys, memory.values, memory.thresholds, memory.owner)
        parts = (*rows, whitening.mean, whitening.factor, layer.probe)
        tensors |= {f"{number}/{name}": _storable(part) for name, part in zip(PARTS, parts, strict=True)}
        layers[str(number)] = {
            "block": layer.block,
            "rows": len(memory),
            "beta": memory.beta,
            "top_k": memory.top_k,
            "stream_axis": layer.stream_axis,
        }
    data = save(tensors, metadata={"format": FORMAT})
    write_file(folder / TENSORS, data)
    header: dict[str, Any] = {
        "format": FORMAT,
        "model": stored.model,
        "fingerprint": stored.fingerprint,
        "layers": layers,
        "facts": [fact.to_json() for fact in stored.facts],
        "tensors": hashlib.sha256(data).hexdigest(),
    }
    write_json(folder / HEADER, seal_json(header))


def load_memory(folder: str | Path) -> StoredMemory:
    """Read the memory in a folder, or in a checkpoint; raise InputError if there is none, or one that was damaged."""
    folder = Path(folder).expanduser()
    if not (folder / HEADER).exists() and (folder / MEMORY_FOLDER / HEADER).exists():
        folder = folder / MEMORY_FOLDER
    header = _read_header(folder)
    try:
        data = read_file(folder / TENSORS)
        if hashlib.sha256(data).hexdigest() != header["tensors"]:
            raise ValueError("its digest does not match")
        tensors = load(data)
        layers = {int(number): _layer(tensors, number, about) for number, about in header["layers"].items()}
        probe_ids = [[id for id in row if id >= 0] for row in tensors[PROBE_IDS].tolist()]
        facts = [Fact.from_json(record) for record in header["facts"]]
        return StoredMemory(header["fingerprint"], header["model"], layers, probe_ids, facts)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as problem:
        raise InputError(
            f"{folder / TENSORS} is damaged ({problem})", advice="Write the memory again", code="memory_damaged"
        ) from None


def _read_header(folder: Path) -> dict[str, Any]:
    try:
        stored = json.loads(read_file(folder / HEADER))
        stated = stored["format"]
    except (FileNotFoundError, NotADirectoryError):
        expected = f"a folder that save_memory wrote, with a {HEADER}"
        raise InputError(f"There is no dense memory in {folder}", expected=expected, code="no_memory") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        advice = "Write the memory again"
        raise InputError(
            f"{folder / HEADER} cannot be read ({problem})", advice=advice, code="memory_damaged"
        ) from None
    if stated != FORMAT:
        raise InputError(
            f"{folder / HEADER} has the format {stated!r}",
            expected=FORMAT,
            advice="Use the version of rebind that wrote it",
            code="memory_format",
        )
    try:
        return check_json(stored)
    except ValueError as problem:
        raise InputError(
            f"{folder / HEADER} was altered ({problem})", advice="Write the memory again", code="memory_damaged"
        ) from None


def _layer(tensors: Mapping[str, Tensor], number: str, about: Mapping[str, Any]) -> StoredLayer:
    keys, values, thresholds, owner, mean, factor, probe = (tensors[f"{number}/{name}"] for name in PARTS)
    if len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < len(values):
        raise ValueError("it has rows without a value")
    memory = Dense(keys, values, thresholds, float(about["beta"]), int(about["top_k"]), owner)
    return StoredLayer(str(about["block"]), memory, Whitening(mean, factor), probe, about["stream_axis"])


def _storable(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


def _pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of token ids as one tensor, with −1 behind the shorter ones."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.long).reshape(len(rows), -1)
