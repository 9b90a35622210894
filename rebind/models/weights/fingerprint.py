"""The fingerprint of a model: a digest of all of its weights, by which ledgers and caches identify the model.

Half a gigabyte of weights takes about a second. A model that is loaded from files is hashed once, and its
fingerprint is cached under the names, sizes, times and inodes of the files.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rebind.errors import InputError, StorageError
from rebind.models.weights.placement import named_weights
from rebind.storage import cache_dir, path_inside, read_sealed_json, seal_json, write_json

FOLDER, VERSION = "fingerprints", 2  # increase the version when fingerprints change


def fingerprint(model: nn.Module) -> str:
    """Return a sha256 (hex) that is equal for two models if and only if their weights are equal, on any devices.

    For each parameter (tied ones once) it covers the name, shape and dtype, and every bit.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    digest = hashlib.sha256(str(kind).encode())
    for name, weight in named_weights(model):
        if weight.is_meta:
            raise InputError(
                f"{name} is on the meta device, without values",
                expected="weights in memory, or offloaded by accelerate",
                advice="Load the model with from_pretrained",
                code="offloaded_weights",
            )
        digest.update(f"\n{name} {list(weight.shape)} {weight.dtype}\n".encode() + _digest(weight))
    return digest.hexdigest()


def fingerprint_of_files(model: nn.Module, folder: Path) -> str:
    """Return the fingerprint of a model that was just loaded from a folder: computed once, then read from the cache."""
    file = path_inside(cache_dir(), f"{FOLDER}/{_identity(model, folder)}.json")
    stored = (read_sealed_json(file) or {}).get("fingerprint")
    if isinstance(stored, str) and len(stored) == 64:
        return stored
    computed = fingerprint(model)
    with suppress(StorageError):  # without the cache only time is lost
        write_json(file, seal_json({"fingerprint": computed}))
    return computed


def _digest(parameter: Tensor) -> bytes:
    data: Any = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # a view of its memory
    return hashlib.sha256(data).digest()


def _identity(model: nn.Module, folder: Path) -> str:
    """Return a digest of what the weights of a model from a folder depend on."""
    files = []
    for file in sorted(folder.iterdir()):
        status = file.stat()
        files.append([file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev])
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    inputs = [VERSION, type(model).__name__, dtypes, files, version("transformers"), torch.__version__]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]
