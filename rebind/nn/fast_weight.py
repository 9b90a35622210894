"""A layer whose weights are rewritten at every token, by any rule and any feature map.

    q, k, v = W_q x, W_k x, W_v x          gates = σ(W_β x), the decay of `rebind.nn.gates`
    W ← α W (I − ε φ(k) φ(k)ᵀ) + η v φ(k)ᵀ
    y = W_o norm(W φ(q))

| model | rule | feature | normalise | besides |
| --- | --- | --- | --- | --- |
| Linear Transformer | sum | elu+1 | attention | |
| Performer | sum | favor | attention | |
| RFA | rfa | favor | attention | |
| Mamba-2 | mamba2 | identity | plain | convolution, output gate |
| DeltaNet (Schlag et al.) | delta | elu+1, dpfp, favor | sum | |
| DeltaNet (today) | delta | identity | l2 | convolution |
| Longhorn | longhorn | identity | plain | convolution |
| Gated DeltaNet | gated_delta | identity | l2 | convolution, output gate |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.memory.features import Feature
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Rule, get_rule
from rebind.nn.convolution import ShortConvolution
from rebind.nn.feature_map import FeatureMap
from rebind.nn.gates import Gates
from rebind.nn.layer import SequenceLayer, head_width, key_heads_for
from rebind.nn.normalise import Normaliser
from rebind.nn.norms import RMSNorm
from rebind.nn.padding import cleared
from rebind.nn.states import State
from rebind.ops import scan, step
from rebind.ops.scan import coefficients


@dataclass(frozen=True, eq=False)
class FastWeightState(State):
    """The fast weights, and what the convolution still sees."""

    memory: Tensor  # [B, heads, value_dim (+ 1 for a denominator), width of φ], float32 or better
    window: Tensor | None = None  # [B, size − 1, channels]


@dataclass(frozen=True, eq=False)
class _Writes:
    """A scan's arguments, for tokens [B, T] or one token [B]."""

    q: Tensor  # [..., key_heads, width]
    k: Tensor  # [..., key_heads, width]
    v: Tensor  # [..., heads, value_dim (+ 1)]
    log_decay: Tensor | None  # [..., heads]
    erase: Tensor | None  # [..., heads]
    write: Tensor | None  # [..., heads]


class FastWeight(SequenceLayer[FastWeightState]):
    """Fast weights [value_dim, width of φ(k)] a head.

    Args:
        dim: Width of what goes in and comes out.
        heads: Memories, each with its own gates.
        rule: How a memory changes at a token.
        feature: φ, for keys `key_dim` wide.
        normalise: How φ(k), φ(q) and reads are scaled: "plain", "l2", "sum", "attention", or an object.
        key_dim: A head's keys and queries, before φ. None: dim / heads.
        value_dim: A head's values. None: dim / heads.
        key_heads: Fewer keys than memories, each shared by equally many. None: as many.
        conv: Tokens that a short convolution over q, k and v sees. None: no convolution.
        gate: Whether what is read is multiplied by silu(W_g x).
        norm: Whether each head's read goes through RMSNorm.
    """

    kind_of_state = FastWeightState

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rule: str | Rule = "delta",
        feature: str | Feature = "identity",
        normalise: str | Normaliser = "l2",
        key_dim: int | None = None,
        value_dim: int | None = None,
        key_heads: int | None = None,
        conv: int | None = None,
        gate: bool = False,
        norm: bool = True,
    ) -> None:
        super().__init__(dim)
        self.heads = heads
        self.rule = get_rule(rule)
        self.key_dim = head_width("key_dim", dim, heads, key_dim)
        self.value_dim = head_width("value_dim", dim, heads, value_dim)
        self.key_heads = key_heads_for(heads, key_heads)
        keys, values = self.key_heads * self.key_dim, heads * self.value_dim
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, values, bias=False)
        self.phi = FeatureMap(feature, normalise, self.key_dim)
        self.gates = Gates(self.rule, dim, heads)
        self.conv = None if conv is None else ShortConvolution(2 * keys + values, conv)
        self.g_proj = nn.Linear(dim, values, bias=False) if gate else None
        self.norm = RMSNorm(self.value_dim) if norm else None
        self.o_proj = nn.Linear(values, dim, bias=False)

    @property
    def state_size(self) -> int:
        """Heads × width of φ(k) × value_dim (Schlag et al., appendix F)."""
        return self.heads * self.phi.width * self.value_dim

    def initial(self, batch: int) -> FastWeightState:
        weight = self.k_proj.weight
        rows = self.value_dim + self.phi.normalise.rows
        memory = weight.new_zeros(batch, self.heads, rows, self.phi.width, dtype=working_dtype(weight))
        return FastWeightState(memory, None if self.conv is None else self.conv.initial(batch))

    def forward(
        self, x: Tensor, state: FastWeightState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, FastWeightState]:
        start = self._start(x, state, mask)
        mixed = self._project(x)
        window = start.window
        if self.conv is not None:
            mixed, window = self.conv(mixed, window, mask)
        writes = self._writes(x, mixed, mask)
        out, memory = scan(
            writes.q,
            writes.k,
            writes.v,
            log_decay=writes.log_decay,
            erase=writes.erase,
            write=writes.write,
            state=start.memory,
        )
        return self._output(x, out), FastWeightState(memory, window)

    @torch.no_grad()
    def step(self, x: Tensor, state: FastWeightState, mask: Tensor | None = None) -> tuple[Tensor, FastWeightState]:
        start = self._start(x, state, mask, rank=2)
        mixed = self._project(x)
        window = start.window
        if self.conv is not None:
            mixed, window = self.conv.step(mixed, cast(Tensor, window), mask)
        writes = self._writes(x, mixed, mask)
        out = step(
            writes.q,
            writes.k,
            writes.v,
            start.memory,
            log_decay=writes.log_decay,
            erase=writes.erase,
            write=writes.write,
        )
        return self._output(x, out), FastWeightState(start.memory, window)

    def _project(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side."""
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)

    def _writes(self, x: Tensor, mixed: Tensor, mask: Tensor | None) -> _Writes:
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.heads * self.value_dim], dim=-1)
        q = self.phi.query(q.unflatten(-1, (self.key_heads, self.key_dim)))
        k = self.phi.key(k.unflatten(-1, (self.key_heads, self.key_dim)))
        v = self.phi.normalise.value(v.unflatten(-1, (self.heads, self.value_dim)))
        k = cleared(k, mask)  # a key of zeros writes nothing and erases nothing
        log_decay, erase, write = coefficients(self.rule, k, v, self.gates(x))
        if log_decay is not None:
            log_decay = cleared(log_decay, mask)  # and ln α = 0 forgets nothing
        return _Writes(q, k, v, log_decay, erase, write)

    def _output(self, x: Tensor, out: Tensor) -> Tensor:
        """What was read [..., heads, value_dim (+ 1)] as the layer's output [..., dim]."""
        read = self.phi.normalise.read(out)
        if self.norm is not None:
            read = self.norm(read)
        if self.g_proj is not None:
            read = read * functional.silu(self.g_proj(x)).unflatten(-1, (self.heads, self.value_dim))
        return self.o_proj(read.flatten(-2).to(x.dtype))

    def extra_repr(self) -> str:
        return f"rule={self.rule!r}, heads={self.heads}, key_dim={self.key_dim}, value_dim={self.value_dim}"
