"""Values as bytes, for other processes: JSON, with tensors as safetensors. Nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

TENSOR = "$tensor"  # the only key of a dictionary that stands for a tensor
HEADER = 8  # bytes that hold the length of the JSON


def pack(value: Any) -> Tensor:
    """Return a value as bytes [n]: numbers, texts, None, lists, dictionaries with texts as keys, and tensors."""
    tensors: dict[str, Tensor] = {}

    def as_json(part: Any) -> Any:
        if isinstance(part, Tensor):
            name = str(len(tensors))
            tensors[name] = part.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share memory
            return {TENSOR: name}
        if isinstance(part, dict):
            return {name: as_json(inner) for name, inner in part.items()}
        return [as_json(inner) for inner in part] if isinstance(part, (list, tuple)) else part

    text = json.dumps(as_json(value)).encode()
    data = len(text).to_bytes(HEADER, "little") + text + (save(tensors) if tensors else b"")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack(message: Tensor) -> Any:
    """Return the value in a message; tuples have become lists, and tensors are on the CPU.

    >>> unpack(pack({"a": [1, (None, "x")]}))
    {'a': [1, [None, 'x']]}
    """
    data = message.numpy().tobytes()
    end = HEADER + int.from_bytes(data[:HEADER], "little")
    tensors = load(data[end:]) if len(data) > end else {}

    def restore(part: Any) -> Any:
        if isinstance(part, dict):
            if part.keys() == {TENSOR}:
                return tensors[part[TENSOR]]
            return {name: restore(inner) for name, inner in part.items()}
        return [restore(inner) for inner in part] if isinstance(part, list) else part

    return restore(json.loads(data[HEADER:end]))
