"""Fused Triton kernels: whether they can run here, and whether their results can be trusted.

Compilers for new chips have silently miscompiled kernels like these. So before kernels run on a new kind of problem,
they are compared with plain torch on a tiny one; a kind is everything that makes the compiler produce other code. The
comparison costs the compilation that the first call needs anyway, and a few milliseconds. It waits for the device, so
it is skipped while a CUDA graph is being recorded. REBIND_SELF_CHECK=0 turns it off.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rebind.errors import NumericalWarning

# Dtypes that kernels take, with the largest error, relative to each result's norm, that rounding explains. A
# miscompiled kernel is off by far more.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-4}

_faults: dict[tuple[object, ...], str | None] = {}  # a kind of problem → why its kernels cannot be trusted
_on_cpu = False  # whether they run for CPU tensors too, by Triton's interpreter


@cache
def load_kernels() -> Any:
    """Import the Triton kernels; return their package, or the reason why there are none as a str."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        from rebind.ops import triton
    except ImportError as problem:
        return f"its kernels cannot be imported ({problem})"
    return triton


def interpreted() -> bool:
    """Return whether Triton interprets kernels, so that they run without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Use kernels for CPU tensors too, by Triton's interpreter: for tests."""
    global _on_cpu
    before, _on_cpu = _on_cpu, True
    try:
        yield
    finally:
        _on_cpu = before


def available(x: Tensor) -> bool:
    """Return whether there are kernels for the device and the dtype of x."""
    return (x.is_cuda or _on_cpu) and x.dtype in TOLERANCE and x.numel() > 0 and not isinstance(load_kernels(), str)


def usable(x: Tensor, kind: tuple[object, ...], compare: Callable[[], str | None]) -> bool:
    """Return whether there are kernels for a tensor like x and those of this kind agree with plain torch."""
    if not available(x):
        return False
    return not x.is_cuda or find_fault((*kind, x.device, x.dtype), compare, "plain torch") is None


def find_fault(kind: tuple[object, ...], compare: Callable[[], str | None], instead: str) -> str | None:
    """Return why kernels of this kind cannot be trusted, or None.

    `compare` is called once per kind; if it finds a fault, a warning says so and that `instead` runs instead.
    """
    if os.environ.get("REBIND_SELF_CHECK", "1") in ("", "0"):
        return None
    if kind not in _faults:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None
        _faults[kind] = compare()
        if _faults[kind] is not None:
            warnings.warn(f"{_faults[kind]}; {instead} runs instead", NumericalWarning, stacklevel=3)
    return _faults[kind]


def forget_faults() -> None:
    """Forget all comparisons, so that every kind of kernel is compared again."""
    _faults.clear()


def compare_results(
    name: str,
    kernels: Callable[[], Sequence[Tensor | None]],
    truth: Callable[[], Sequence[Tensor | None]],
    like: Tensor,
) -> str | None:
    """Compare what kernels return with the `truth` by plain torch in float64; return what is wrong, or None.

    `like` has the dtype and the device of the problem. A result that is None is not compared.
    """
    try:
        results = kernels()
    except Exception as problem:  # a compiler may raise anything
        return f"{name} do not compile ({problem!s:.200})"
    worst = max(_error(one, true) for one, true in zip(results, truth(), strict=True) if one is not None)
    if worst <= TOLERANCE[like.dtype]:
        return None
    device = torch.cuda.get_device_name(like.device) if like.is_cuda else str(like.device)
    return f"{name} are wrong on {device}: they differ from plain torch by {worst:.1e}"


def draw(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """Draw normal numbers in float32 on the device of `like`, without touching the global random state."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=like.device)


def is_followed(*tensors: Tensor | None) -> bool:
    """Return whether something follows single operations and could not follow a kernel or an `autograd.Function`.

    That is a compiler, a tracer, a transform of torch.func, forward-mode differentiation, or batched gradients.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or is_transformed(*tensors)
    )


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether a transform of torch.func, forward-mode differentiation or batched gradients are under way."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors)
    )


def _error(got: Tensor, true: Tensor | None) -> float:
    assert true is not None
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - true).norm() / true.norm().clamp_min(1e-30))
