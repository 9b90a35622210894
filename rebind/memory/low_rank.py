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
        if rank < 0:
            raise InputError(f"The rank is {rank}", expected="0 or more", code="negative_rank")
        dtype, out = working_dtype(self.left, self.right), common_dtype(self.left, self.right)
        left_basis, left_core = torch.linalg.qr(self.left.to(dtype))
        right_basis, right_core = torch.linalg.qr(self.right.to(dtype).mT)
        u, singular, vh = torch.linalg.svd(left_core @ right_core.mT, full_matrices=False)
        columns, rows = left_basis @ u, vh @ right_basis.mT
        root = singular[..., :rank].sqrt()
        return LowRank(
            (columns[..., :, :rank] * root.unsqueeze(-2)).to(out),
            (root.unsqueeze(-1) * rows[..., :rank, :]).to(out),
        )
