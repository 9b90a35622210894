"""A matrix stored as the product of two thin ones: the change that a write makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import require_broadcastable, require_tensors
from rebind.memory.precision import common_dtype, working_dtype


@dataclass(frozen=True, eq=False)
class LowRank:
    """`left @ right`, never multiplied out unless `dense` is called."""

    left: Tensor  # [..., d_v, n]
    right: Tensor  # [..., n, d_k]

    def __post_init__(self) -> None:
        require_tensors(2, left=self.left, right=self.right)
        require_broadcastable("left and right", self.left.shape[:-2], self.right.shape[:-2])
        if self.left.shape[-1] != self.right.shape[-2]:
            problem = f"The left factor has shape {list(self.left.shape)} and the right one {list(self.right.shape)}"
            raise ShapeError(problem, expected="[d_v, n] and [n, d_k]", code="factors_do_not_match")

    @property
    def rank(self) -> int:
        """Number of rows of `right`: an upper bound on the rank of the product."""
        return self.right.shape[-2]

    def dense(self) -> Tensor:
        """Return the product, [..., d_v, d_k]."""
        dtype = working_dtype(self.left, self.right)
        product = self.left.to(dtype) @ self.right.to(dtype)
        return product.to(common_dtype(self.left, self.right))

    def truncate(self, rank: int) -> LowRank:
        """Return the best approximation of at most `rank` (Eckart–Young), split evenly between the factors.

        It works on the factors' n×n cores: the product is never formed, however large it would be.
        """
        _check_rank(rank)
        columns, singular, rows = self._svd()
        root = singular[..., :rank].sqrt()
        dtype = common_dtype(self.left, self.right)
        return LowRank(
            (columns[..., :, :rank] * root.unsqueeze(-2)).to(dtype),
            (root.unsqueeze(-1) * rows[..., :rank, :]).to(dtype),
        )

    def singular_values(self) -> Tensor:
        """Return the singular values of the product, largest first."""
        return self._svd()[1].to(common_dtype(self.left, self.right))

    def truncation_error(self, rank: int) -> Tensor:
        """Return ‖product − truncate(rank)‖ / ‖product‖ in the Frobenius norm; 0 for a zero product."""
        _check_rank(rank)
        energy = self._svd()[1].square()
        total, lost = energy.sum(-1), energy[..., rank:].sum(-1)
        positive = lost > 0  # the slope of the root at 0 is infinite: keep it out of the graph
        relative = torch.where(positive, (lost.where(positive, 1.0) / total.where(positive, 1.0)).sqrt(), 0.0)
        return relative.to(common_dtype(self.left, self.right))

    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = working_dtype(self.left, self.right)
        left_basis, left_core = torch.linalg.qr(self.left.to(dtype))
        right_basis, right_core = torch.linalg.qr(self.right.to(dtype).mT)
        u, singular, vh = torch.linalg.svd(left_core @ right_core.mT, full_matrices=False)
        return left_basis @ u, singular, vh @ right_basis.mT


def _check_rank(rank: int) -> None:
    if rank < 0:
        raise InputError(f"The rank is {rank}", expected="0 or more", code="negative_rank")
