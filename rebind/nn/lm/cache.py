"""The states of all layers as a cache of transformers, which `generate` carries, reorders and repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor
from transformers import Cache

from rebind.errors import InputError
from rebind.nn.layers.base import State


class RebindCache(Cache):
    """One state per layer. Its size is constant unless a layer is softmax attention."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.states: list[State | None] = [None] * layers
        self.tokens_seen = 0  # padding included

    @classmethod
    def resolve(cls, cache: RebindCache | None, layers: int, *, use_cache: bool) -> Self | None:
        """Return the cache for a call of a model: `cache` if it fits, a new one if it is None, or none."""
        if cache is None:
            return cls(layers) if use_cache else None
        if isinstance(cache, cls) and len(cache) == layers:
            return cache
        expected = f"a {cls.__name__} of {layers} layers, as this model returned it, or None to begin"
        raise InputError(f"past_key_values is {cache!r}", expected=expected, code="cache_of_other_model")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} layers, {self.tokens_seen} tokens, {self.size} numbers per sequence)"

    def __copy__(self) -> Self:
        """Return a cache that continues independently: a single token changes its memory in place."""
        twin = type(self)(len(self))
        vars(twin).update(vars(self))
        twin._change(State.clone)
        return twin

    def __len__(self) -> int:
        return len(self.states)

    @property
    def size(self) -> int:
        """Numbers stored for one sequence."""
        return sum(state.size for state in self.states if state is not None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens_seen

    @property
    def is_croppable(self) -> bool:
        return False

    def reset(self) -> None:
        self.states, self.tokens_seen = [None] * len(self.states), 0

    def detach(self) -> Self:
        """Detach the states, so that the next segment trains on them but not through them. Changes this cache."""
        self._change(State.detach)
        return self

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.as_tensor(indices)
        self._change(lambda state: state.select(rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda state: state.repeat(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            advice = "Generate without assisted or speculative decoding, or restore an earlier copy.copy(cache)"
            raise InputError("A memory that was rewritten has no past", advice=advice, code="cache_not_croppable")

    def _change(self, change: Callable[[State], State]) -> None:
        self.states = [None if state is None else change(state) for state in self.states]
