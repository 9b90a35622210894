"""A layer whose memory is a small model, trained at test time on the sequence it reads.

    ℓ(W; k, v) = ‖f(k; W) − v‖²         f(x; W) = x + LN(inner(x; W))
    W_t = W_{t'} − Σ_{t' < s ≤ t} η_s ∇ℓ(W_{t'}; k_s, v_s)      t' the start of t's mini-batch
    z_t = f(q_t; W_t)

W_0, the LayerNorm and the rates η = rate · σ(W_η x) / d are learned outside, with everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory import ttt
from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import SequenceLayer, head_width, require_positive
from rebind.nn.layers.inner import Norm, Tokens, Weights, step_of
from rebind.nn.parts.norm import RMSNorm
from rebind.nn.parts.padding import Packing, cleared, take
from rebind.nn.parts.state import State
from rebind.precision import without_autocast


@dataclass(frozen=True, eq=False)
class TTTState(State):
    """The inner model at the start of the mini-batch, as it is now, and how far into the mini-batch that is."""

    start: Weights  # [B, heads, ...] each: where gradients are taken
    now: Weights
    filled: Tensor  # [B] tokens of the mini-batch that were read


class TTTLayer(SequenceLayer[TTTState]):
    """Test-time training with a linear or MLP inner model a head.

    Args:
        dim: Width of what goes in and comes out.
        heads: Inner models.
        inner: `ttt.Linear()` or `ttt.Mlp(expand)` of `rebind.memory`.
        mini_batch: Tokens whose gradients are taken at the same weights. 1 is online descent.
        rate: The largest η, times the head's width.
    """

    kind_of_state = TTTState

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        inner: ttt.InnerModel | None = None,
        mini_batch: int = 16,
        rate: float = 1.0,
    ) -> None:
        super().__init__(dim)
        require_positive(mini_batch=mini_batch)
        if not 0 < rate < float("inf"):
            raise InputError(f"rate is {rate}, expected a positive number: 1 for a linear inner model, 0.1 for an MLP")
        self.heads = heads
        self.head_dim = head_width("head_dim", dim, heads, None)
        self.inner = ttt.Linear() if inner is None else inner
        self._run = step_of(self.inner)
        self.mini_batch = mini_batch
        self.rate = rate
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.rate_proj = nn.Linear(dim, heads)
        shapes = self.inner.shapes(self.head_dim, self.head_dim)
        self._names = tuple(f"initial_{index}" for index in range(len(shapes)))
        for name, shape in zip(self._names, shapes, strict=True):  # not a ParameterList: transformers would not fill it
            self.register_parameter(name, nn.Parameter(torch.empty(heads, *shape)))
        self.norm_weight = nn.Parameter(torch.empty(heads, self.head_dim))
        self.norm_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.norm = RMSNorm(self.head_dim)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Own parameters only. W_0 is not zero: LayerNorm's slope there is as steep as its eps allows."""
        for weight in self.initial_weights:
            if weight.ndim == 3:
                nn.init.normal_(weight, std=0.02)
            else:
                nn.init.zeros_(weight)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)

    @property
    def initial_weights(self) -> Weights:
        """W_0: what every sequence starts from, [heads, ...] each."""
        return tuple(getattr(self, name) for name in self._names)

    @property
    def state_size(self) -> int:
        """The inner models' parameters. Inside a mini-batch they are held twice."""
        return sum(weight.numel() for weight in self.initial_weights)

    def initial(self, batch: int) -> TTTState:
        wide = working_dtype(self.norm_weight)
        weights = tuple(weight.to(wide).expand(batch, *weight.shape) for weight in self.initial_weights)
        return TTTState(weights, weights, torch.zeros(batch, dtype=torch.long, device=self.norm_weight.device))

    def forward(self, x: Tensor, state: TTTState | None = None, mask: Tensor | None = None) -> tuple[Tensor, TTTState]:
        start = self._start(x, state, mask)
        tokens = self._tokens(x)
        if state is None and mask is None:  # every row begins a mini-batch at its first token
            out, end = self._train(tokens, start, start.filled + x.shape[1], whole=x.shape[1] // self.mini_batch)
            return self._output(x, out[:, : x.shape[1]]), end
        grid = Grid.of(mask, start.filled, x.shape[1], self.mini_batch)
        out, end = self._train([grid.lay(tensor) for tensor in tokens], start, grid.ends)
        return self._output(x, take(out, grid.place)), end

    @torch.no_grad()
    def step(self, x: Tensor, state: TTTState, mask: Tensor | None = None) -> tuple[Tensor, TTTState]:
        start = self._start(x, state, mask, rank=2)
        tokens = self._tokens(x.unsqueeze(1))
        if mask is not None:
            tokens = [cleared(tensor, mask.unsqueeze(1)) for tensor in tokens]
        norm = self._norm()
        q, k, v, rate = (tensor.transpose(1, 2) for tensor in tokens)
        with without_autocast(x):
            read, now = self._run(start.start, start.now, Tokens.of(q, k, v, rate, norm), norm)
        out = norm(q, read)
        filled = start.filled + (1 if mask is None else mask.long())
        done = filled >= self.mini_batch
        end = TTTState(_where(done, now, start.start), now, filled.masked_fill(done, 0))
        return self._output(x, out.squeeze(2)), end

    def _train(self, tokens: list[Tensor], state: TTTState, ends: Tensor, whole: int = 0) -> tuple[Tensor, TTTState]:
        """Mini-batch after mini-batch over [B, S, heads, ...], row i having its last token before slot ends[i].

        Every row is known to have its first `whole` mini-batches to their end.
        """
        norm, size = self._norm(), self.mini_batch
        start, now, reads = state.start, state.now, []
        q, k, v, rate = (_in_batches(tensor, min(size, tensor.shape[1])) for tensor in tokens)
        with without_autocast(q):
            for index, batch in enumerate(Tokens.of(q, k, v, rate, norm)):
                read, now = self._run(start, now, batch, norm)
                # a row that ends inside the mini-batch is still in it
                start = now if index < whole else _where(ends >= (index + 1) * size, now, start)
                reads.append(read)
        out = norm(q, torch.stack(reads))
        return out.permute(1, 0, 3, 2, 4).flatten(1, 2), TTTState(start, now, ends % size)

    def _tokens(self, x: Tensor) -> list[Tensor]:
        """q, k, v [B, T, heads, d] and rates [B, T, heads], in float32 or better."""
        qkv = [project(x).unflatten(-1, (self.heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj)]
        rate = torch.sigmoid(self.rate_proj(x)) * (self.rate / self.head_dim)
        return [tensor.to(working_dtype(tensor)) for tensor in (*qkv, rate)]

    def _norm(self) -> Norm:
        wide = working_dtype(self.norm_weight)
        return Norm(self.norm_weight.to(wide), self.norm_bias.to(wide))

    def _output(self, x: Tensor, out: Tensor) -> Tensor:
        return self.o_proj(self.norm(out).flatten(-2).to(x.dtype))

    def extra_repr(self) -> str:
        return f"inner={self.inner!r}, heads={self.heads}, mini_batch={self.mini_batch}, rate={self.rate}"


@dataclass(frozen=True, eq=False)
class Grid:
    """Tokens laid out so that mini-batches begin at the same slots in every row.

    A row that already has f tokens in its mini-batch leaves the first f slots free, and padding takes none.
    """

    token: Tensor  # [B, S] which token stands in each slot
    real: Tensor  # [B, S] whether any does
    place: Tensor  # [B, T] each token's slot
    ends: Tensor  # [B] the slot after a row's last token

    @classmethod
    def of(cls, mask: Tensor | None, filled: Tensor, length: int, mini_batch: int) -> Grid:
        full = torch.ones(len(filled), length, dtype=torch.bool, device=filled.device)
        packing = Packing.of(full if mask is None else mask)
        slots = -(-(length + mini_batch - 1) // mini_batch) * mini_batch  # room for any f, known without asking a GPU
        rank = torch.arange(slots, device=filled.device) - filled[:, None]
        real = (rank >= 0) & (rank < packing.counts[:, None])
        token = packing.order.gather(1, rank.clamp(0, max(length - 1, 0)))
        return cls(token, real, packing.place + filled[:, None], packing.counts + filled)

    def lay(self, x: Tensor) -> Tensor:
        """Tokens [B, T, ...] in their slots [B, S, ...], zeros where there is none."""
        return cleared(take(x, self.token), self.real)


def _in_batches(x: Tensor, size: int) -> Tensor:
    """Mini-batches [batches, B, heads, size, ...] of [B, S, heads, ...], the last filled up with zeros."""
    missing = -x.shape[1] % size
    padded = functional.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
    return padded.unflatten(1, (padded.shape[1] // size, size)).movedim(1, 0).transpose(2, 3)


def _where(rows: Tensor, one: Weights, other: Weights) -> Weights:
    """The weights `one` for these rows [B], `other` for the rest."""
    chosen = (rows.reshape(-1, *[1] * (a.ndim - 1)) for a in one)
    return tuple(torch.where(row, a, b) for row, a, b in zip(chosen, one, other, strict=True))
