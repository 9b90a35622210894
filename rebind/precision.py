"""TensorFloat-32 for a while: float32 products of CUDA, faster and rounded to eleven bits, or exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
