"""Memories between segments, as tensors that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindBlock, RebindForCausalLM


def flattened(caches: list[RebindCache]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the caches of all pieces of a batch, by name."""
    for piece, cache in enumerate(caches):
        for layer, state in enumerate(cache.states):
            for index, tensor in enumerate([] if state is None else state.tensors):
                yield f"{piece}.{layer}.{index}", tensor


def filled(
    model: RebindForCausalLM, pieces: int, rows: int, saved: Mapping[str, Tensor], seen: int, device: torch.device
) -> list[RebindCache]:
    """Caches that hold these tensors again."""
    caches = [RebindCache(len(model.model.layers)) for _ in range(pieces)]
    if not saved:
        return caches
    for piece, cache in enumerate(caches):
        cache.tokens_seen = seen
        for layer, block in enumerate(model.model.layers):
            empty = cast(RebindBlock, block).mixer.initial_state(rows)
            tensors = iter(saved[f"{piece}.{layer}.{index}"] for index in range(len(empty.tensors)))
            cache.states[layer] = empty.map(lambda old, tensors=tensors: next(tensors).to(device))
    return caches
