"""A layer with a memory that is rewritten at every token, by any rule and with any feature map.

    q, k, v = W_q x, W_k x, W_v x          gates: σ(W_β x), and the decay of `rebind.nn.parts.gates`
    W ← α W (I − ε φ(k) φ(k)ᵀ) + η v φ(k)ᵀ
    y = W_o norm(W φ(q))

docs/models.md lists the models that these choices give. `CrossFastWeight` writes one sequence and reads another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rebind.errors import InputError
from rebind.memory.features import Feature
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Rule, get_rule
from rebind.nn.layers.base import CrossLayer, SequenceLayer, State
from rebind.nn.parts.checks import head_width, require_sequence, shared_heads
from rebind.nn.parts.dense import RMSNorm, project_jointly
from rebind.nn.parts.documents import Documents
from rebind.nn.parts.feature_map import FeatureMap, Normalizer
from rebind.nn.parts.gates import DecayGate, Gates, OutputGate, ShortConvolution, gate_projections, get_output_gate
from rebind.nn.parts.padding import zero_padding
from rebind.ops import scan
from rebind.ops.inputs import DEBUG
from rebind.ops.scan import scan_arguments
from rebind.ops.sequence_parallel import current_split, previous_tokens, scan_split
from rebind.ops.step import step_without_grad
from rebind.precision import as_autocast, without_autocast

TokenGates = tuple[dict[str, float | Tensor], Tensor | None]  # as `Gates` returns them


@dataclass(frozen=True, eq=False)
class FastWeightState(State):
    """The fast weights, and the inputs that the convolution still needs."""

    memory: Tensor  # [B, heads, d_v (+ 1 for a denominator), width of φ], float32 or better
    window: Tensor | None = None  # [B, conv_size − 1, channels]


class FastWeight(SequenceLayer[FastWeightState]):
    """A memory [d_v, width of φ(k)] per head, rewritten at every token.

    Args:
        dim: Width of the input and the output.
        heads: Number of memories, each with its own gates.
        rule: How a token is written.
        feature: φ, for keys `d_k` wide.
        normalizer: How φ(k), φ(q) and reads are scaled: "none", "l2", "sum", "attention", or an object.
        d_k: Width of the keys and queries of a head, before φ. None: dim / heads.
        d_v: Width of the values of a head. None: dim / heads.
        key_heads: Number of key heads, each shared by equally many memories. None: as many as `heads`.
        conv_size: Tokens that a short convolution over q, k and v sees. None: no convolution.
        conv_bias: Whether the convolution has a bias.
        decay: How the decay is computed: "softplus", "sigmoid", `SoftplusDecay` or `SigmoidDecay`.
        max_beta: The least upper bound of β: 1, or 2 for writes that may turn a value into its opposite.
        output_gate: What reads are multiplied by: "none", "silu" or "sigmoid" of W_g x, or an `OutputGate`.
        norm_eps: ε of the RMSNorm that the read of each head goes through. None: no norm.
    """

    state_type = FastWeightState

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rule: str | Rule = "delta",
        feature: str | Feature = "identity",
        normalizer: str | Normalizer = "l2",
        d_k: int | None = None,
        d_v: int | None = None,
        key_heads: int | None = None,
        conv_size: int | None = None,
        conv_bias: bool = False,
        decay: str | DecayGate = "softplus",
        max_beta: float = 1.0,
        output_gate: str | OutputGate | None = None,
        norm_eps: float | None = 1e-6,
    ) -> None:
        super().__init__(dim, heads, d_v)
        self.rule = get_rule(rule)
        if self.rule.several:
            problem, advice = f"Rule {self.rule.name!r} writes several times per token", "Call rebind.ops.scan_rule"
            raise InputError(problem, expected="a rule with one write", advice=advice, code="several_writes")
        self.d_k = head_width(dim, heads, d_k)
        self.d_v = self.head_dim
        self.key_heads = shared_heads(heads, key_heads)
        keys, values = self.key_heads * self.d_k, heads * self.d_v
        self._widths = [keys, keys, values]  # of queries, keys and values side by side
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, values, bias=False)
        self.phi = FeatureMap(feature, normalizer, self.d_k)
        widths = {"key": self.phi.width, "value": self.d_v}
        self.gates = Gates(self.rule, dim, heads, widths, decay=decay, max_beta=max_beta)
        self.conv = None if conv_size is None else ShortConvolution(2 * keys + values, conv_size, bias=conv_bias)
        self.output_gate = get_output_gate(output_gate)
        self.g_proj, self.g_expand = gate_projections(self.output_gate, dim, values)
        self.norm = None if norm_eps is None else RMSNorm(self.d_v, norm_eps)
        self.o_proj = nn.Linear(values, dim, bias=False)

    @property
    def state_size(self) -> int:
        """Heads × width of φ(k) × d_v (Schlag et al., appendix F)."""
        return self.heads * self.phi.width * self.d_v

    @property
    def _memory_rows(self) -> int:
        return self.d_v + self.phi.normalizer.extra_rows

    def initial_state(self, batch: int) -> FastWeightState:
        weight = self.k_proj.weight
        memory = weight.new_zeros(batch, self.heads, self._memory_rows, self.phi.width, dtype=working_dtype(weight))
        return FastWeightState(memory, None if self.conv is None else self.conv.initial_window(batch))

    def _run(
        self,
        x: Tensor,
        state: FastWeightState | None,
        mask: Tensor | None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, FastWeightState]:
        x = as_autocast(zero_padding(x, mask))
        mixed = project_jointly(x, self.q_proj, self.k_proj, self.v_proj)
        output_gate, gates = self._gates(project_jointly(x, *self._gate_projections))
        window, split = None if state is None else state.window, current_split()
        if self.conv is None:
            qkv = mixed.split(self._widths, dim=-1)
        else:
            sequences = len(x) if documents is None else len(documents)
            window = self.conv.initial_window(sequences) if window is None else window
            window = window if split is None else previous_tokens(mixed, window, split)
            qkv, window = self.conv(mixed, window, mask, self._widths, documents)
        arguments = self._scan_inputs(qkv, gates, mask)
        arguments["v"] = arguments["v"].contiguous()  # a view would keep q and k before φ in memory
        if split is None:
            start, bounds = None if state is None else state.memory, None if documents is None else documents.bounds
            out, memory = self._scan(arguments, start, bounds)
        else:
            out, memory = scan_split(**arguments, split=split)
        return self._output(out, output_gate, x.dtype), FastWeightState(memory, window)

    def _run_documents(
        self, x: Tensor, state: FastWeightState | None, documents: Documents
    ) -> tuple[Tensor, FastWeightState]:
        return self._run(x, state, None, documents)

    @torch.no_grad()
    def step(self, x: Tensor, state: FastWeightState, mask: Tensor | None = None) -> tuple[Tensor, FastWeightState]:
        require_sequence("x", x, self.dim, mask, rank=2)
        self._check_state(state, len(x))
        x, window = as_autocast(zero_padding(x, mask)), state.window
        everything = project_jointly(x, self.q_proj, self.k_proj, self.v_proj, *self._gate_projections)
        mixed, rest = everything.tensor_split([sum(self._widths)], -1)
        output_gate, gates = self._gates(rest)
        if self.conv is not None:
            mixed, window = self.conv.step(mixed, cast(Tensor, window), mask)
        arguments = self._scan_inputs(mixed.split(self._widths, dim=-1), gates, mask)
        out = self._step(arguments, state.memory)
        return self._output(out, output_gate, x.dtype), FastWeightState(state.memory, window)

    def _scan(self, arguments: dict[str, Any], start: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write and read every token; return what was read [B, T, heads, d_v (+ 1)], and the memories at the end."""
        return scan(**arguments, state=start, cu_seqlens=bounds)

    def _step(self, arguments: dict[str, Any], memory: Tensor) -> Tensor:
        """Write one token into the memories, in place, and return what is read [B, heads, d_v (+ 1)]."""
        return step_without_grad(**arguments, state=memory)

    @property
    def _gate_projections(self) -> list[nn.Linear]:
        """The projections of x that `_gates` takes side by side."""
        return [*([] if self.g_proj is None else [self.g_proj]), *self.gates.projections]

    def _gates(self, projected: Tensor) -> tuple[Tensor | None, TokenGates]:
        """Return the output gate before its activation [..., heads · d_v], and the gates of the rule."""
        if self.g_proj is None:
            return None, self.gates(projected)
        output_gate, rest = projected.tensor_split([self.g_proj.out_features], dim=-1)
        return output_gate if self.g_expand is None else self.g_expand(output_gate), self.gates(rest)

    def _scan_inputs(self, qkv: Sequence[Tensor], gates: TokenGates, mask: Tensor | None) -> dict[str, Any]:
        """Return what `scan` takes: φ(q), φ(k) [..., key_heads, width of φ], v [..., heads, d_v (+ 1)], ln α, ε, η."""
        q, k = (tensor.unflatten(-1, (self.key_heads, self.d_k)) for tensor in qkv[:2])
        v = self.phi.normalizer.value(qkv[2].unflatten(-1, (self.heads, self.d_v)))
        q, k = self.phi.query(q), zero_padding(self.phi.key(k), mask)  # a key of zeros writes and erases nothing
        values, log_alpha = gates
        arguments = scan_arguments(self.rule, q, k, v, values, log_decay=log_alpha, check=DEBUG)
        if arguments["log_decay"] is not None:
            arguments["log_decay"] = zero_padding(arguments["log_decay"], mask)  # ln α = 0 forgets nothing
        return arguments

    def _output(self, out: Tensor, output_gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the output [..., dim] of what the scan read [..., heads, d_v (+ 1)]."""
        read = self.phi.normalizer.read(out)
        if self.norm is not None:
            read = self.norm(read)
        read = read.flatten(-2)
        if self.output_gate is None or output_gate is None:
            return self.o_proj(read.to(dtype))
        return self.output_gate.project(output_gate, read, self.o_proj, dtype)

    def extra_repr(self) -> str:
        return f"rule={self.rule!r}, heads={self.heads}, d_k={self.d_k}, d_v={self.d_v}"


class CrossFastWeight(CrossLayer[FastWeightState]):
    """W = Σ v φ(k)ᵀ over the source, and W φ(q) / z·φ(q) for every target: non-causal linear attention.

    However long the source is, its state is a matrix [head_dim, width of φ(k)] per head.

    Args:
        dim: Width of the targets and of the output.
        heads: Number of memories, which share `dim` evenly.
        source_dim: Width of the source. None: dim.
        feature: φ, for keys dim / heads wide.
    """

    def __init__(
        self, dim: int, heads: int, *, source_dim: int | None = None, feature: str | Feature = "elu+1"
    ) -> None:
        super().__init__(dim, heads, source_dim=source_dim)
        self.phi = FeatureMap(feature, "attention", self.head_dim)

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
