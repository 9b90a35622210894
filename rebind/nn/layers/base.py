"""The contract of every sequence layer."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from rebind.errors import InputError
from rebind.nn.parts.checks import require_positive, require_rows, require_sequence
from rebind.nn.parts.state import State

S = TypeVar("S", bound=State)


class SequenceLayer(nn.Module, Generic[S]):
    """A causal map [B, T, dim] → [B, T, dim] with a state to continue from.

    `forward` over a sequence, `forward` over its segments with the state carried along, and `step` over its tokens give
    the same numbers. `mask` [B, T] is true for real tokens. The others are not written and do not count, wherever they
    are, and the output at their positions has no meaning.
    """

    state_type: type[S]  # what `initial_state` returns
    grows: ClassVar[bool] = False  # whether the state gets larger with every token

    def __init__(self, dim: int) -> None:
        super().__init__()
        require_positive(dim=dim)
        self.dim = dim

    @abstractmethod
    def initial_state(self, batch: int) -> S:
        """Return the state before the first token."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Numbers in the memory of one sequence, or per token of it if the state grows."""

    @abstractmethod
    def forward(self, x: Tensor, state: S | None = None, mask: Tensor | None = None) -> tuple[Tensor, S]:
        """Read a sequence x [B, T, dim]; return the output [B, T, dim] and the state after it."""

    @torch.no_grad()
    def step(self, x: Tensor, state: S, mask: Tensor | None = None) -> tuple[Tensor, S]:
        """Read one token x [B, dim] without gradients. Its memory may be changed in place: do not use `state` again."""
        self._check(x, state, mask, rank=2)
        out, state = self.forward(x.unsqueeze(1), state, None if mask is None else mask.unsqueeze(1))
        return out.squeeze(1), state

    def advance(self, x: Tensor, state: S | None, mask: Tensor | None = None) -> tuple[Tensor, S]:
        """Do what `forward` does, by the faster `step` where one token follows a state and nothing is trained."""
        if x.shape[1] != 1 or state is None or torch.is_grad_enabled() or self.training:
            out: tuple[Tensor, S] = self(x, state, mask)
            return out
        y, state = self.step(x.squeeze(1), state, None if mask is None else mask.squeeze(1))
        return y.unsqueeze(1), state

    def _check(self, x: Tensor, state: S | None, mask: Tensor | None, *, rank: int = 3) -> None:
        """Check the arguments of `forward`, or of `step` for `rank` 2."""
        require_sequence("x", x, self.dim, mask, rank=rank)
        if state is not None and not isinstance(state, self.state_type):
            raise InputError(
                f"The state is of type {type(state).__name__}",
                expected=f"the {self.state_type.__name__} that this layer returned, or None to begin",
                code="state_of_other_layer",
            )
        for tensor in [] if state is None else state.tensors:
            require_rows(x, len(tensor))

    def _check_or_begin(self, x: Tensor, state: S | None, mask: Tensor | None) -> S:
        """Check the arguments and return the state to start from."""
        self._check(x, state, mask)
        return self.initial_state(x.shape[0]) if state is None else state
