"""Test-time training: the memory is a small model, and writing is a step of gradient descent.

    ℓ(W; k, v) = ‖f(k; W) − v‖²
    W_t = W_{t'} − Σ_{s ≤ t} η_s ∇ℓ(W_{t'}; k_s, v_s)        t' the start of t's mini-batch
    z_t = f(q_t; W_t)

Mini-batches of one are online descent; one mini-batch over the whole sequence is batch descent, with all gradients
taken at W_0. For a linear f a mini-batch is a `Write` (`Linear.write`); any other f makes a nonlinear memory, which has
a step and no write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import require_broadcastable, require_finite, require_tensors, require_width
from rebind.memory.precision import common_dtype, working_dtype
from rebind.memory.write import Write

State = tuple[Tensor, ...]


class InnerModel(ABC):
    """The model that is trained at test time: a function of a state, which is a tuple of tensors."""

    initial_scale: ClassVar[float] = 0.0  # standard deviation of a matrix in the first state; vectors start at 0

    @abstractmethod
    def shapes(self, d_k: int, d_v: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each tensor of a state."""

    def initial(self, d_k: int, d_v: int, *, seed: int = 0, dtype: torch.dtype | None = None) -> State:
        """Return a state to start from."""
        generator = torch.Generator().manual_seed(seed)
        state = []
        for shape in self.shapes(d_k, d_v):
            random = self.initial_scale > 0 and len(shape) > 1
            drawn = torch.randn(shape, generator=generator, dtype=dtype) if random else torch.zeros(shape, dtype=dtype)
            state.append(self.initial_scale * drawn)
        return tuple(state)

    @abstractmethod
    def __call__(self, state: State, x: Tensor) -> Tensor:
        """Return f(x; state) for one x [d_k]; `run` applies vmap to it."""


@dataclass(frozen=True)
class Linear(InnerModel):
    """f(x) = W x."""

    def shapes(self, d_k: int, d_v: int) -> tuple[tuple[int, ...], ...]:
        return ((d_v, d_k),)

    def __call__(self, state: State, x: Tensor) -> Tensor:
        (weight,) = state
        return weight @ x

    def write(self, k: Tensor, v: Tensor, rate: float | Tensor) -> Write:
        """Return one mini-batch of keys [..., n, d_k] and values [..., n, d_v] as a write of n rows: gain 2ηK."""
        require_tensors(2, k=k, v=v)
        if isinstance(rate, Tensor):
            require_width("rate", rate, k.shape[-2], "this mini-batch, one rate per row,")
        scale = rate.unsqueeze(-1) if isinstance(rate, Tensor) else rate
        return Write(k, v, (2 * scale * k.to(working_dtype(k))).to(k.dtype))


@dataclass(frozen=True)
class Mlp(InnerModel):
    """f(x) = W₂ gelu(W₁ x + b₁) + b₂, with a hidden layer `expand` times as wide as the keys."""

    initial_scale: ClassVar[float] = 0.02
    expand: int = 4

    def shapes(self, d_k: int, d_v: int) -> tuple[tuple[int, ...], ...]:
        hidden = self.expand * d_k
        return (hidden, d_k), (hidden,), (d_v, hidden), (d_v,)

    def __call__(self, state: State, x: Tensor) -> Tensor:
        first, first_bias, second, second_bias = state
        return second @ functional.gelu(first @ x + first_bias) + second_bias


@dataclass(frozen=True, eq=False)
class ResidualNorm(InnerModel):
    """f(x) = x + LayerNorm(inner(x)): keeps the outputs of a deep inner model at the scale of its inputs.

    `weight` and `bias` belong to the outer model: they are learned across sequences, not within one.
    """

    inner: InnerModel
    weight: Tensor | None = None  # [d]
    bias: Tensor | None = None  # [d]

    def shapes(self, d_k: int, d_v: int) -> tuple[tuple[int, ...], ...]:
        if d_k != d_v:
            expected = "equal widths, since a residual model adds its input"
            raise ShapeError(f"Keys are {d_k} and values {d_v} wide", expected=expected, code="widths_differ")
        return self.inner.shapes(d_k, d_v)

    def initial(self, d_k: int, d_v: int, *, seed: int = 0, dtype: torch.dtype | None = None) -> State:
        self.shapes(d_k, d_v)
        return self.inner.initial(d_k, d_v, seed=seed, dtype=dtype)

    def __call__(self, state: State, x: Tensor) -> Tensor:
        return x + functional.layer_norm(self.inner(state, x), x.shape[-1:], self.weight, self.bias)


@dataclass(frozen=True)
class TttOutput:
    """The outputs of a run, and the state after its last token."""

    out: Tensor  # [..., T, d_v]
    state: State


def run(
    model: InnerModel,
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rate: float | Tensor = 0.5,
    mini_batch: int | None = 1,
) -> TttOutput:
    """Read and train over q, k [..., T, d_k] and v [..., T, d_v].

    `rate` is η, a number or one per token [..., T]. `mini_batch` is the number of tokens whose gradients are taken at
    the same state: 1 is online, None is the whole sequence. The result is differentiable, also by the first state and
    the rates.
    """
    batch = _check(model, state, q, k, v, rate, mini_batch)
    dtype = working_dtype(q, k, v, *state)
    length = k.shape[-2]
    rates = torch.as_tensor(rate, dtype=dtype, device=k.device).expand(*batch, length)
    size = mini_batch or max(length, 1)

    def one(start: State, q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> tuple[Tensor, State]:
        """Run one sequence, without batch dimensions."""

        def error(at: State, key: Tensor, value: Tensor) -> Tensor:
            return (model(at, key) - value).square().sum()

        outputs = []
        for begin in range(0, length, size):
            here = slice(begin, begin + size)
            slopes = vmap(grad(error), in_dims=(None, 0, 0))(start, k[here], v[here])
            # Σ_{s ≤ t} η_s ∇_s for every t of the mini-batch
            steps = ((rates[here].reshape(-1, *[1] * (slope.ndim - 1)) * slope).cumsum(0) for slope in slopes)
            states = tuple(s - step for s, step in zip(start, steps, strict=True))
            outputs.append(vmap(model)(states, q[here]))
            start = tuple(s[-1] for s in states)
        return torch.cat(outputs), start

    def flat(tensor: Tensor, own: int) -> Tensor:
        """Give the tensor the whole batch shape and fold it into one dimension."""
        shape = tensor.shape[tensor.ndim - own :]
        return tensor.to(dtype).expand(*batch, *shape).reshape(-1, *shape)

    start = tuple(flat(s, len(own)) for s, own in zip(state, model.shapes(k.shape[-1], v.shape[-1]), strict=True))
    if length == 0 or 0 in batch:
        out = v.new_zeros(*batch, length, v.shape[-1])
        end = start
    else:
        out, end = vmap(one)(start, flat(q, 2), flat(k, 2), flat(v, 2), flat(rates, 1))
        out = out.reshape(*batch, *out.shape[1:]).to(common_dtype(q, k, v))
    final = tuple(s.reshape(*batch, *s.shape[1:]).to(first.dtype) for s, first in zip(end, state, strict=True))
    return TttOutput(out, final)


def _check(
    model: InnerModel, state: State, q: Tensor, k: Tensor, v: Tensor, rate: float | Tensor, mini_batch: int | None
) -> torch.Size:
    """Return the common leading shape, after checking that everything fits."""
    require_tensors(2, q=q, k=k, v=v)
    require_width("q", q, k.shape[-1], "a memory with these keys")
    if not q.shape[-2] == k.shape[-2] == v.shape[-2]:
        problem = f"There are {q.shape[-2]} queries, {k.shape[-2]} keys and {v.shape[-2]} values"
        raise ShapeError(problem, expected="as many of each, one per token", code="token_counts_differ")
    if mini_batch is not None and mini_batch < 1:
        problem = f"The mini-batch size is {mini_batch}"
        raise InputError(problem, expected="1 or more, or None", code="invalid_mini_batch")
    shapes = model.shapes(k.shape[-1], v.shape[-1])
    got = tuple(tuple(tensor.shape[-len(own) :]) for tensor, own in zip(state, shapes, strict=False))
    if len(state) != len(shapes) or got != shapes:
        problem = f"The state has shapes {', '.join(str(list(tensor.shape)) for tensor in state)}"
        expected = f"{', '.join(str(list(own)) for own in shapes)}, the state of {type(model).__name__}"
        advice = "Start from model.initial(d_k, d_v)"
        raise ShapeError(problem, expected=expected, advice=advice, code="state_does_not_match")
    named = {f"state[{index}]": tensor for index, tensor in enumerate(state)}
    require_tensors(0, **named)
    require_finite(q=q, k=k, v=v, rate=torch.as_tensor(rate), **named)
    leads = [tensor.shape[: tensor.ndim - len(own)] for tensor, own in zip(state, shapes, strict=True)]
    if isinstance(rate, Tensor) and rate.ndim:
        require_width("rate", rate, k.shape[-2], "this sequence, one rate per token,")
        leads.append(rate.shape[:-1])
    return require_broadcastable("q, k, v, rate and the state", q.shape[:-2], k.shape[:-2], v.shape[:-2], *leads)
