"""One mini-batch of test-time training in closed form: what `rebind.memory.ttt.run` does, as a few matrix products.

For f(x) = x + LN(W x) the gradient of ‖f(k) − v‖² at W is δ kᵀ, δ being the slope at W k. All gradients of a
mini-batch are taken at the same W, so token t reads

    W_t q_t = W q_t − Σ_{s ≤ t} η_s δ_s (k_s·q_t)

and no W_t is ever formed (Sun et al., the dual form). An MLP has two such matrices, the second reading what the first
put out. `start` is where gradients are taken, `now` what they have made of it: they differ inside a mini-batch.

Mini-batches follow one another, so what does not depend on W is computed for all of them beforehand (`Tokens.of`), and
the LayerNorm of what was read afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory import ttt

Weights = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Norm:
    """The residual LayerNorm around the inner model: f(x) = x + LN(z)."""

    weight: Tensor  # [H, d]
    bias: Tensor  # [H, d]
    eps: float = 1e-5

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        normal, _ = self._normal(z)
        return x + normal * self.weight[:, None] + self.bias[:, None]

    def wanted(self, k: Tensor, v: Tensor) -> Tensor:
        """What weight · LN(z) must be for f(k) = v."""
        return v - k - self.bias[:, None]

    def slope(self, z: Tensor, wanted: Tensor) -> Tensor:
        """d‖f(k) − v‖² / dz."""
        normal, scale = self._normal(z)
        weight = self.weight[:, None]
        up = (normal * weight - wanted) * (2 * weight)
        return (up - up.mean(-1, keepdim=True) - normal * (up * normal).mean(-1, keepdim=True)) * scale

    def _normal(self, z: Tensor) -> tuple[Tensor, Tensor]:
        spread, mean = torch.var_mean(z, dim=-1, correction=0, keepdim=True)
        scale = torch.rsqrt(spread + self.eps)
        return (z - mean) * scale, scale


@dataclass(frozen=True, eq=False)
class Tokens:
    """A mini-batch: [B, H, n, d] and rates [B, H, n, 1], 0 for what is not there. Or many of them: [batches, B, …]."""

    q: Tensor
    k: Tensor
    wanted: Tensor  # of weight · LN(z), where z is what the inner model makes of k
    rate: Tensor
    scores: Tensor  # q_t·k_s for s ≤ t, else 0: [B, H, n, n]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, norm: Norm) -> Tokens:
        """Of q, k, v [..., H, n, d] and rates [..., H, n]."""
        return cls(q, k, norm.wanted(k, v), rate.unsqueeze(-1), (q @ k.mT).tril())

    def __iter__(self) -> Iterator[Tokens]:
        """One mini-batch after another."""
        parts = (self.q, self.k, self.wanted, self.rate, self.scores)
        return (Tokens(*one) for one in zip(*(part.unbind(0) for part in parts), strict=True))


Step = Callable[[Weights, Weights, Tokens, Norm], tuple[Tensor, Weights]]


def linear(start: Weights, now: Weights, tokens: Tokens, norm: Norm) -> tuple[Tensor, Weights]:
    """f(x) = x + LN(W x): W q at every token [B, H, n, d], and the weights after the last."""
    (old,), (weight,) = start, now
    push = tokens.rate * norm.slope(tokens.k @ old.mT, tokens.wanted)
    read, weight = _descend(weight, tokens.q, tokens.k, tokens.scores, push)
    return read, (weight,)


def mlp(start: Weights, now: Weights, tokens: Tokens, norm: Norm) -> tuple[Tensor, Weights]:
    """f(x) = x + LN(W₂ gelu(W₁ x + b₁) + b₂): what enters the LayerNorm, and the weights after the last token."""
    old_first, old_bias, old_second, old_second_bias = start
    first, bias, second, second_bias = now
    before = tokens.k @ old_first.mT + old_bias.unsqueeze(-2)
    hidden = functional.gelu(before)
    upper = norm.slope(hidden @ old_second.mT + old_second_bias.unsqueeze(-2), tokens.wanted)
    lower = (upper @ old_second) * _gelu_slope(before)
    upper, lower = tokens.rate * upper, tokens.rate * lower
    read, first = _descend(first, tokens.q, tokens.k, tokens.scores, lower)
    shift, bias = _descend_bias(bias, lower)
    reached = functional.gelu(read + shift)
    read, second = _descend(second, reached, hidden, (reached @ hidden.mT).tril(), upper)
    shift, second_bias = _descend_bias(second_bias, upper)
    return read + shift, (first, bias, second, second_bias)


def step_of(model: ttt.InnerModel) -> Step:
    """The closed form for an inner model."""
    if isinstance(model, ttt.Linear):
        return linear
    if isinstance(model, ttt.Mlp):
        return mlp
    raise InputError(
        f"inner is {model!r}, expected ttt.Linear() or ttt.Mlp(): the layer adds its own LayerNorm and residual; other "
        f"inner models run with rebind.memory.ttt.run"
    )


def _descend(weight: Tensor, q: Tensor, k: Tensor, scores: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """W_t q_t for every t, and W after the last; a token's push is η δ."""
    return q @ weight.mT - scores @ push, weight - push.mT @ k


def _descend_bias(bias: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """b_t for every t [B, H, n, d], and b after the last."""
    biases = bias.unsqueeze(-2) - push.cumsum(-2)
    return biases, biases[..., -1, :]


def _gelu_slope(x: Tensor) -> Tensor:
    """Φ(x) + x·density(x)."""
    return (1 + torch.erf(x * 0.5**0.5)) / 2 + x * torch.exp(-x.square() / 2) * (2 * torch.pi) ** -0.5
