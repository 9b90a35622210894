"""Latent attention: softmax attention that stores one narrow vector per token, from which every head makes its keys.

    c = norm(W_c x)   r = W_r x          k_h = [U_h c, r]   v_h = V_h c          q_h = W_q x, of the width of k_h

The state is c and r of every token, instead of keys and values of every head (DeepSeek-V2, Kimi Linear, Ling 3.0).
Rotary positions, if any, are those of r and of the part of the queries that meets it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.nn.layers.attention import Rotary, attention_mask, join_masks
from rebind.nn.layers.base import SequenceLayer, State
from rebind.nn.parts.checks import require_positive
from rebind.nn.parts.dense import RMSNorm
from rebind.nn.parts.padding import token_positions, zero_padding


@dataclass(frozen=True, eq=False)
class LatentState(State):
    """c and r of every token."""

    latents: Tensor  # [B, S, rank + shared_dim], r rotated
    real: Tensor | None = None  # [B, S] true for real tokens; None: all are


class LatentAttention(SequenceLayer[LatentState]):
    """Causal softmax attention over keys and values that are made of a latent vector per token.

    Args:
        dim: Width of the input and the output.
        heads: Number of heads.
        rank: Width of c.
        key_dim: Width of the part of a key that is made of c. None: dim / heads.
        shared_dim: Width of r, the part of a key that all heads share.
        d_v: Width of the values of a head. None: dim / heads.
        query_rank: Width between the two matrices that W_q is the product of, with a norm there. None: one matrix.
        rotary: Rotary positions of r. None: no positions.
        head_gate: Whether the read of each head is multiplied by σ(w·x).
        norm_eps: ε of the norm of c.
    """

    state_type = LatentState
    grows = True
    splits = False

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rank: int,
        shared_dim: int,
        key_dim: int | None = None,
        d_v: int | None = None,
        query_rank: int | None = None,
        rotary: Rotary | None = Rotary(),  # noqa: B008 - frozen
        head_gate: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, heads, d_v)
        require_positive(rank=rank, shared_dim=shared_dim)
        self.rank, self.shared_dim, self.rotary = rank, shared_dim, rotary
        self.key_dim, self.d_v = key_dim or dim // heads, self.head_dim
        if rotary is not None:
            rotary.width(shared_dim)
        queries = heads * (self.key_dim + shared_dim)
        self.q_down = None if query_rank is None else nn.Linear(dim, query_rank, bias=False)
        self.q_norm = None if query_rank is None else RMSNorm(query_rank, norm_eps)
        self.q_proj = nn.Linear(query_rank or dim, queries, bias=False)
        self.kv_down = nn.Linear(dim, rank + shared_dim, bias=False)
        self.kv_norm = RMSNorm(rank, norm_eps)
        self.kv_up = nn.Linear(rank, heads * (self.key_dim + self.d_v), bias=False)
        self.g_proj = nn.Linear(dim, heads, bias=False) if head_gate else None
        self.o_proj = nn.Linear(heads * self.d_v, dim, bias=False)

    @property
    def state_size(self) -> int:
        """Numbers stored per token of the context."""
        return self.rank + self.shared_dim

    def initial_state(self, batch: int) -> LatentState:
        return LatentState(self.kv_down.weight.new_zeros(batch, 0, self.state_size))

    def _run(self, x: Tensor, state: LatentState | None, mask: Tensor | None) -> tuple[Tensor, LatentState]:
        start = self.initial_state(len(x)) if state is None else state
        x, past = zero_padding(x, mask), start.latents.shape[1]
        real = join_masks(past, start.real, mask, x)
        positions = token_positions(past, x.shape[1], real, x.device)
        queries, latents = self._project(x, positions)
        end = LatentState(torch.cat([start.latents.to(latents.dtype), latents], dim=1), real)
        keys, values = self._expand(end.latents)
        allowed = attention_mask(past, x.shape[1], real, None, x.device)
        causal = allowed is None and past == 0 and x.shape[1] > 1
        read = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, is_causal=causal)
        read = read.transpose(1, 2)  # [B, T, heads, d_v]
        if self.g_proj is not None:
            read = read * torch.sigmoid(self.g_proj(x)).unsqueeze(-1)
        return self.o_proj(read.flatten(-2).to(x.dtype)), end

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [B, heads, T, key_dim + shared_dim], and c and r of each token [B, T, rank + shared_dim]."""
        narrow = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        queries = self.q_proj(narrow).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, shared = self.kv_down(x).split([self.rank, self.shared_dim], dim=-1)
        if self.rotary is not None:
            plain, turned = queries.split([self.key_dim, self.shared_dim], dim=-1)
            turned, shared = self.rotary.rotate(positions, turned, shared.unsqueeze(1))
            queries, shared = torch.cat([plain, turned], dim=-1), shared.squeeze(1)
        return queries, torch.cat([self.kv_norm(latent), shared], dim=-1)

    def _expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of every head [B, heads, S, width]."""
        latent, shared = latents.split([self.rank, self.shared_dim], dim=-1)
        expanded = self.kv_up(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys, values = expanded.split([self.key_dim, self.d_v], dim=-1)
        return torch.cat([keys, shared.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1), values
