"""The contracts of layers: over one sequence, and between two; and the state that they carry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from rebind.errors import InputError
from rebind.nn.parts.checks import head_width, require_rows, require_sequence
from rebind.nn.parts.documents import Documents, as_documents
from rebind.ops.sequence_parallel import current_split


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
        tuples = [field if isinstance(field, tuple) else (field,) for field in fields if field is not None]
        return [tensor for field in tuples for tensor in field]

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


S = TypeVar("S", bound=State)


class SequenceLayer(nn.Module, Generic[S]):
    """A causal map [B, T, dim] → [B, T, dim] with a state to continue from.

    `forward` over a sequence, `forward` over its segments with the state carried along, and `step` over its tokens give
    the same numbers. `mask` [B, T] is true for real tokens. The others are not written and do not count, wherever they
    are, and the output at their positions has no meaning.
    """

    state_type: type[S]  # what `initial_state` returns
    grows: ClassVar[bool] = False  # whether the state gets larger with every token
    splits: ClassVar[bool] = True  # whether it can read a segment of a sequence that is split over processes

    def __init__(self, dim: int, heads: int, head_dim: int | None = None) -> None:
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_width(dim, heads, head_dim)

    @abstractmethod
    def initial_state(self, batch: int) -> S:
        """Return the state before the first token."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Numbers in the memory of one sequence, or per token of it if the state grows."""

    def size_after(self, tokens: int) -> int:
        """Return the numbers in the memory of one sequence of so many tokens."""
        return self.state_size * tokens if self.grows else self.state_size

    def forward(
        self,
        x: Tensor,
        state: S | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | Documents | None = None,
    ) -> tuple[Tensor, S]:
        """Read a sequence x [B, T, dim]; return the output [B, T, dim] and the state after it.

        With boundaries `cu_seqlens` [N + 1] = 0, …, T, x [1, T, dim] is N documents end to end, which do not see each
        other. There is then one state for each of them.
        """
        require_sequence("x", x, self.dim, mask)
        if current_split() is not None:
            self._check_split(is_plain=state is None and mask is None and cu_seqlens is None)
        if cu_seqlens is None:
            self._check_state(state, len(x))
            return self._run(x, state, mask)
        if not isinstance(cu_seqlens, Documents):
            cu_seqlens = as_documents(cu_seqlens, len(x), x.shape[1], mask)
        self._check_state(state, len(cu_seqlens))
        return self._run_documents(x, state, cu_seqlens)

    @abstractmethod
    def _run(self, x: Tensor, state: S | None, mask: Tensor | None) -> tuple[Tensor, S]:
        """Do what `forward` does, for arguments that were checked and rows that are one sequence each."""

    def _run_documents(self, x: Tensor, state: S | None, documents: Documents) -> tuple[Tensor, S]:
        """Do what `forward` does for documents, here with a row for each of them."""
        out, state = self._run(documents.to_rows(x), state, documents.mask)
        return documents.from_rows(out), state

    @torch.no_grad()
    def step(self, x: Tensor, state: S, mask: Tensor | None = None) -> tuple[Tensor, S]:
        """Read one token x [B, dim] without gradients. Its memory may be changed in place: do not use `state` again."""
        require_sequence("x", x, self.dim, mask, rank=2)
        out, state = self.forward(x.unsqueeze(1), state, None if mask is None else mask.unsqueeze(1))
        return out.squeeze(1), state

    def advance(
        self, x: Tensor, state: S | None, mask: Tensor | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, S]:
        """Do what `forward` does, by the faster `step` where one token follows a state and nothing is trained."""
        if x.shape[1] != 1 or state is None or torch.is_grad_enabled() or self.training:
            out: tuple[Tensor, S] = self(x, state, mask, documents)
            return out
        y, state = self.step(x.squeeze(1), state, None if mask is None else mask.squeeze(1))
        return y.unsqueeze(1), state

    def _check_state(self, state: S | None, sequences: int) -> None:
        """Check that the state is of this kind of layer, and for so many sequences."""
        if state is not None and not isinstance(state, self.state_type):
            expected = f"the {self.state_type.__name__} that this layer returned, or None to begin"
            raise InputError(f"The state is {type(state).__name__}", expected=expected, code="state_of_other_layer")
        for tensor in [] if state is None else state.tensors:
            require_rows(sequences, len(tensor))

    def _check_split(self, *, is_plain: bool) -> None:
        """Check that the layer can read a segment of a sequence that is split over processes."""
        if not self.splits:
            problem = f"{type(self).__name__} cannot read a sequence that is split over processes"
            advice = "Choose other layers, or one process per sequence"
            raise InputError(problem, expected="a layer whose state is a scan", advice=advice, code="layer_not_split")
        if not is_plain:
            problem = "A sequence that is split over processes has a state, padding or packed documents"
            raise InputError(problem, expected="none of them", code="split_sequence_not_plain")


class CrossLayer(nn.Module, Generic[S]):
    """The contract of a layer between two sequences: `write` a source once, read it with any targets."""

    grows: ClassVar[bool] = False  # whether the state is as long as the source

    def __init__(self, dim: int, heads: int, *, source_dim: int | None = None) -> None:
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_width(dim, heads)
        self.source_dim = dim if source_dim is None else source_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(self.source_dim, dim, bias=False)
        self.v_proj = nn.Linear(self.source_dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Numbers in the memory of one source, or per token of it if the state grows."""

    def write(self, source: Tensor, mask: Tensor | None = None) -> S:
        """Return the state of a source [B, S, source_dim]; `mask` [B, S] is true for real tokens."""
        require_sequence("source", source, self.source_dim, mask)
        k, v = (project(source).unflatten(-1, (self.heads, -1)) for project in (self.k_proj, self.v_proj))
        return self._write(k, v, mask)

    def forward(self, x: Tensor, state: S) -> Tensor:
        """Return what targets x [B, T, dim] read from the source, [B, T, dim]. The state does not change."""
        require_sequence("x", x, self.dim, None)
        require_rows(len(x), len(state.tensors[0]))
        read = self._read(self.q_proj(x).unflatten(-1, (self.heads, -1)), state)
        return self.o_proj(read.flatten(-2).to(x.dtype))

    @abstractmethod
    def _write(self, k: Tensor, v: Tensor, mask: Tensor | None) -> S:
        """Return the state of keys and values [B, S, heads, head_dim]."""

    @abstractmethod
    def _read(self, q: Tensor, state: S) -> Tensor:
        """Return what queries [B, T, heads, head_dim] read, of the same shape."""
