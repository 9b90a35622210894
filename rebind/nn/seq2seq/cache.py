"""What a decoder carries from token to token: its own states, and the source as each layer wrote it."""

from __future__ import annotations

from collections.abc import Callable

from rebind.nn.lm.cache import RebindCache
from rebind.nn.parts.state import State


class RebindSeq2SeqCache(RebindCache):
    """One state and one source per layer. Its size is constant except for softmax attention."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.sources: list[State | None] = [None] * layers

    @property
    def size(self) -> int:
        return super().size + sum(source.size for source in self.sources if source is not None)

    def reset(self) -> None:
        super().reset()
        self.sources = [None] * len(self.sources)

    def _change(self, change: Callable[[State], State]) -> None:
        super()._change(change)
        self.sources = [None if source is None else change(source) for source in self.sources]
