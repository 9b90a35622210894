"""A dense memory: stored pairs that are read by a sharp softmax, so that there is no wall at d_k associations.

A linear memory reads W q = Σ vᵢ (kᵢ·q): every stored value leaks into every read by the overlap of its key, and d_k
independent keys fill the matrix. A dense memory stores the pairs as rows and reads

    s = K q        wᵢ = exp(β (sᵢ − τᵢ)) / (1 + Σⱼ exp(β (sⱼ − τⱼ)))        read = Σ wᵢ vᵢ

a softmax over the rows and one empty slot. A query nearer to a row than its threshold τᵢ reads the value of that row,
and one that is near to none reads nothing. Rows of unit length overlap by √(2 ln n / d_k) at most, so exponentially
many fit below a threshold (Ramsauer et al., 2021, without the empty slot). Forgetting removes a row, exactly.

Hidden states of a language model share a few directions that say nothing about the subject. `Whitening` removes their
mean and their covariance before they are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.checks import require_finite, require_tensors, require_width
from rebind.memory.precision import working_dtype

SHRINKAGE = (
    0.03  # of the mean variance, added to every variance: directions that old states hardly use are not blown up
)
BETA = 60.0
TOP_K = 16
GROUP = 64  # scores whose maximum is looked at first
AT_ONCE = 2**28  # scores of a read that are in memory at once


@dataclass(frozen=True, eq=False)
class Whitening:
    """States as unit vectors in which old states are spread evenly: z = normalize((h − μ) F) with F Fᵀ = C⁻¹."""

    mean: Tensor  # [d]
    factor: Tensor  # [d, d]

    @classmethod
    def fit(cls, mean: Tensor, covariance: Tensor, shrinkage: float = SHRINKAGE) -> Whitening:
        """Return the whitening of states with a mean [d] and a covariance [d, d], in float64."""
        require_tensors(2, covariance=covariance)
        require_width("mean", mean, covariance.shape[-1], "the covariance")
        wide = covariance.double()
        variance = wide.diagonal().mean()
        if not float(variance) > 0:
            raise InputError("The covariance is zero", expected="states that differ", code="no_variance")
        shrunk = wide + shrinkage * variance * torch.eye(len(wide)).to(wide)
        inverse = torch.linalg.solve_triangular(
            torch.linalg.cholesky(shrunk), torch.eye(len(wide)).to(wide), upper=False
        )
        return cls(mean.double(), inverse.mT.contiguous())  # C = L Lᵀ, so C⁻¹ = L⁻ᵀ L⁻¹

    def __call__(self, states: Tensor) -> Tensor:
        """Return states [..., d] as unit vectors [..., d] in their own dtype, or float32 if that is narrower."""
        wide = states.to(working_dtype(states))
        centered = (wide - self.mean.to(wide)) @ self.factor.to(wide)
        return functional.normalize(centered, dim=-1)


@dataclass(frozen=True, eq=False)
class Dense:
    """Pairs of keys and values, one per row, each with a threshold. Operations return new memories."""

    keys: Tensor  # [n, d_k], of unit length
    values: Tensor  # [n, d_v]
    thresholds: Tensor  # [n]: how near a query must come to read the row
    beta: float = BETA
    top_k: int = TOP_K  # rows that take part in a read; the others weigh less than the last of them
    coarse_keys: Tensor | None = (
        None  # the keys in a narrower dtype, to find the nearest rows with (`with_coarse_keys`)
    )

    def __post_init__(self) -> None:
        require_tensors(2, keys=self.keys, values=self.values)
        if not len(self.keys) == len(self.values) == len(self.thresholds):
            shapes = ", ".join(str(list(part.shape)) for part in (self.keys, self.values, self.thresholds))
            expected = "keys [n, d_k], values [n, d_v] and thresholds [n]"
            raise InputError(f"Keys, values and thresholds are {shapes}", expected=expected, code="rows_differ")

    @classmethod
    def empty(cls, d_k: int, d_v: int, *, beta: float = BETA, top_k: int = TOP_K) -> Dense:
        """Return a memory without rows, in float32."""
        return cls(torch.zeros(0, d_k), torch.zeros(0, d_v), torch.zeros(0), beta, top_k)

    def __len__(self) -> int:
        return len(self.keys)

    def write(self, keys: Tensor, values: Tensor, thresholds: Tensor | float) -> Dense:
        """Return the memory with more rows; keys [m, d_k] of unit length, values [m, d_v]."""
        require_finite(keys=keys, values=values)
        require_width("keys", keys, self.keys.shape[-1], "the memory")
        require_width("values", values, self.values.shape[-1], "the memory")
        wanted = torch.as_tensor(thresholds, dtype=self.thresholds.dtype, device=self.keys.device).expand(len(keys))
        parts = ((self.keys, keys), (self.values, values), (self.thresholds, wanted))
        all_keys, all_values, all_thresholds = (torch.cat([old, new.to(old)]) for old, new in parts)
        return Dense(all_keys, all_values, all_thresholds, self.beta, self.top_k)

    def with_coarse_keys(self, dtype: torch.dtype = torch.bfloat16) -> Dense:
        """Return a memory that finds the nearest rows in a narrower dtype. Their weights are computed as before."""
        return replace(self, coarse_keys=self.keys.to(dtype))

    def remove(self, rows: Tensor) -> Dense:
        """Return the memory without some rows: what the others answer does not depend on them any more."""
        stays = torch.ones(len(self), dtype=torch.bool, device=self.keys.device)
        stays[rows.to(stays.device)] = False
        coarse = None if self.coarse_keys is None else self.coarse_keys[stays]
        keys, values, thresholds = (part[stays] for part in (self.keys, self.values, self.thresholds))
        return replace(self, keys=keys, values=values, thresholds=thresholds, coarse_keys=coarse)

    def weights(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [..., k] of the nearest rows, at most `top_k`, and which rows they are."""
        require_width("queries", queries, self.keys.shape[-1], "the memory")
        queries, count = queries.to(self.keys), min(self.top_k, len(self))
        if self.coarse_keys is None:
            best = top_rows(functional.linear(queries, self.keys, -self.thresholds), count)
        else:
            coarse = self.coarse_keys
            scores = functional.linear(queries.to(coarse), coarse, -self.thresholds.to(coarse))
            rows = top_rows(scores, min(2 * count, len(self)))[1]
            exact = (self.keys[rows] @ queries.unsqueeze(-1)).squeeze(-1) - self.thresholds[rows]
            values, places = exact.topk(count, dim=-1)
            best = values, rows.gather(-1, places)
        logits = functional.pad(self.beta * best[0], (1, 0))  # the empty slot has logit 0
        return torch.softmax(logits, dim=-1)[..., 1:], best[1]

    def read(self, queries: Tensor) -> Tensor:
        """Return what the memory answers to queries [..., d_k] of unit length: [..., d_v], zero where none is near."""
        if not len(self) or not queries.numel():
            return queries.new_zeros(*queries.shape[:-1], self.values.shape[-1])
        at_once = max(1, AT_ONCE // len(self))
        reads = []
        for part in queries.reshape(-1, queries.shape[-1]).split(at_once):
            weights, rows = self.weights(part)
            reads.append(functional.embedding_bag(rows, self.values, per_sample_weights=weights, mode="sum"))
        return torch.cat(reads).reshape(*queries.shape[:-1], -1)


def top_rows(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores [..., count] and their places, the largest first.

    Of many scores, the largest are in those groups that have the largest maxima: finding these first reads the scores
    once, where a sort of all of them takes several passes.
    """
    length = scores.shape[-1]
    groups = length // GROUP
    if groups <= 4 * count:
        best = scores.topk(count, dim=-1)
        return best.values, best.indices
    whole = scores[..., : groups * GROUP].unflatten(-1, (groups, GROUP))
    chosen = whole.amax(-1).topk(count, dim=-1).indices  # [..., count]
    inside = whole.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, GROUP)).flatten(-2)
    places = (chosen.unsqueeze(-1) * GROUP + torch.arange(GROUP, device=scores.device)).flatten(-2)
    rest = torch.arange(groups * GROUP, length, device=scores.device).expand(*scores.shape[:-1], -1)
    best = torch.cat([inside, scores[..., groups * GROUP :]], dim=-1).topk(count, dim=-1)
    return best.values, torch.cat([places, rest], dim=-1).gather(-1, best.indices)
