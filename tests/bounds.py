"""Bounds checks for interpreted kernels: a load or store that is not masked off must touch a tensor of the call.

On a GPU a read past the end of a tensor goes unnoticed if that memory belongs to the program, and ends it if not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * bool(tensor.numel())


@contextmanager
def watched() -> Iterator[None]:
    """Check the accesses of interpreted kernels; one outside of its tensors raises IndexError."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, arguments = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    begins, ends = np.empty(0, np.uint64), np.empty(0, np.uint64)

    def note_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal begins, ends
        converted = arguments(self, args, kwargs)
        tensors = [
            one for one in (*converted[0], *converted[1].values()) if isinstance(one, torch.Tensor) and one.numel()
        ]
        extents = sorted(extent(one) for one in tensors)
        begins = np.array([begin for begin, _ in extents], np.uint64)
        ends = np.maximum.accumulate(np.array([end for _, end in extents], np.uint64)) if extents else begins
        return converted

    def check(pointers: Any, mask: Any) -> None:
        active = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        at = pointers.data[active].astype(np.uint64)
        place = np.searchsorted(begins, at, side="right").astype(np.int64) - 1
        size = pointers.get_element_ty().primitive_bitwidth // 8
        outside = (place < 0) | (at + np.uint64(size) > ends[np.maximum(place, 0)])
        if outside.any():
            raise IndexError(f"{outside.sum()} of {at.size} elements of a tile are outside of the kernel's tensors")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(builder, "create_masked_load", checked_load),
        mock.patch.object(builder, "create_masked_store", checked_store),
        mock.patch.object(executor, "_init_args_hst", note_arguments),
    ):
        yield
