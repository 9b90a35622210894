"""Softmax attention, the baseline: its state is every key and value it has seen."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import SequenceLayer, head_width, key_heads_for
from rebind.nn.parts.padding import cleared
from rebind.nn.parts.state import State

ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, eq=False)
class AttentionState(State):
    """Keys and values so far, one of each a token: it grows."""

    keys: Tensor  # [B, key_heads, S, head_dim], rotated
    values: Tensor  # [B, key_heads, S, head_dim]
    count: Tensor  # [B] real tokens so far: the next one's position
    real: Tensor | None = None  # [B, S] which are real; None: all


class Attention(SequenceLayer[AttentionState]):
    """Causal softmax attention with rotary positions, by torch's scaled_dot_product_attention.

    Args:
        dim: Width of what goes in and comes out.
        heads: Query heads.
        head_dim: A head's width, even. None: dim / heads.
        key_heads: Fewer keys and values than queries, each shared by equally many. None: as many.
        rope_theta: The base of the rotary frequencies. None: no positions.
    """

    kind_of_state = AttentionState
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
        super().__init__(dim)
        self.heads = heads
        self.head_dim = head_width("head_dim", dim, heads, head_dim)
        self.key_heads = key_heads_for(heads, key_heads)
        if rope_theta is not None and self.head_dim % 2:
            raise InputError(
                f"head_dim is {self.head_dim}, expected an even number for rotary positions: choose heads that give "
                f"one, or rope_theta=None"
            )
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    @property
    def state_size(self) -> int:
        """Numbers held for every token of the context: key_heads × (key width + value width)."""
        return self.key_heads * 2 * self.head_dim

    def initial(self, batch: int) -> AttentionState:
        weight = self.k_proj.weight
        nothing = weight.new_zeros(batch, self.key_heads, 0, self.head_dim)
        return AttentionState(nothing, nothing, torch.zeros(batch, dtype=torch.long, device=weight.device))

    def forward(
        self, x: Tensor, state: AttentionState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        start = self._start(x, state, mask)
        x = cleared(x, mask)
        q, k, v = self._project(x, start.count, mask)
        seen = self._extended(start, k, v, mask)
        past = start.keys.shape[2]
        allowed = _allowed(past, x.shape[1], seen.real, x.device)
        causal = allowed is None and past == 0 and x.shape[1] > 1
        with _without_plans(q):
            read = functional.scaled_dot_product_attention(
                q, seen.keys, seen.values, attn_mask=allowed, is_causal=causal, enable_gqa=self.key_heads != self.heads
            )
        return self.o_proj(read.transpose(1, 2).flatten(-2).to(x.dtype)), seen

    @torch.no_grad()
    def step(self, x: Tensor, state: AttentionState, mask: Tensor | None = None) -> tuple[Tensor, AttentionState]:
        self._start(x, state, mask, rank=2)
        out, state = self.forward(x.unsqueeze(1), state, None if mask is None else mask.unsqueeze(1))
        return out.squeeze(1), state

    def _project(self, x: Tensor, count: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, heads, T, head_dim], q and k turned to their positions."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rope_theta is None:
            return q, k, v
        within = torch.arange(x.shape[1], device=x.device) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        angles = _angles(count[:, None] + within, self.head_dim, self.rope_theta, working_dtype(q))
        return _rotated(q, angles), _rotated(k, angles), v

    def _extended(self, state: AttentionState, k: Tensor, v: Tensor, mask: Tensor | None) -> AttentionState:
        """The state with these keys and values behind its own."""
        batch, _, length, _ = k.shape
        real = state.real
        if real is not None or mask is not None:
            ones = torch.ones(batch, max(length, state.keys.shape[2]), dtype=torch.bool, device=k.device)
            before = ones[:, : state.keys.shape[2]] if real is None else real
            real = torch.cat([before, ones[:, :length] if mask is None else mask], dim=1)
        return AttentionState(
            torch.cat([state.keys.to(k.dtype), k], dim=2),
            torch.cat([state.values.to(v.dtype), v], dim=2),
            state.count + (length if mask is None else mask.sum(1)),
            real,
        )


def _without_plans(q: Tensor) -> AbstractContextManager[None]:
    """For one token on a GPU, kernels that take any context: cuDNN's plans anew for each, milliseconds a layer."""
    if not q.is_cuda or q.shape[2] > 1:
        return nullcontext()
    return cast(AbstractContextManager[None], sdpa_kernel(ANY_LENGTH))


def _allowed(past: int, length: int, real: Tensor | None, device: torch.device) -> Tensor | None:
    """Which keys a query may see, [B or 1, 1, T, S]; None where plain causal attention says it."""
    if real is None and (past == 0 or length == 1):
        return None
    slots = torch.arange(past + length, device=device)
    own = torch.arange(past, past + length, device=device)[:, None]
    causal = slots <= own
    if real is None:
        return causal[None, None]
    return ((causal & real[:, None]) | (slots == own))[:, None]  # padding sees itself: a row must see something


def _angles(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Rotary angles [B, 1, T, width / 2] of positions [B, T]."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width)
    return (positions[..., None].to(dtype) * frequencies).unsqueeze(1)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + d/2}) turned by its angle."""
    first, second = x.to(angles.dtype).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
