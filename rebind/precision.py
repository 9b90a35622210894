"""Which precision products run in: as autocast has it, without autocast, with TensorFloat-32 for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def as_autocast(x: Tensor) -> Tensor:
    """x as autocast would give it to a product."""
    return x.to(autocast_dtype(x))


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would give x to a product. float64 it leaves alone."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Where x is, products in their factors' own dtype: a memory is a sum of many, φ may be an exponential of one."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@contextmanager
def tensor_float(on: bool) -> Iterator[None]:
    """Products with TensorFloat-32 or without, whatever the program chose, whose choice comes back at the end.

    Nothing happens where there is no GPU: torch's switch is one for all devices.
    """
    if not torch.cuda.is_available():
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # once a program has used the switch of torch 2.9, the old one must not be read
        with _by_the_new_switch(on):
            yield
        return
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _by_the_new_switch(on: bool) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32" if on else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = "none"  # what is said for all operations counts
        if products.fp32_precision != before:
            products.fp32_precision = before
