"""Layers that read one sequence from another: a source is written once, and targets read it in any order.

`CrossFastWeight` compresses the source to one matrix per head; `CrossAttention`, the baseline, stores every token.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Generic

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.memory.features import Feature
from rebind.memory.precision import working_dtype
from rebind.nn.layers.attention import AttentionState
from rebind.nn.layers.base import S
from rebind.nn.layers.fast_weight import FastWeightState
from rebind.nn.parts.checks import head_width, require_rows, require_sequence
from rebind.nn.parts.feature_map import FeatureMap, Normalizer
from rebind.nn.parts.padding import zero_padding
from rebind.precision import without_autocast


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
        require_rows(x, len(state.tensors[0]))
        read = self._read(self.q_proj(x).unflatten(-1, (self.heads, -1)), state)
        return self.o_proj(read.flatten(-2).to(x.dtype))

    @abstractmethod
    def _write(self, k: Tensor, v: Tensor, mask: Tensor | None) -> S:
        """Return the state of keys and values [B, S, heads, head_dim]."""

    @abstractmethod
    def _read(self, q: Tensor, state: S) -> Tensor:
        """Return what queries [B, T, heads, head_dim] read, of the same shape."""


class CrossFastWeight(CrossLayer[FastWeightState]):
    """W = Σ v φ(k)ᵀ over the source, and W φ(q) for every target: non-causal linear attention.

    However long the source is, its state is a matrix [head_dim, width of φ(k)] per head.

    Args:
        dim: Width of the targets and of the output.
        heads: Number of memories, which share `dim` evenly.
        source_dim: Width of the source. None: dim.
        feature: φ, for keys dim / heads wide.
        normalizer: As in `FastWeight`; by default reads are divided by z·φ(q), as in softmax.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        source_dim: int | None = None,
        feature: str | Feature = "elu+1",
        normalizer: str | Normalizer = "attention",
    ) -> None:
        super().__init__(dim, heads, source_dim=source_dim)
        self.phi = FeatureMap(feature, normalizer, self.head_dim)

    @property
    def state_size(self) -> int:
        """Heads × width of φ(k) × head_dim."""
        return self.heads * self.phi.width * self.head_dim

    def _write(self, k: Tensor, v: Tensor, mask: Tensor | None) -> FastWeightState:
        with without_autocast(v):
            k, v = zero_padding(self.phi.key(k), mask), self.phi.normalizer.value(v)
            wide = working_dtype(v)
            return FastWeightState(torch.einsum("bshv,bshk->bhvk", v.to(wide), k.to(wide)))

    def _read(self, q: Tensor, state: FastWeightState) -> Tensor:
        with without_autocast(q):
            out = torch.einsum("bhvk,bthk->bthv", state.memory, self.phi.query(q).to(state.memory.dtype))
            return self.phi.normalizer.read(out)


class CrossAttention(CrossLayer[AttentionState]):
    """softmax(q·k / √head_dim) over the whole source, without positions.

    Args:
        dim: Width of the targets and of the output.
        heads: Number of heads, which share `dim` evenly.
        source_dim: Width of the source. None: dim.
    """

    grows = True

    @property
    def state_size(self) -> int:
        """Numbers stored per token of the source: a key and a value."""
        return 2 * self.dim

    def _write(self, k: Tensor, v: Tensor, mask: Tensor | None) -> AttentionState:
        return AttentionState(k.transpose(1, 2), v.transpose(1, 2), real=mask)

    def _read(self, q: Tensor, state: AttentionState) -> Tensor:
        real = None if state.real is None else state.real[:, None, None, :]
        read = functional.scaled_dot_product_attention(
            q.transpose(1, 2), state.keys.to(q.dtype), state.values.to(q.dtype), attn_mask=real
        )
        return read.transpose(1, 2)
