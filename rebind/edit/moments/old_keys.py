"""Statistics of old keys and hidden states on ordinary text, with the factors that the closed forms use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rebind.memory.closed_form import NullSpace
from rebind.memory.solve import Cholesky, factor

EXPERT_PRIOR = 0.01  # added to the moment of every direction, relative to the mean
NULL_SPACE_SHARE = 0.9  # share of directions in the null space: those that old keys use least


@dataclass(frozen=True, eq=False)
class SecondMoment:
    """The second moment of one site's keys."""

    total: Tensor  # [d_k, d_k] float64: Σ kkᵀ; [E, inner, inner] for routed experts, whose keys are E·inner wide
    tokens: int

    def mean(self) -> Tensor:
        return self.total / self.tokens


@dataclass(frozen=True, eq=False)
class OldStates:
    """Statistics of the hidden states after a block on ordinary text."""

    mean: Tensor  # [d] float64
    covariance: Tensor  # [d, d] float64
    sample: Tensor  # [s, d]: a sample of the states

    @classmethod
    def of(cls, total: Tensor, sample: Tensor) -> OldStates:
        """Return the statistics from Σ [h, 1] [h, 1]ᵀ, [d + 1, d + 1] float64."""
        mean = total[:-1, -1] / total[-1, -1]
        return cls(mean, total[:-1, :-1] / total[-1, -1] - torch.outer(mean, mean), sample)


@dataclass(eq=False)
class OldKeys:
    """The second moment of a site's old keys, and its factors, which are computed on first use."""

    moment: Tensor  # E[kkᵀ] as in `SecondMoment`, float64

    @cached_property
    def factored(self) -> Cholesky | BlockFactor:
        return factor(self.moment, "moment") if self.moment.ndim == 2 else BlockFactor.of(self.moment)

    @cached_property
    def null_space(self) -> NullSpace:
        return NullSpace.smallest(self.moment, NULL_SPACE_SHARE)

    @cached_property
    def block_projectors(self) -> Tensor:
        """The projector on the null space of every block, [E, inner, inner]."""
        bases = [NullSpace.smallest(block, NULL_SPACE_SHARE).basis for block in self.moment]
        return torch.stack([basis @ basis.mT for basis in bases])


@dataclass(frozen=True, eq=False)
class BlockFactor:
    """A factor of a second moment with one block per expert.

    Keys are whitened block by block, K L⁻ᵀ. For whitened keys the moment is the identity, and the gain of the keys is
    the gain of the whitened keys times L⁻¹.
    """

    lower: Tensor  # [E, inner, inner]

    @classmethod
    def of(cls, moment: Tensor) -> BlockFactor:
        """Factor a moment [E, inner, inner] plus a small multiple of I, for experts that few tokens reach."""
        mean = moment.diagonal(dim1=-2, dim2=-1).mean()
        eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
        return cls(factor(moment + EXPERT_PRIOR * mean * eye, "moment").lower)

    def whiten(self, keys: Tensor) -> Tensor:
        """Return L⁻¹Kᵀ [d_k, n] of keys [n, d_k]."""
        blocks = keys.to(self.lower.dtype).unflatten(-1, (len(self.lower), -1)).permute(1, 2, 0)
        return torch.linalg.solve_triangular(self.lower, blocks, upper=False).flatten(0, 1)

    def unwhiten(self, columns: Tensor) -> Tensor:
        """Return L⁻ᵀ columns."""
        blocks = columns.unflatten(0, (len(self.lower), -1))
        return torch.linalg.solve_triangular(self.lower.mT, blocks, upper=True).flatten(0, 1)
