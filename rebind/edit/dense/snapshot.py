"""The rows of a dense memory as a snapshot of a ledger (`rebind.edit.ledger.snapshots`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from rebind.edit.dense.fold import DenseFold
from rebind.edit.ledger.snapshots import Snapshots, arithmetic
from rebind.memory.dense import MANY, Dense, Whitening

KIND = "rows"
PARTS = ("keys", "values", "thresholds", "owner")


def store_fold(snapshots: Snapshots, fold: DenseFold, whitenings: Mapping[int, Whitening], seconds: float) -> bool:
    """Store a fold that took so many seconds, if that is worth it; return whether it was."""
    if fold.removable or not fold.memories:
        return False
    tensors = {f"{layer}/{part}": getattr(memory, part) for layer, memory in fold.memories.items() for part in PARTS}
    if not snapshots.is_worth(seconds, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())):
        return False
    tensors["tokens"] = torch.from_numpy(fold.tokens.astype("<i8", copy=True))
    tensors |= {"layers": torch.from_numpy(fold.layers), "counts": torch.from_numpy(fold.counts)}
    kind = f"{KIND}-{_basis(whitenings, fold)}"
    snapshots.replace(KIND, snapshots.write_tensors(kind, tensors))
    return True


def stored_fold(snapshots: Snapshots, whitenings: Mapping[int, Whitening]) -> DenseFold | None:
    """Return the fold that was stored last, if its keys were whitened as they would be now."""
    for name in reversed(snapshots.names(KIND)):
        tensors = snapshots.read_tensors(name)
        if tensors is None:
            continue
        layers = sorted({int(part.partition("/")[0]) for part in tensors if "/" in part})
        if any(layer not in whitenings for layer in layers):
            continue
        memories = {layer: _memory(tensors, layer, whitenings[layer].mean.device) for layer in layers}
        tokens = tensors["tokens"].numpy().astype("<u8")
        fold = DenseFold(tokens, tensors["layers"].numpy(), tensors["counts"].numpy(), memories)
        if name.split("-")[1] == _basis(whitenings, fold):
            return fold
    return None


def _memory(tensors: Mapping[str, Tensor], layer: int, device: torch.device) -> Dense:
    keys, values, thresholds, owner = (tensors[f"{layer}/{part}"].to(device) for part in PARTS)
    memory = Dense(keys, values, thresholds, owner=owner)
    return memory.with_cells() if len(memory) > MANY else memory


def _basis(whitenings: Mapping[int, Whitening], fold: DenseFold) -> str:
    """Return a digest of what the keys of a fold depend on besides the edits."""
    digest = sha256()
    for layer, memory in sorted(fold.memories.items()):
        whitening = whitenings[layer]
        digest.update(json.dumps([layer, arithmetic(memory.keys.device)]).encode())
        for tensor in (whitening.mean, whitening.factor.diagonal(), whitening.factor[-1]):
            digest.update(np.ascontiguousarray(tensor.cpu().numpy()).tobytes())
    return digest.hexdigest()[:32]
