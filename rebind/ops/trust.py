"""Trust, but look: before kernels run on a kind of problem, they are compared with plain torch on a tiny one.

Compilers for new chips have been wrong about kernels like these without a word. A kind is everything that makes the
compiler produce other code. The check costs the compilation that the first call needs anyway and a few milliseconds; it
waits for the device, so a CUDA graph that is being captured goes without. REBIND_SELF_CHECK=0 turns it off.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rebind.errors import NumericalWarning

# Largest error, as a share of each result's norm, that rounding explains; a miscompiled kernel is off by far more.
ROUNDING = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-4}

_known: dict[tuple[object, ...], str | None] = {}  # a kind of problem → why its kernels are not to be trusted


def distrusted(kind: tuple[object, ...], compare: Callable[[], str | None], instead: str) -> str | None:
    """Why kernels of this kind are not to be trusted, or None. `compare` is asked once; its answer is a warning, too,
    that `instead` runs instead."""
    if os.environ.get("REBIND_SELF_CHECK", "1") in ("", "0"):
        return None
    if kind not in _known:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None
        _known[kind] = compare()
        if _known[kind] is not None:
            warnings.warn(f"{_known[kind]}: {instead} runs instead", NumericalWarning, stacklevel=3)
    return _known[kind]


def difference(
    name: str,
    kernels: Callable[[], Sequence[Tensor | None]],
    truth: Callable[[], Sequence[Tensor | None]],
    like: Tensor,
    than: str,
) -> str | None:
    """Why `kernels` are not to be trusted, or None: what they give against the `truth` in float64.

    `like` has the dtype and the device of the problem; None among the results is nothing to compare.
    """
    try:
        found = kernels()
    except Exception as problem:  # whatever a compiler may raise
        return f"{name} do not compile ({problem!s:.200})"
    worst = max(_error(one, true) for one, true in zip(found, truth(), strict=True) if one is not None)
    if worst <= ROUNDING[like.dtype]:
        return None
    device = torch.cuda.get_device_name(like.device) if like.is_cuda else str(like.device)
    return f"{name} are wrong on {device}: they differ from {than} by {worst:.1e}"


def noise(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """Random numbers in float32, where `like` is, that leave everybody else's alone."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=like.device)


def _error(found: Tensor, true: Tensor | None) -> float:
    assert true is not None
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.double() - true).norm() / true.norm().clamp_min(1e-30))
