"""Reject a model folder whose config states sizes that its weights cannot have, before the model is built."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rebind.errors import InputError

LAYERS = re.compile(r"(n|num|encoder|decoder)_(hidden_|encoder_|decoder_)?layers?")
SIZES = re.compile(r".*(_size|_dim|_heads|_experts|_embeddings|_positions|_inner|_embd|_width)|n_head|d_\w+|vocab\w*")
MAX_SIZE = 2**31
MAX_LAYERS = 10_000  # where the tensors cannot be counted
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors


def require_plausible(config: Mapping[str, Any], folder: Path) -> None:
    """Raise if a config states more layers than the folder has tensors, or a size that no model has."""
    fields = list(_numbers(config))
    if not fields:
        return
    tensors = sum(map(_count_tensors, folder.glob("*.safetensors")))
    for name, value in fields:
        is_layers = LAYERS.fullmatch(name) is not None
        if (is_layers and value > (tensors or MAX_LAYERS)) or (SIZES.fullmatch(name) and abs(value) > MAX_SIZE):
            raise InputError(
                f"{folder / 'config.json'} states {name} = {value!s:.40}, and the folder has {tensors} tensors",
                expected="a config that belongs to the weights",
                advice="Restore config.json from the original model",
                code="implausible_config",
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the integers of a config, and of the configs inside it."""
    configs: list[Mapping[str, Any]] = [config]
    for mapping in configs:
        configs += [value for value in mapping.values() if isinstance(value, dict)]
        yield from ((name, value) for name, value in mapping.items() if type(value) is int)


def _count_tensors(file: Path) -> int:
    """Return the number of tensors in a safetensors file, from its header; 0 if it has none."""
    try:
        with file.open("rb") as data:
            (size,) = struct.unpack("<Q", data.read(8))
            return len(json.loads(data.read(size))) if size <= MAX_HEADER_BYTES else 0
    except (OSError, ValueError, RecursionError, TypeError, struct.error):
        return 0  # the loader will report what is wrong with the file
