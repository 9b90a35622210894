"""The state of a layer: what it carries from one token to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor


@dataclass(frozen=True, eq=False)
class State:
    """The memory of a layer. A field is a tensor with the batch first, a tuple of such tensors, or None."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same state with every tensor changed."""

        def changed(field: Tensor | tuple[Tensor, ...] | None) -> Tensor | tuple[Tensor, ...] | None:
            if isinstance(field, tuple):
                return tuple(map(change, field))
            return None if field is None else change(field)

        return replace(self, **{name: changed(getattr(self, name)) for name in self.__dataclass_fields__})

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the state, in the order of the fields."""
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        return [
            tensor for field in fields if field is not None for tensor in (field if type(field) is tuple else [field])
        ]

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
