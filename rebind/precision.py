"""TensorFloat-32 for a while: float32 products of CUDA, faster and rounded to eleven bits, or exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_float(on: bool) -> Iterator[None]:
    """Products with TensorFloat-32 or without, whatever the program chose, whose choice comes back at the end."""
    products = torch.backends.cuda.matmul
    # torch 2.9 has a switch of another name, and refuses to read the old one once a program has used the new
    newer = hasattr(products, "fp32_precision")
    name, value = ("fp32_precision", "tf32" if on else "ieee") if newer else ("allow_tf32", on)
    before = getattr(products, name)
    setattr(products, name, value)
    try:
        yield
    finally:
        setattr(products, name, before)
