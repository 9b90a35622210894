"""What a decoder carries from token to token: its own states, and the source as each layer wrote it."""

from __future__ import annotations

from torch import Tensor

from rebind.nn.lm.cache import RebindCache
from rebind.nn.parts.state import State


class RebindSeq2SeqCache(RebindCache):
    """One state and one source a layer. Of constant size, but for softmax attention's keys and values."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.sources: list[State | None] = [None] * layers

    @property
    def size(self) -> int:
        return super().size + sum(source.size for source in self.sources if source is not None)

    def reset(self) -> None:
        super().reset()
        self.sources = [None] * len(self.sources)

    def detach(self) -> RebindSeq2SeqCache:
        super().detach()
        self.sources = [None if source is None else source.detach() for source in self.sources]
        return self

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.sources = [None if source is None else source.select(indices) for source in self.sources]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.sources = [None if source is None else source.repeat(repeats) for source in self.sources]
