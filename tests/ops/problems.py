"""Scans to run, and what to compare of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rebind.ops import scan
from tests.support import Draw, assert_close

COEFFICIENTS = ("log_decay", "erase", "write")
CHANNELS = ("log_decays", "erase", "write", "probe")  # a decay per key channel, and a probe that is not the key


@dataclass(frozen=True)
class Problem:
    """A scan in float64: its tensors by name, and its options."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Problem:
        """In another dtype; the state stays in what states are kept in."""
        wide = torch.promote_types(dtype, torch.float32)
        return replace(self, tensors={n: x.to(wide if n == "state" else dtype) for n, x in self.tensors.items()})

    def double(self) -> Problem:
        """What this problem is exactly: its rounded inputs in float64."""
        return replace(self, tensors={name: x.double() for name, x in self.tensors.items()})

    def with_options(self, **options: Any) -> Problem:
        return replace(self, options={**self.options, **options})

    def change(self, **tensors: Tensor) -> Problem:
        return replace(self, tensors={**self.tensors, **tensors})


def problem(
    length: int = 20,
    d_k: int = 6,
    d_v: int = 5,
    *,
    batch: int = 2,
    heads: int = 3,
    key_heads: int | None = None,
    coefficients: Sequence[str] = COEFFICIENTS,
    state: bool = True,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Return a gated_delta problem with unit keys; `lengths` packs sequences of those lengths.

    The coefficient "log_decays" is a `log_decay` with a number per channel.
    """
    draw = Draw(seed)
    sequences = batch
    if lengths is not None:
        batch, length, sequences = 1, sum(lengths), len(lengths)
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        options["cu_seqlens"] = bounds
    shape = (batch, length, key_heads or heads)
    tensors = {"q": draw.unit(*shape, d_k), "k": draw.unit(*shape, d_k), "v": draw.normal(batch, length, heads, d_v)}
    numbers = {
        "log_decay": -0.3 * draw.uniform(batch, length, heads),
        "erase": draw.uniform(batch, length, heads),
        "write": draw.uniform(batch, length, heads) + 0.1,
    }
    if "probe" in coefficients:
        numbers["probe"] = draw.unit(*shape, d_k)
    if "log_decays" in coefficients:
        numbers["log_decays"] = -(draw.uniform(batch, length, heads, d_k) ** 3)
    tensors |= {name.replace("decays", "decay"): numbers[name] for name in coefficients}
    if state:
        tensors["state"] = draw.normal(sequences, heads, d_v, d_k)
    return Problem(tensors, options)


def home(backend: str) -> str:
    """Where a backend's tensors live: kernels run on a GPU if there is one, and are interpreted on a CPU if not."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def outcome(case: Problem, backend: str, *, of: Sequence[str] = ("out", "final")) -> dict[str, Tensor]:
    """The output, the final state, and the gradients of every tensor, with cotangents on both results.

    `of` names the results that the loss depends on. Cotangents are the same for every backend and dtype.
    """
    there = home(backend)
    tensors = {name: x.detach().to(there, copy=True).requires_grad_() for name, x in case.tensors.items()}
    options = {name: x.to(there) if isinstance(x, Tensor) else x for name, x in case.options.items()}
    named = dict(tensors)
    out, final = scan(named.pop("q"), named.pop("k"), named.pop("v"), **named, **options, backend=backend)
    draw = Draw(99)
    slopes = {"out": draw.normal(*out.shape).to(out), "final": draw.normal(*final.shape).to(final)}
    loss = sum(((x * slopes[name]).double().sum() for name, x in (("out", out), ("final", final)) if name in of))
    grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True, materialize_grads=True)
    found = {"out": out.detach(), "final": final.detach()}
    found |= {f"d_{name}": grad for name, grad in zip(tensors, grads, strict=True)}
    return {name: x.cpu() for name, x in found.items()}


def compare(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        try:
            assert_close(got[name], expected[name], tolerance)
        except AssertionError as problem:
            raise AssertionError(f"{name}: {problem}") from None


def tolerance_of(dtype: torch.dtype) -> float:
    """What rounding allows, relative to the largest entry.

    Sums run in float32 or better: some hundreds of roundings of that, and two of a narrower dtype, once as the
    result is written and once as its cotangent is.
    """
    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:
        return 4096 * eps  # 9e-13
    return 256 * torch.finfo(torch.float32).eps + (2 * eps if dtype != torch.float32 else 0.0)  # 3e-5; bf16 1.6e-2
