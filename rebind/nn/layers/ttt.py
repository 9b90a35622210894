"""A layer with a small model as its memory, trained at test time on the sequence that it reads.

    ℓ(W; k, v) = ‖f(k; W) − v‖²         f(x; W) = x + LN(inner(x; W))
    W_t = W_{t'} − Σ_{t' < s ≤ t} η_s ∇ℓ(W_{t'}; k_s, v_s)      t' the start of the mini-batch of t
    z_t = f(q_t; W_t)

W_0, the LayerNorm and the rates η = rate · σ(W_η x) / d are learned by ordinary training.

A mini-batch is a few matrix products (the dual form of Sun et al.). For f(x) = x + LN(W x) the gradient of the loss at
W is δ kᵀ, where δ is the gradient with respect to W k. All gradients of a mini-batch are taken at the same W, so

    W_t q_t = W q_t − Σ_{s ≤ t} η_s δ_s (k_s·q_t)

and no W_t is ever formed. An MLP has two such matrices, the second of which reads the output of the first.
`rebind.memory.ttt.run` computes the same by differentiating the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory import ttt
from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import SequenceLayer, State
from rebind.nn.parts.checks import require_positive
from rebind.nn.parts.dense import RMSNorm
from rebind.nn.parts.padding import Packing, take_tokens, zero_padding
from rebind.precision import without_autocast

Weights = tuple[Tensor, ...]  # of the inner model, [B, heads, ...] each


@dataclass(frozen=True, eq=False)
class TTTState(State):
    """The inner model at the start of the mini-batch and now, and the tokens of the mini-batch read so far."""

    start: Weights  # gradients are taken here
    now: Weights
    filled: Tensor  # [B]


class TTTLayer(SequenceLayer[TTTState]):
    """Test-time training with a linear or MLP inner model per head.

    Args:
        dim: Width of the input and the output.
        heads: Number of inner models.
        inner: `ttt.Linear()` or `ttt.Mlp(expand)` of `rebind.memory`. None: linear.
        mini_batch: Number of tokens for which gradients are taken at the same weights; 1 is online descent.
        rate: The largest η, times the width of a head. 1 suits a linear inner model, 0.1 an MLP.
    """

    state_type = TTTState
    splits = False  # what a segment does to the inner model is no affine map

    def __init__(
        self, dim: int, heads: int, *, inner: ttt.InnerModel | None = None, mini_batch: int = 16, rate: float = 1.0
    ) -> None:
        super().__init__(dim, heads)
        require_positive(mini_batch=mini_batch)
        self.inner = ttt.Linear() if inner is None else inner
        if type(self.inner) not in DUAL_FORMS:
            expected = "ttt.Linear() or ttt.Mlp(), to which the layer adds a LayerNorm and a residual connection"
            raise InputError(f"The inner model is {inner!r}", expected=expected, code="unsupported_inner_model")
        self.mini_batch = mini_batch
        self.rate = rate
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.rate_proj = nn.Linear(dim, heads)
        shapes = self.inner.shapes(self.head_dim, self.head_dim)
        self._weight_names = tuple(f"initial_{index}" for index in range(len(shapes)))
        for name, shape in zip(self._weight_names, shapes, strict=True):  # transformers would not fill a ParameterList
            setattr(self, name, nn.Parameter(torch.empty(heads, *shape)))
        self.norm_weight = nn.Parameter(torch.empty(heads, self.head_dim))
        self.norm_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.norm = RMSNorm(self.head_dim)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the inner model and its norm. W_0 is not zero, where the LayerNorm would be too steep."""
        for weight in self.initial_weights:
            if weight.ndim == 3:
                nn.init.normal_(weight, std=0.02)
            else:
                nn.init.zeros_(weight)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)

    @property
    def initial_weights(self) -> Weights:
        """W_0, from which every sequence starts, [heads, ...] each."""
        return tuple(getattr(self, name) for name in self._weight_names)

    @property
    def state_size(self) -> int:
        """Parameters of the inner models. Inside a mini-batch they are stored twice."""
        return sum(weight.numel() for weight in self.initial_weights)

    def initial_state(self, batch: int) -> TTTState:
        wide = working_dtype(self.norm_weight)
        weights = tuple(weight.to(wide).expand(batch, *weight.shape) for weight in self.initial_weights)
        return TTTState(weights, weights, torch.zeros(batch, dtype=torch.long, device=self.norm_weight.device))

    def _run(self, x: Tensor, state: TTTState | None, mask: Tensor | None) -> tuple[Tensor, TTTState]:
        start = self.initial_state(len(x)) if state is None else state
        tokens, length = self._project(x), x.shape[1]
        fresh = state is None and mask is None  # every row begins a mini-batch at its first token
        if fresh or length == 1:
            ends = start.filled + (length if mask is None else mask.sum(1))
            tokens = [zero_padding(tensor, mask) for tensor in tokens]
            out, end = self._train(tokens, start, ends, complete=length // self.mini_batch if fresh else 0)
            out = out[:, :length]
        else:
            packing = Packing.from_mask(torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask)
            tokens = _align(tokens, packing, start.filled, self.mini_batch)
            out, end = self._train(tokens, start, packing.counts + start.filled)
            out = take_tokens(out, packing.position + start.filled[:, None])
        return self.o_proj(self.norm(out).flatten(-2).to(x.dtype)), end

    def _train(self, tokens: list[Tensor], state: TTTState, ends: Tensor, complete: int = 0) -> tuple[Tensor, TTTState]:
        """Train on one mini-batch after another of [B, S, heads, ...]; row i has its last token before slot ends[i].

        The first `complete` mini-batches are full in every row.
        """
        wide, size = working_dtype(self.norm_weight), self.mini_batch
        norm = InnerNorm(self.norm_weight.to(wide), self.norm_bias.to(wide))
        train, start, now, reads = DUAL_FORMS[type(self.inner)], state.start, state.now, []
        q, k, v, rate = (_split_mini_batches(tensor, min(size, tensor.shape[1])) for tensor in tokens)
        with without_autocast(q):
            targets, scores = v - k - norm.bias[:, None], (q @ k.mT).tril()  # for all mini-batches at once
            for index, batch in enumerate(zip(q, k, targets, rate.unsqueeze(-1), scores, strict=True)):
                read, now = train(start, now, batch, norm)
                # A row that ends inside the mini-batch is not done with it.
                start = now if index < complete else _where(ends >= (index + 1) * size, now, start)
                reads.append(read)
        out = norm(q, torch.stack(reads))
        return out.permute(1, 0, 3, 2, 4).flatten(1, 2), TTTState(start, now, ends % size)

    def _project(self, x: Tensor) -> list[Tensor]:
        """Return q, k, v [B, T, heads, d] and rates [B, T, heads], in float32 or better."""
        qkv = [project(x).unflatten(-1, (self.heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj)]
        rate = torch.sigmoid(self.rate_proj(x)) * (self.rate / self.head_dim)
        return [tensor.to(working_dtype(tensor)) for tensor in (*qkv, rate)]

    def extra_repr(self) -> str:
        return f"inner={self.inner!r}, heads={self.heads}, mini_batch={self.mini_batch}, rate={self.rate}"


# The dual form


@dataclass(frozen=True, eq=False)
class InnerNorm:
    """The residual LayerNorm around the inner model: f(x) = x + LN(z)."""

    weight: Tensor  # [H, d]
    bias: Tensor  # [H, d]
    eps: float = 1e-5

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        normal, _ = self._normalize(z)
        return x + normal * self.weight[:, None] + self.bias[:, None]

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        """Return d‖f(k) − v‖² / dz, where weight · LN(z) must be the target for f(k) = v."""
        normal, scale = self._normalize(z)
        weight = self.weight[:, None]
        upstream = (normal * weight - target) * (2 * weight)
        centered = upstream - upstream.mean(-1, keepdim=True)
        return (centered - normal * (upstream * normal).mean(-1, keepdim=True)) * scale

    def _normalize(self, z: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(z, dim=-1, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + self.eps)
        return (z - mean) * scale, scale


MiniBatch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, target, rate [..., n, 1], and the causal q_t·k_s


def _train_linear(start: Weights, now: Weights, batch: MiniBatch, norm: InnerNorm) -> tuple[Tensor, Weights]:
    """Return W_t q_t for every token [B, H, n, d], and the weights after the last one, for f(x) = x + LN(W x)."""
    q, k, target, rate, scores = batch
    read, weight = _descend(now[0], q, k, scores, rate * norm.gradient(k @ start[0].mT, target))
    return read, (weight,)


def _train_mlp(start: Weights, now: Weights, batch: MiniBatch, norm: InnerNorm) -> tuple[Tensor, Weights]:
    """Return the same for f(x) = x + LN(W₂ gelu(W₁ x + b₁) + b₂)."""
    q, k, target, rate, scores = batch
    old_first, old_bias, old_second, old_second_bias = start
    first, bias, second, second_bias = now
    before = k @ old_first.mT + old_bias.unsqueeze(-2)
    hidden = functional.gelu(before)
    upper = norm.gradient(hidden @ old_second.mT + old_second_bias.unsqueeze(-2), target)
    lower = (upper @ old_second) * _gelu_derivative(before)
    upper, lower = rate * upper, rate * lower
    read, first = _descend(first, q, k, scores, lower)
    shift, bias = _descend_bias(bias, lower)
    query = functional.gelu(read + shift)
    read, second = _descend(second, query, hidden, (query @ hidden.mT).tril(), upper)
    shift, second_bias = _descend_bias(second_bias, upper)
    return read + shift, (first, bias, second, second_bias)


def _descend(weight: Tensor, q: Tensor, k: Tensor, scores: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """Return W_t q_t for every t, and W after the last token; `update` is η δ."""
    return q @ weight.mT - scores @ update, weight - update.mT @ k


def _descend_bias(bias: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """Return b_t for every t [B, H, n, d], and b after the last token."""
    biases = bias.unsqueeze(-2) - update.cumsum(-2)
    return biases, biases[..., -1, :]


DUAL_FORMS: dict[type, Callable[[Weights, Weights, MiniBatch, InnerNorm], tuple[Tensor, Weights]]] = {
    ttt.Linear: _train_linear,
    ttt.Mlp: _train_mlp,
}


def _gelu_derivative(x: Tensor) -> Tensor:
    """Return Φ(x) + x·density(x) of the normal distribution."""
    return (1 + torch.erf(x * 0.5**0.5)) / 2 + x * torch.exp(-x.square() / 2) * (2 * torch.pi) ** -0.5


# Mini-batches


def _align(tokens: list[Tensor], packing: Packing, filled: Tensor, mini_batch: int) -> list[Tensor]:
    """Return tokens [B, T, ...] in slots [B, S, ...], in each row after `filled` empty ones; padding gets no slot."""
    length = packing.order.shape[1]
    slots = -(-(length + mini_batch - 1) // mini_batch) * mini_batch  # enough for any f, without asking a GPU for it
    rank = torch.arange(slots, device=filled.device) - filled[:, None]
    real = (rank >= 0) & (rank < packing.counts[:, None])
    index = packing.order.gather(1, rank.clamp(0, length - 1))
    return [zero_padding(take_tokens(tensor, index), real) for tensor in tokens]


def _split_mini_batches(x: Tensor, size: int) -> Tensor:
    """Return mini-batches [batches, B, heads, size, ...] of [B, S, heads, ...], the last one padded with zeros."""
    missing = -x.shape[1] % size
    padded = functional.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
    return padded.unflatten(1, (padded.shape[1] // size, size)).movedim(1, 0).transpose(2, 3)


def _where(rows: Tensor, weights: Weights, others: Weights) -> Weights:
    """Return `weights` for these rows [B], `others` for the rest."""
    pairs = zip(weights, others, strict=True)
    return tuple(torch.where(rows.reshape(-1, *[1] * (one.ndim - 1)), one, other) for one, other in pairs)
