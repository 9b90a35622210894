"""A layer whose weights are rewritten at every token, by any rule and any feature map.

    q, k, v = W_q x, W_k x, W_v x          gates = σ(W_β x), the decay of `rebind.nn.parts.gates`
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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.memory.features import Feature
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Rule, get_rule
from rebind.nn.layers.base import SequenceLayer, head_width, key_heads_for
from rebind.nn.parts.convolution import ShortConvolution
from rebind.nn.parts.feature_map import FeatureMap
from rebind.nn.parts.gates import Gates, Made
from rebind.nn.parts.norm import RMSNorm
from rebind.nn.parts.normalizers import Normaliser
from rebind.nn.parts.padding import cleared
from rebind.nn.parts.products import is_plain, joined
from rebind.nn.parts.state import State
from rebind.ops import scan
from rebind.ops.gated import gated_linear
from rebind.ops.inputs import DEBUG
from rebind.ops.scan import coefficients
from rebind.ops.step import stepped
from rebind.precision import as_autocast


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
        self._check(x, state, mask)
        x, others = as_autocast(cleared(x, mask)), self._others
        mixed = joined(x, self.q_proj, self.k_proj, self.v_proj)
        gate, made = self._gated(joined(x, *others) if others else None)
        window = None if state is None else state.window
        if self.conv is None:
            parts = mixed.split(self._parts, dim=-1)
        else:
            window = self.conv.initial(len(x)) if window is None else window
            parts, window = self.conv(mixed, window, mask, self._parts)
        writes = self._writes(parts, made, mask)
        out, memory = scan(
            writes.q,
            writes.k,
            # Where queries and keys are not kept as they were, a view would keep them until the gradients come.
            writes.v if self.phi.keeps else writes.v.contiguous(),
            log_decay=writes.log_decay,
            erase=writes.erase,
            write=writes.write,
            state=None if state is None else state.memory,
        )
        return self._output(out, gate, x.dtype), FastWeightState(memory, window)

    @torch.no_grad()
    def step(self, x: Tensor, state: FastWeightState, mask: Tensor | None = None) -> tuple[Tensor, FastWeightState]:
        self._check(x, state, mask, rank=2)
        x, window = as_autocast(cleared(x, mask)), state.window
        mixed, rest = joined(x, self.q_proj, self.k_proj, self.v_proj, *self._others).tensor_split(
            [sum(self._parts)], -1
        )
        gate, made = self._gated(rest if rest.shape[-1] else None)
        if self.conv is not None:
            mixed, window = self.conv.step(mixed, cast(Tensor, window), mask)
        writes = self._writes(mixed.split(self._parts, dim=-1), made, mask)
        out = stepped(
            writes.q,
            writes.k,
            writes.v,
            state.memory,
            log_decay=writes.log_decay,
            erase=writes.erase,
            write=writes.write,
        )
        return self._output(out, gate, x.dtype), FastWeightState(state.memory, window)

    @property
    def _parts(self) -> list[int]:
        """How wide queries, keys and values are side by side: what the convolution mixes; pairs are one part."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return [2 * keys, values] if self.phi.normalise.paired else [keys, keys, values]

    @property
    def _others(self) -> list[nn.Linear]:
        """The other projections of x, in the order that `_gated` takes apart."""
        return [*([] if self.g_proj is None else [self.g_proj]), *self.gates.projections]

    def _gated(self, raw: Tensor | None) -> tuple[Tensor | None, Made]:
        """What reads are multiplied by before its silu [..., heads · value_dim], and the rule's gates."""
        if raw is None or self.g_proj is None:
            return None, self.gates.made(raw)
        if not self.gates.names:
            return raw, Made({})
        values = self.heads * self.value_dim
        gate, rest = raw.split([values, raw.shape[-1] - values], dim=-1)
        return gate, self.gates.made(rest)

    def _writes(self, parts: Sequence[Tensor], made: Made, mask: Tensor | None) -> _Writes:
        if self.phi.normalise.paired:
            both, v = parts
            q, k = self.phi.pair(both.unflatten(-1, (2, self.key_heads, self.key_dim)))
        else:
            q, k, v = parts
            q = self.phi.query(q.unflatten(-1, (self.key_heads, self.key_dim)))
            k = self.phi.key(k.unflatten(-1, (self.key_heads, self.key_dim)))
        v = self.phi.normalise.value(v.unflatten(-1, (self.heads, self.value_dim)))
        k = cleared(k, mask)  # a key of zeros writes nothing and erases nothing
        log_decay, erase, write = coefficients(self.rule, k, v, made.gates, log_decay=made.log_decay, trusted=not DEBUG)
        if log_decay is not None:
            log_decay = cleared(log_decay, mask)  # and ln α = 0 forgets nothing
        return _Writes(q, k, v, log_decay, erase, write)

    def _output(self, out: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What was read [..., heads, value_dim (+ 1)] as the layer's output [..., dim]."""
        read = self.phi.normalise.read(out)
        if self.norm is not None:
            read = self.norm(read)
        read = read.flatten(-2)
        if gate is None:
            return self.o_proj(read.to(dtype))
        if is_plain(self.o_proj) and read.dtype == gate.dtype == dtype:
            return gated_linear(gate, read, self.o_proj.weight)
        return self.o_proj((read * functional.silu(gate)).to(dtype))

    def extra_repr(self) -> str:
        return f"rule={self.rule!r}, heads={self.heads}, key_dim={self.key_dim}, value_dim={self.value_dim}"
