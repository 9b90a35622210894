"""Softmax attention, the baseline, over one sequence and between two. Its state is every key and value so far."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rebind.memory.checks import require_number, unknown_name
from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import CrossLayer, SequenceLayer, State
from rebind.nn.parts.checks import require_multiple, require_positive, shared_heads
from rebind.nn.parts.dense import RMSNorm
from rebind.nn.parts.documents import Documents
from rebind.nn.parts.gates import OutputGate, gate_projections, get_output_gate
from rebind.nn.parts.padding import token_positions, zero_padding
from rebind.ops.sequence_parallel import SequenceSplit, current_split, tokens_before

BACKENDS_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: pairs of channels are rotated by position · theta^(−i).

    Args:
        theta: Base of the frequencies.
        fraction: Part of the channels of a head that is rotated; the others have no positions.
    """

    theta: float = 10_000.0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        require_number("theta", self.theta, above=0.0)
        require_number("fraction", self.fraction, above=0.0, most=1.0)

    def width(self, head_dim: int) -> int:
        """Return the number of channels that are rotated, which must be even."""
        width = int(head_dim * self.fraction)
        require_multiple("The number of rotated channels", width, 2, "which rotary positions need")
        return width

    def rotate(self, positions: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Rotate [B, heads, T, head_dim] to positions [B or 1, T]."""
        width = self.width(tensors[0].shape[-1])
        powers = torch.arange(0, width, 2, device=positions.device, dtype=working_dtype(tensors[0])) / width
        angles = positions[:, None, :, None].to(powers.dtype) * self.theta**-powers  # [B or 1, 1, T, width / 2]
        return [torch.cat([_rotate(x[..., :width], angles), x[..., width:]], dim=-1) for x in tensors]


QK_NORMS = ("none", "head", "all")


@dataclass(frozen=True, eq=False)
class AttentionState(State):
    """One key and one value per token that can still be seen."""

    keys: Tensor  # [B, key_heads, S, head_dim], rotated
    values: Tensor  # [B, key_heads, S, head_dim]
    real: Tensor | None = None  # [B, S] true for real tokens; None: all are
    dropped: Tensor | None = None  # [B] tokens before these, which the window has left behind; None: none


class Attention(SequenceLayer[AttentionState]):
    """Causal softmax attention, by torch's scaled_dot_product_attention.

    Args:
        dim: Width of the input and the output.
        heads: Number of query heads.
        head_dim: Width of a head. None: dim / heads.
        key_heads: Number of key and value heads, each shared by equally many query heads. None: as many.
        rotary: Rotary positions. None: no positions.
        qk_norm: RMSNorm of queries and keys: "none", "head" (of each head) or "all" (of all heads side by side).
        window: Tokens that a token sees, itself included. None: all before it.
        output_gate: What reads are multiplied by: "none", "silu" or "sigmoid" of W_g x, or an `OutputGate`.
        norm_eps: ε of the norm of queries and keys.
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
        rotary: Rotary | None = Rotary(),  # noqa: B008 - frozen
        qk_norm: str = "none",
        window: int | None = None,
        output_gate: str | OutputGate | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, heads, head_dim)
        self.key_heads = shared_heads(heads, key_heads)
        if rotary is not None:
            rotary.width(self.head_dim)
        if window is not None:
            require_positive(window=window)
        if qk_norm not in QK_NORMS:
            raise unknown_name("qk_norm", qk_norm, QK_NORMS)
        self.rotary, self.qk_norm, self.window = rotary, qk_norm, window
        queries, keys = heads * self.head_dim, self.key_heads * self.head_dim
        self.q_proj = nn.Linear(dim, queries, bias=False)
        self.k_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, keys, bias=False)
        if qk_norm != "none":
            self.q_norm, self.k_norm = (
                RMSNorm(self.head_dim if qk_norm == "head" else width, norm_eps) for width in (queries, keys)
            )
        self.output_gate = get_output_gate(output_gate)
        self.g_proj, self.g_expand = gate_projections(self.output_gate, dim, queries)
        self.o_proj = nn.Linear(queries, dim, bias=False)

    @property
    def state_size(self) -> int:
        """Numbers stored per token of the context: a key and a value."""
        return 2 * self.key_heads * self.head_dim

    def size_after(self, tokens: int) -> int:
        return self.state_size * (tokens if self.window is None else min(tokens, self.window - 1))

    def initial_state(self, batch: int) -> AttentionState:
        empty = self.k_proj.weight.new_zeros(batch, self.key_heads, 0, self.head_dim)
        return AttentionState(empty, empty)

    def _run(self, x: Tensor, state: AttentionState | None, mask: Tensor | None) -> tuple[Tensor, AttentionState]:
        if (split := current_split()) is not None:
            return self._run_segment(x, split)
        start = self.initial_state(len(x)) if state is None else state
        x = zero_padding(x, mask)
        real = join_masks(start.keys.shape[2], start.real, mask, x)
        positions = token_positions(start.keys.shape[2], x.shape[1], real, x.device)
        if start.dropped is not None:
            positions = positions + start.dropped[:, None]
        q, k, v = self._project(x, positions)
        keys, values = torch.cat([start.keys.to(k.dtype), k], dim=2), torch.cat([start.values.to(v.dtype), v], dim=2)
        end = AttentionState(keys, values, real, start.dropped)
        return self._output(x, self._attend(q, end)), self._drop(end)

    def _run_segment(self, x: Tensor, split: SequenceSplit) -> tuple[Tensor, AttentionState]:
        """Read a segment of a sequence that is split over processes: keys and values before it come from the others."""
        positions = token_positions(split.rank * x.shape[1], x.shape[1], None, x.device)
        q, k, v = self._project(x, positions)
        keys, values = (torch.cat([tokens_before(part, split, dim=2), part], dim=2) for part in (k, v))
        end = AttentionState(keys, values)
        return self._output(x, self._attend(q, end)), self._drop(end)

    def _run_documents(
        self, x: Tensor, state: AttentionState | None, documents: Documents
    ) -> tuple[Tensor, AttentionState]:
        if state is not None:
            return super()._run_documents(x, state, documents)
        q, k, v = (
            documents.to_rows(y.transpose(1, 2)).transpose(1, 2) for y in self._project(x, documents.position[None])
        )
        read = self._attend(q, AttentionState(k, v))  # zeros are behind every document, where causal reads do not see
        read = documents.from_rows(read.transpose(1, 2)).transpose(1, 2)
        return self._output(x, read), AttentionState(k, v, documents.mask)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [B, heads, T, head_dim], with q and k normalized and rotated to positions [B or 1, T]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if self.rotary is not None:
            q, k = self.rotary.rotate(positions, q, k)
        return q, k, v

    def _attend(self, q: Tensor, state: AttentionState) -> Tensor:
        """Return what the queries of the last tokens read [B, heads, T, head_dim]."""
        past, length = state.keys.shape[2] - q.shape[2], q.shape[2]
        allowed = attention_mask(past, length, state.real, self.window, q.device)
        causal = allowed is None and past == 0 and length > 1
        # For a single token cuDNN would plan for every context length again, which takes milliseconds per layer.
        with sdpa_kernel(BACKENDS_WITHOUT_PLANS) if q.is_cuda and length == 1 else nullcontext():
            return functional.scaled_dot_product_attention(
                q,
                state.keys,
                state.values,
                attn_mask=allowed,
                is_causal=causal,
                enable_gqa=self.key_heads != self.heads,
            )

    def _output(self, x: Tensor, read: Tensor) -> Tensor:
        read = read.transpose(1, 2).flatten(-2).to(x.dtype)
        if self.output_gate is None or self.g_proj is None:
            return self.o_proj(read)
        gate = self.g_proj(x)
        return self.output_gate.project(
            gate if self.g_expand is None else self.g_expand(gate), read, self.o_proj, x.dtype
        )

    def _drop(self, state: AttentionState) -> AttentionState:
        """Return the state without tokens that no later one sees. With padding, rows differ in them and all stay."""
        extra = 0 if self.window is None else state.keys.shape[2] - (self.window - 1)
        if extra <= 0 or state.real is not None:
            return state
        batch, dropped = len(state.keys), state.dropped
        dropped = torch.zeros(batch, dtype=torch.long, device=state.keys.device) if dropped is None else dropped
        return AttentionState(
            state.keys[:, :, extra:].clone(), state.values[:, :, extra:].clone(), None, dropped + extra
        )


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


def join_masks(past: int, past_real: Tensor | None, mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return which of `past` tokens and of those of x [B, T, ...] are real [B, past + T]; None: all are."""
    if past_real is None and mask is None:
        return None
    before = torch.ones(len(x), past, dtype=torch.bool, device=x.device) if past_real is None else past_real
    now = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    return torch.cat([before, now], dim=1)


def attention_mask(
    past: int, length: int, real: Tensor | None, window: int | None, device: torch.device
) -> Tensor | None:
    """Return which keys each query may see, [B or 1, 1, T, S]; None where `is_causal` is enough."""
    window = None if window is None or past + length <= window else window
    if real is None and window is None and (past == 0 or length == 1):
        return None
    keys = torch.arange(past + length, device=device)
    queries = torch.arange(past, past + length, device=device)[:, None]
    causal = keys <= queries
    if real is None:
        return (causal if window is None else causal & (queries - keys < window))[None, None]
    if window is not None:
        places = real.cumsum(1)  # padding does not count
        causal = causal & (places[:, past:, None] - places[:, None] < window)
    allowed = (causal & real[:, None]) | (keys == queries)  # padding sees itself, since softmax of nothing is NaN
    return allowed[:, None]


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) by its angle."""
    first, second = x.to(angles.dtype).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
