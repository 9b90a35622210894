"""Softmax attention, the baseline, over one sequence and between two. Its state is every key and value so far."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import CrossLayer, SequenceLayer, State
from rebind.nn.parts.checks import require_multiple
from rebind.nn.parts.padding import token_positions, zero_padding

BACKENDS_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, eq=False)
class AttentionState(State):
    """One key and one value per token."""

    keys: Tensor  # [B, key_heads, S, head_dim], rotated
    values: Tensor  # [B, key_heads, S, head_dim]
    real: Tensor | None = None  # [B, S] true for real tokens; None: all are


class Attention(SequenceLayer[AttentionState]):
    """Causal softmax attention with rotary positions, by torch's scaled_dot_product_attention.

    Args:
        dim: Width of the input and the output.
        heads: Number of query heads.
        head_dim: Width of a head. None: dim / heads.
        key_heads: Number of key and value heads, each shared by equally many query heads. None: as many.
        rope_theta: Base of the rotary frequencies. None: no positions.
    """

    state_type = AttentionState
    grows = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        key_heads: int | None = None,
        rope_theta: float | None = 10_000.0,
    ) -> None:
        super().__init__(dim, heads, head_dim)
        self.key_heads = key_heads or heads
        require_multiple("The number of heads", heads, self.key_heads, "the number of key heads")
        if rope_theta is not None:
            require_multiple("The width of a head", self.head_dim, 2, "which rotary positions need")
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    @property
    def state_size(self) -> int:
        """Numbers stored per token of the context: a key and a value."""
        return 2 * self.key_heads * self.head_dim

    def initial_state(self, batch: int) -> AttentionState:
        empty = self.k_proj.weight.new_zeros(batch, self.key_heads, 0, self.head_dim)
        return AttentionState(empty, empty)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        start = self._check_or_begin(x, state, mask)
        x = zero_padding(x, mask)
        past, real = start.keys.shape[2], start.real
        if real is not None or mask is not None:
            ones = torch.ones(len(x), past + x.shape[1], dtype=torch.bool, device=x.device)
            parts = [ones[:, :past] if real is None else real, ones[:, past:] if mask is None else mask]
            real = torch.cat(parts, dim=1)
        q, k, v = self._project(x, past, real)
        keys, values = torch.cat([start.keys.to(k.dtype), k], dim=2), torch.cat([start.values.to(v.dtype), v], dim=2)
        end = AttentionState(keys, values, real)
        allowed = _attention_mask(past, x.shape[1], real, x.device)
        causal = allowed is None and past == 0 and x.shape[1] > 1
        # For a single token cuDNN would plan for every context length again, which takes milliseconds per layer.
        with sdpa_kernel(BACKENDS_WITHOUT_PLANS) if q.is_cuda and x.shape[1] == 1 else nullcontext():
            read = functional.scaled_dot_product_attention(
                q, end.keys, end.values, attn_mask=allowed, is_causal=causal, enable_gqa=self.key_heads != self.heads
            )
        return self.o_proj(read.transpose(1, 2).flatten(-2).to(x.dtype)), end

    def _project(self, x: Tensor, past: int, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [B, heads, T, head_dim], with q and k rotated to their positions among the real tokens."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rope_theta is None:
            return q, k, v
        positions = token_positions(past, x.shape[1], real, x.device)[:, None, :, None]
        powers = torch.arange(0, self.head_dim, 2, device=x.device, dtype=working_dtype(q)) / self.head_dim
        angles = positions.to(powers.dtype) * self.rope_theta**-powers  # [B or 1, 1, T, head_dim / 2]
        return _rotate(q, angles), _rotate(k, angles), v


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
        return AttentionState(k.transpose(1, 2), v.transpose(1, 2), mask)

    def _read(self, q: Tensor, state: AttentionState) -> Tensor:
        real = None if state.real is None else state.real[:, None, None, :]
        read = functional.scaled_dot_product_attention(
            q.transpose(1, 2), state.keys.to(q.dtype), state.values.to(q.dtype), attn_mask=real
        )
        return read.transpose(1, 2)


def _attention_mask(past: int, length: int, real: Tensor | None, device: torch.device) -> Tensor | None:
    """Return which keys each query may see, [B or 1, 1, T, S]; None where `is_causal` is enough."""
    if real is None and (past == 0 or length == 1):
        return None
    keys = torch.arange(past + length, device=device)
    queries = torch.arange(past, past + length, device=device)[:, None]
    causal = keys <= queries
    if real is None:
        return causal[None, None]
    allowed = (causal & real[:, None]) | (keys == queries)  # padding sees itself, since softmax of nothing is NaN
    return allowed[:, None]


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) by its angle."""
    first, second = x.to(angles.dtype).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
