"""Seeded inputs, and comparisons of tensors and of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rebind import RebindError, Write

BATCHES = [(), (3,), (2, 3)]
SIZES = [(0, 5), (1, 5), (3, 5), (5, 5), (8, 5), (50, 5)]  # (n, d): n = 0, 1, below, at, above and 10·d


class Draw:
    """Tensors from one seed, in float64 by default."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def unit(self, *shape: int) -> Tensor:
        return torch.nn.functional.normalize(self.normal(*shape), dim=-1)

    def orthonormal(self, rows: int, width: int) -> Tensor:
        return torch.linalg.qr(self.normal(width, rows))[0].mT

    def moment(self, width: int, *batch: int) -> Tensor:
        """Return a well-conditioned second moment."""
        keys = self.normal(*batch, 4 * width, width)
        return keys.mT @ keys / (4 * width)

    def spectrum(self, eigenvalues: Tensor) -> Tensor:
        """Return a symmetric matrix with these eigenvalues and random eigenvectors."""
        basis = self.orthonormal(len(eigenvalues), len(eigenvalues))
        matrix = basis.mT @ torch.diag(eigenvalues) @ basis
        return (matrix + matrix.mT) / 2

    def write(self, rows: int, d_k: int, d_v: int, *batch: int, retain: float | Tensor = 1.0) -> Write:
        """Return an arbitrary write, its gain scaled so that long products stay small."""
        scale = 1 / max(rows * d_k, 1) ** 0.5
        return Write(
            self.normal(*batch, rows, d_k),
            self.normal(*batch, rows, d_v),
            scale * self.normal(*batch, rows, d_k),
            retain,
        )


@contextmanager
def raises(error: type[RebindError], code: str) -> Iterator[pytest.ExceptionInfo[RebindError]]:
    """Expect an error of this class with this code."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code


def assert_errors(*cases: tuple[type[RebindError], str, Callable[[], object]]) -> None:
    """Expect every call to raise its error with its code."""
    for error, code, call in cases:
        with raises(error, code):
            call()


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Expect equality to `tolerance`, relative to the largest expected entry (or 1), the same shape, and no NaN."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    got, expected = got.detach(), expected.detach()
    assert torch.isfinite(got).all(), "result holds NaN or infinity"
    scale = max(1.0, float(expected.abs().max()))
    error = float((got.double() - expected.double()).abs().max()) / scale
    assert error <= tolerance, f"relative error {error:.3e} exceeds {tolerance:.1e}"


def recurrence(W: Tensor, k: Tensor, v: Tensor, decay: float, erase: float, write: float) -> Tensor:
    """Return α W (I − ε k kᵀ) + η v kᵀ, written out, for a single key and value."""
    return decay * (W - erase * torch.outer(W @ k, k)) + write * torch.outer(v, k)
