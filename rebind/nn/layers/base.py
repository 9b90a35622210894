"""What every sequence layer promises."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from rebind.errors import InputError, ShapeError
from rebind.nn.parts.state import State

S = TypeVar("S", bound=State)


class SequenceLayer(nn.Module, Generic[S]):
    """[B, T, dim] → [B, T, dim], causal, with a state to go on from.

    `forward` over a sequence, `forward` over its pieces with the state carried, and `step` over its tokens give the
    same numbers. `mask` [B, T] is true for real tokens: the others are not written and do not count, wherever they
    stand, and what comes out at them means nothing.
    """

    kind_of_state: type[S]  # what `initial` makes
    grows: ClassVar[bool] = False  # whether the state gets larger with every token

    def __init__(self, dim: int) -> None:
        super().__init__()
        require_positive(dim=dim)
        self.dim = dim

    @abstractmethod
    def initial(self, batch: int) -> S:
        """The state before the first token."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Numbers in one sequence's memory; a token's where the state grows."""

    @abstractmethod
    def forward(self, x: Tensor, state: S | None = None, mask: Tensor | None = None) -> tuple[Tensor, S]:
        """Read a sequence x [B, T, dim]: what comes out [B, T, dim], and the state after it."""

    @abstractmethod
    def step(self, x: Tensor, state: S, mask: Tensor | None = None) -> tuple[Tensor, S]:
        """Read one token x [B, dim], without gradients. The given state is used up: its memory is changed in place."""

    def go_on(self, x: Tensor, state: S | None, mask: Tensor | None = None) -> tuple[Tensor, S]:
        """`forward`; by `step`, with the same numbers, where one token follows a state and nothing is trained."""
        if x.shape[1] != 1 or state is None or torch.is_grad_enabled() or self.training:
            return self(x, state, mask)
        out, state = self.step(x.squeeze(1), state, None if mask is None else mask.squeeze(1))
        return out.unsqueeze(1), state

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, S]:
        return super().__call__(*args, **kwargs)

    def _start(self, x: Tensor, state: S | None, mask: Tensor | None, rank: int = 3) -> S:
        """The state to start from, once everything fits."""
        self._check(x, state, mask, rank)
        return self.initial(x.shape[0]) if state is None else state

    def _check(self, x: Tensor, state: S | None, mask: Tensor | None, rank: int = 3) -> None:
        shape = "[B, T, dim]" if rank == 3 else "[B, dim]"
        other = "step takes one token" if rank == 2 else "one token goes to step"
        if x.ndim != rank:
            raise ShapeError(f"x has shape {list(x.shape)}, expected {shape}: {other}")
        if x.shape[-1] != self.dim:
            raise ShapeError(
                f"x {list(x.shape)} is {x.shape[-1]} wide, this layer takes {self.dim}: make the layer with "
                f"dim={x.shape[-1]}"
            )
        if 0 in x.shape:
            raise ShapeError(f"x is {list(x.shape)}, expected at least one token: leave empty batches out")
        require_mask(mask, x)
        if state is None:
            return
        if not isinstance(state, self.kind_of_state):
            raise InputError(
                f"state is a {type(state).__name__}, expected the {self.kind_of_state.__name__} of this layer: pass "
                f"what its forward returned, or None to begin"
            )
        rows = {len(tensor) for tensor in state.tensors}
        if rows - {x.shape[0]}:
            raise ShapeError(
                f"x holds {x.shape[0]} sequences and the state {max(rows)}, expected as many: begin with state=None, "
                f"or choose rows with state.select"
            )


def require_mask(mask: Tensor | None, x: Tensor) -> None:
    """One truth value a token."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise InputError(f"mask has dtype {mask.dtype}, expected bool, true for real tokens: pass mask.bool()")
    if mask.shape != x.shape[:-1]:
        raise ShapeError(
            f"mask is {list(mask.shape)}, expected one value a token, {list(x.shape[:-1])}: mask the tokens of this "
            f"call alone, not those before"
        )


def require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"{name} is {size!r}, expected a whole number of 1 or more: check the layer's arguments")


def head_width(name: str, dim: int, heads: int, width: int | None) -> int:
    """A head's width: the one given, or dim split evenly."""
    require_positive(heads=heads)
    if width is not None:
        require_positive(**{name: width})
        return width
    if dim % heads:
        raise ShapeError(
            f"dim is {dim} and heads {heads}, expected a multiple of heads to split into {name}: choose heads that "
            f"divide {dim}, or give {name}"
        )
    return dim // heads


def key_heads_for(heads: int, key_heads: int | None) -> int:
    """How many key heads: as many as value heads, or fewer that divide them."""
    found = heads if key_heads is None else key_heads
    require_positive(key_heads=found)
    if heads % found:
        raise ShapeError(
            f"heads is {heads} and key_heads {found}, expected key heads that divide the heads: each serves equally "
            f"many; choose a divisor of {heads}"
        )
    return found
