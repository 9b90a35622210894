"""The precision of products: autocast's dtype, products without autocast, and TensorFloat-32 for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def as_autocast(x: Tensor) -> Tensor:
    """Convert x as autocast would before a product."""
    return x.to(autocast_dtype(x))


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to which autocast would convert x before a product. It leaves float64 alone."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off on the device of x: a memory is a sum of many products, and φ may be an exponential of one."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@contextmanager
def tensor_float(on: bool) -> Iterator[None]:
    """Turn TensorFloat-32 products on or off, and restore the program's choice at the end.

    Without a GPU nothing happens: torch has one switch for all devices.
    """
    if not torch.cuda.is_available():
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # a program that has used the switch of torch 2.9 may not read the old one
        with _new_switch(on):
            yield
        return
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _new_switch(on: bool) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32" if on else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = "none"  # the setting for all operations applies
        if products.fp32_precision != before:
            products.fp32_precision = before
