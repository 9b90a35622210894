"""One mini-batch of test-time training in closed form: what `rebind.memory.ttt.run` does, as a few matrix products.

For f(x) = x + LN(W x) the gradient of ‖f(k) − v‖² at W is δ kᵀ, δ being the slope at W k. All gradients of a
mini-batch are taken at the same W, so token t reads

    W_t q_t = W q_t − Σ_{s ≤ t} η_s δ_s (k_s·q_t)

and no W_t is ever formed (Sun et al., the dual form). An MLP has two such matrices, the second reading what the first
put out. `start` is where gradients are taken, `now` what they have made of it: they differ inside a mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory import ttt

Weights = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A mini-batch: q, k, v [B, H, n, d] and rates [B, H, n], 0 for what is not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor


@dataclass(frozen=True, eq=False)
class Norm:
    """The residual LayerNorm around the inner model: f(x) = x + LN(z)."""

    weight: Tensor  # [H, d]
    bias: Tensor  # [H, d]
    eps: float = 1e-5

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        normal, _ = self._normal(z)
        return x + normal * self.weight[:, None] + self.bias[:, None]

    def slope(self, k: Tensor, z: Tensor, v: Tensor) -> Tensor:
        """d‖f(k) − v‖² / dz."""
        normal, scale = self._normal(z)
        error = k + normal * self.weight[:, None] + self.bias[:, None] - v
        up = 2 * error * self.weight[:, None]
        return (up - up.mean(-1, keepdim=True) - normal * (up * normal).mean(-1, keepdim=True)) * scale

    def _normal(self, z: Tensor) -> tuple[Tensor, Tensor]:
        centred = z - z.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return centred * scale, scale


Step = Callable[[Weights, Weights, Tokens, Norm], tuple[Tensor, Weights]]


def linear(start: Weights, now: Weights, tokens: Tokens, norm: Norm) -> tuple[Tensor, Weights]:
    """f(x) = x + LN(W x): what is read [B, H, n, d], and the weights after the last token."""
    (old,), (weight,) = start, now
    slope = norm.slope(tokens.k, tokens.k @ old.mT, tokens.v)
    read, weight = _descend(weight, tokens.q, tokens.k, slope, tokens.rate)
    return norm(tokens.q, read), (weight,)


def mlp(start: Weights, now: Weights, tokens: Tokens, norm: Norm) -> tuple[Tensor, Weights]:
    """f(x) = x + LN(W₂ gelu(W₁ x + b₁) + b₂)."""
    old_first, old_bias, old_second, old_second_bias = start
    first, bias, second, second_bias = now
    before = tokens.k @ old_first.mT + old_bias.unsqueeze(-2)
    hidden = functional.gelu(before)
    upper = norm.slope(tokens.k, hidden @ old_second.mT + old_second_bias.unsqueeze(-2), tokens.v)
    lower = (upper @ old_second) * _gelu_slope(before)
    read, first = _descend(first, tokens.q, tokens.k, lower, tokens.rate)
    shift, bias = _descend_bias(bias, lower, tokens.rate)
    reached = functional.gelu(read + shift)
    read, second = _descend(second, reached, hidden, upper, tokens.rate)
    shift, second_bias = _descend_bias(second_bias, upper, tokens.rate)
    return norm(tokens.q, read + shift), (first, bias, second, second_bias)


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


def _descend(weight: Tensor, q: Tensor, k: Tensor, slope: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """W_t q_t for every t, and W after the last."""
    push = rate.unsqueeze(-1) * slope  # η δ
    return q @ weight.mT - (q @ k.mT).tril() @ push, weight - push.mT @ k


def _descend_bias(bias: Tensor, slope: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """b_t for every t [B, H, n, d], and b after the last."""
    biases = bias.unsqueeze(-2) - (rate.unsqueeze(-1) * slope).cumsum(-2)
    return biases, biases[..., -1, :]


def _gelu_slope(x: Tensor) -> Tensor:
    """Φ(x) + x·density(x)."""
    return (1 + torch.erf(x * 0.5**0.5)) / 2 + x * torch.exp(-x.square() / 2) * (2 * torch.pi) ** -0.5
