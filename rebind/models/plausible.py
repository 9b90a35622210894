"""Refuse a model folder whose config states sizes that its weights cannot have, before a model is built from it."""

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
LARGEST_SIZE = 2**31
MOST_LAYERS = 10_000  # where the tensors cannot be counted
LARGEST_HEADER = 100_000_000  # bytes, as in safetensors


def require_plausible(config: Mapping[str, Any], folder: Path) -> None:
    """Raise if a config states more layers than the folder has tensors, or a size that no model has."""
    fields = list(_numbers(config))
    if not fields:
        return
    tensors = sum(map(_count_tensors, folder.glob("*.safetensors")))
    for name, value in fields:
        is_layers = LAYERS.fullmatch(name) is not None
        if (is_layers and value > (tensors or MOST_LAYERS)) or (SIZES.fullmatch(name) and abs(value) > LARGEST_SIZE):
            raise InputError(
                f"{folder / 'config.json'} states {name} = {value!s:.40}, and the folder has {tensors} tensors",
                expected="a config that belongs to the weights",
                advice="Restore config.json from the original model",
                code="implausible_config",
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the integers of a config, and of the configs inside it."""
    pending: list[Mapping[str, Any]] = [config]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, int) and not isinstance(value, bool):
                yield name, value


def _count_tensors(file: Path) -> int:
    """Return the number of tensors in a safetensors file, from its header; 0 if it has none."""
    try:
        with file.open("rb") as data:
            (size,) = struct.unpack("<Q", data.read(8))
            return len(json.loads(data.read(size))) if size <= LARGEST_HEADER else 0
    except (OSError, ValueError, RecursionError, TypeError, struct.error):
        return 0  # the loader says what is wrong with it
