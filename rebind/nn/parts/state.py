"""What a layer carries from one token to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True, eq=False)
class State:
    """A layer's memory of what it has read. Every tensor has the batch first; a field may be None or a tuple."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same state with every tensor changed."""
        return replace(self, **{field.name: _mapped(getattr(self, field.name), change) for field in fields(self)})

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for name in self.__dataclass_fields__ for tensor in _tensors(getattr(self, name))]

    def detach(self) -> Self:
        """The same numbers, cut from the graph: train segment after segment without going back further."""
        return self.map(Tensor.detach)

    def clone(self) -> Self:
        """A copy that `step`, which writes in place, will not touch."""
        return self.map(Tensor.clone)

    def select(self, rows: Tensor) -> Self:
        """These sequences of the batch, in this order, repeated where named twice."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def repeat(self, times: int) -> Self:
        """Every sequence `times` times in a row."""
        return self.map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    @property
    def size(self) -> int:
        """Numbers held for one sequence, helpers included (a denominator's row, a convolution's window)."""
        return sum(tensor[0].numel() for tensor in self.tensors if tensor.is_floating_point() and len(tensor))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple) else []


@dataclass(frozen=True, eq=False)
class Empty(State):
    """The state of a layer that remembers nothing of the sequence."""
