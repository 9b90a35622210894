"""Calling a compiled kernel again without asking which one it is.

Triton finds the compiled kernel of a call from the types and values of all its arguments, some forty, every time: for
small problems that takes longer than the kernels. Here a call says itself what decides it, and the kernel found the
first time is called again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_ready: dict[tuple[Any, ...], Any] = {}


def call(
    kernel: Any, grid: tuple[int, ...], kind: tuple[Any, ...], given: tuple[Any, ...], *, warps: int, **constants: Any
) -> None:
    """Run a kernel on the current stream.

    `kind` decides, with the constants, which compiled kernel it is: device, dtypes, and which tensors begin at a
    multiple of 16 bytes. `given` are the kernel's first parameters, the constants all others.
    """
    key = (kernel, kind, *constants.values(), warps)
    compiled = _ready.get(key)
    if compiled is None:
        compiled = kernel[grid](*given, **constants, num_warps=warps)
        if compiled is not None:  # as it is where kernels are interpreted
            _ready[key] = compiled
        return
    names = kernel.arg_names[len(given) :]
    compiled[(*grid, 1, 1)[:3]](*given, *(constants[name] for name in names))


def aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which of them begin at a multiple of 16 bytes: a compiled kernel may count on it, for each by itself."""
    return tuple(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
