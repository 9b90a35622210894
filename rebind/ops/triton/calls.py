"""Calling a compiled kernel again without asking which one it is.

Triton finds the compiled kernel of a call from the types and values of all its arguments, some forty, every time: for
small problems that takes longer than the kernels. Here a call says itself what decides it, and the kernel found the
first time is called again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import triton
from torch import Tensor

_ready: dict[tuple[Any, ...], Any] = {}
_ahead: ContextVar[bool] = ContextVar("rebind_compiling_ahead", default=False)


def call(
    kernel: Any, grid: tuple[int, ...], kind: tuple[Any, ...], given: tuple[Any, ...], *, warps: int, **constants: Any
) -> None:
    """Run a kernel on the current stream.

    `kind` decides, with the constants, which compiled kernel it is: device, dtypes, and which tensors begin at a
    multiple of 16 bytes. `given` are the kernel's first parameters, the constants all others.
    """
    key = (kernel, kind, *constants.values(), warps)
    compiled = _ready.get(key)
    if _ahead.get():
        if compiled is None:
            kernel.warmup(*given, grid=grid, **constants, num_warps=warps)
        return
    if compiled is None:
        compiled = kernel[grid](*given, **constants, num_warps=warps)
        if compiled is not None:  # as it is where kernels are interpreted
            _ready[key] = compiled
        return
    names = kernel.arg_names[len(given) :]
    compiled[(*grid, 1, 1)[:3]](*given, *(constants[name] for name in names))


def compile_ahead(run: Callable[[], object]) -> None:
    """Compile the kernels that `run` calls, side by side, so that a first call waits for the slowest and not for all.

    Its calls are not made: what it computes means nothing. What does not compile will say so when it is called.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.5
        return
    before = _ahead.set(True)
    try:
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            run()
    except Exception:  # whatever a compiler may raise
        return
    finally:
        _ahead.reset(before)


def aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which of them begin at a multiple of 16 bytes: a compiled kernel may count on it, for each by itself."""
    return tuple(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
