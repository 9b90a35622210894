"""Softmax attention from one sequence to another: what `CrossFastWeight` is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import ShapeError
from rebind.nn.layers.base import head_width, require_mask, require_positive
from rebind.nn.parts.state import State


@dataclass(frozen=True, eq=False)
class CrossAttentionState(State):
    """The source's keys and values, one of each a token: as long as the source."""

    keys: Tensor  # [B, heads, S, head_dim]
    values: Tensor  # [B, heads, S, head_dim]
    real: Tensor | None = None  # [B, S] which are real; None: all


class CrossAttention(nn.Module):
    """softmax(q·k / √head_dim) over a whole source, with no positions and no order.

    The calls are those of `CrossFastWeight`: `write` the source once, read it with any targets.

    Args:
        dim: Width of source and targets, and of what comes out.
        heads: Heads.
        head_dim: A head's width. None: dim / heads.
    """

    def __init__(self, dim: int, heads: int, *, head_dim: int | None = None) -> None:
        super().__init__()
        require_positive(dim=dim)
        self.dim, self.heads = dim, heads
        self.head_dim = head_width("head_dim", dim, heads, head_dim)
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    @property
    def state_size(self) -> int:
        """Numbers held for every token of the source: heads × (key width + value width)."""
        return self.heads * 2 * self.head_dim

    def write(self, source: Tensor, mask: Tensor | None = None) -> CrossAttentionState:
        """Keys and values of a source [B, S, dim]; `mask` [B, S] is true for real tokens."""
        self._require_width("source", source)
        require_mask(mask, source)
        return CrossAttentionState(self._heads(self.k_proj(source)), self._heads(self.v_proj(source)), mask)

    def forward(self, x: Tensor, state: CrossAttentionState) -> Tensor:
        """What targets x [B, T, dim] read, [B, T, dim]."""
        self._require_width("x", x)
        if len(state.keys) != len(x):
            raise ShapeError(
                f"x holds {len(x)} sequences and the state {len(state.keys)}, expected as many: write the sources "
                f"that belong to these targets, or choose rows with state.select"
            )
        q = self._heads(self.q_proj(x))
        real = None if state.real is None else state.real[:, None, None, :]
        read = functional.scaled_dot_product_attention(
            q, state.keys.to(q.dtype), state.values.to(q.dtype), attn_mask=real
        )
        return self.o_proj(read.transpose(1, 2).flatten(-2).to(x.dtype))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def _require_width(self, name: str, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ShapeError(
                f"{name} is {list(x.shape)}, expected [B, T, {self.dim}]: this layer was made for that width"
            )
