"""Calling a compiled kernel again without looking it up.

Triton finds the compiled kernel of a call from the types and values of all its arguments, some forty, every time: for
small problems that takes longer than the kernels. Here the caller says what decides it, and the kernel found the first
time is called again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}
_ahead: ContextVar[bool] = ContextVar("rebind_compiling_ahead", default=False)


def call(
    kernel: Any, grid: tuple[int, ...], kind: tuple[Any, ...], tensors: tuple[Any, ...], *, warps: int, **constants: Any
) -> None:
    """Run a kernel on the current stream.

    `kind` decides, with the constants, which compiled kernel it is: device, dtypes, which arguments are None, and which
    tensors begin at a multiple of 16 bytes. `tensors` (and numbers) are the kernel's first parameters; the others are
    looked up in the constants, of which there may be more.
    """
    key = (kernel, kind, *constants.values(), warps)
    compiled = _compiled.get(key)
    names = kernel.arg_names[len(tensors) :]
    if compiled is not None and not _ahead.get():
        compiled[(*grid, 1, 1)[:3]](*tensors, *(constants[name] for name in names))
        return
    needed = {name: constants[name] for name in names}
    if not _ahead.get():
        compiled = kernel[grid](*tensors, **needed, num_warps=warps)
        if compiled is not None:  # None if kernels are interpreted
            _compiled[key] = compiled
    elif compiled is None:
        kernel.warmup(*tensors, grid=grid, **needed, num_warps=warps)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Any, ...],
    numbers: tuple[float, ...] = (),
    *,
    warps: int,
    **constants: Any,
) -> None:
    """Run a kernel on the device of its first tensor. Its parameters are the tensors, the numbers and the constants."""
    with torch.cuda.device_of(tensors[0]):
        call(kernel, grid, kind_of(*tensors), (*tensors, *numbers), warps=warps, **constants)


def compile_ahead(run: Callable[[], object]) -> None:
    """Compile the kernels that `run` calls, side by side, so that a first call waits for the slowest and not for all.

    The kernels are not run: what `run` computes means nothing. One that does not compile raises when it is called.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.5
        return
    token = _ahead.set(True)
    try:
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            run()
    except Exception:  # a compiler may raise anything
        return
    finally:
        _ahead.reset(token)


def kind_of(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return what decides which compiled kernel takes these tensors, for `call`."""
    return first.device, *(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in (first, *others))
