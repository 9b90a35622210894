"""The state of a layer: what it carries from one token to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

from torch import Tensor

Field = Tensor | tuple[Tensor, ...] | None


@dataclass(frozen=True, eq=False)
class State:
    """The memory of a layer. A field is a tensor with the batch first, a tuple of such tensors, or None."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same state with every tensor changed."""
        return replace(self, **{field.name: _map(getattr(self, field.name), change) for field in fields(self)})

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the state, in the order of the fields."""
        return [tensor for name in self.__dataclass_fields__ for tensor in _tensors(getattr(self, name))]

    def detach(self) -> Self:
        """Return the state without its graph, to train on a next segment without back-propagating through this one."""
        return self.map(Tensor.detach)

    def clone(self) -> Self:
        """Return a copy that `step`, which writes in place, does not change."""
        return self.map(Tensor.clone)

    def select(self, rows: Tensor) -> Self:
        """Return these sequences of the batch, in this order; a row may occur more than once."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def repeat(self, times: int) -> Self:
        """Return every sequence `times` times in a row."""
        return self.map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    @property
    def size(self) -> int:
        """Numbers stored for one sequence, including a denominator's row and a convolution's window."""
        return sum(tensor[0].numel() for tensor in self.tensors if tensor.is_floating_point() and len(tensor))


def _map(field: Field, change: Callable[[Tensor], Tensor]) -> Field:
    if isinstance(field, tuple):
        return tuple(change(tensor) for tensor in field)
    return None if field is None else change(field)


def _tensors(field: Field) -> tuple[Tensor, ...]:
    if isinstance(field, tuple):
        return field
    return () if field is None else (field,)


@dataclass(frozen=True, eq=False)
class EmptyState(State):
    """The state of a layer that remembers nothing of the sequence."""
