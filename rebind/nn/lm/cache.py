"""The layers' states as transformers' cache: what `generate` carries, reorders and repeats."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from rebind.errors import InputError
from rebind.nn.parts.state import State


class RebindCache(Cache):
    """One state a layer. Of constant size, unless a layer is softmax attention."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.states: list[State | None] = [None] * layers
        self.seen = 0  # tokens, padding included

    def __repr__(self) -> str:
        return f"RebindCache({len(self.states)} layers, {self.seen} tokens, {self.size} numbers a sequence)"

    def __copy__(self) -> RebindCache:
        """One that goes on by itself: a single token changes the memory that it is given in place."""
        made = RebindCache(len(self))
        made.states, made.seen = [None if state is None else state.clone() for state in self.states], self.seen
        return made

    def __len__(self) -> int:
        return len(self.states)

    @property
    def size(self) -> int:
        """Numbers held for one sequence."""
        return sum(state.size for state in self.states if state is not None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return next((len(tensor) for state in self.states if state is not None for tensor in state.tensors), -1)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.seen > 0

    @property
    def is_croppable(self) -> bool:
        return False

    def reset(self) -> None:
        self.states, self.seen = [None] * len(self.states), 0

    def detach(self) -> RebindCache:
        """Cut the graph: the next segment trains on these states and not through them. Changes this cache."""
        self.states = [None if state is None else state.detach() for state in self.states]
        return self

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.as_tensor(indices)
        self.states = [None if state is None else state.select(rows) for state in self.states]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.states = [None if state is None else state.repeat(repeats) for state in self.states]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise InputError(
                f"cannot take back {tokens_to_remove} tokens, a rewritten memory holds no past: decode without "
                f"assisted or speculative generation, or keep [state.clone() for state in cache.states]"
            )
