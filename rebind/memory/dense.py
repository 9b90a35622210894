"""A dense memory: stored pairs that are read by a sharp softmax, so that there is no wall at d_k associations.

A linear memory reads W q = Σ vᵢ (kᵢ·q): every stored value leaks into every read by the overlap of its key, and d_k
independent keys fill the matrix. A dense memory stores the pairs as rows and reads

    s = K q        wᵢ = exp(β (sᵢ − τᵢ)) / (1 + Σⱼ exp(β (sⱼ − τⱼ)))        read = Σ wᵢ vᵢ

a softmax over the rows and one empty slot. A query nearer to a row than its threshold τᵢ reads the value of that row,
and one that is near to none reads nothing. Rows of unit length overlap by √(2 ln n / d_k) at most, so exponentially
many fit below a threshold (Ramsauer et al., 2021, without the empty slot). Forgetting removes a row, exactly.

Rows may share a value: `owner` says which one each row returns. A large memory looks for the nearest rows in `Cells`
first, so that a read does not compare a query with every row.

Hidden states of a language model share a few directions that say nothing about the subject. `Whitening` removes their
mean and their covariance before they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.checks import require_finite, require_tensors, require_width
from rebind.memory.precision import working_dtype

# Of the mean variance, added to every variance: directions that old states hardly use are not blown up.
SHRINKAGE = 0.03
BETA = 200.0  # sharp: names that resemble one another have overlaps of .97 in SmolLM2
TOP_K = 16
GROUP = 64  # scores whose maximum is looked at first
AT_ONCE = 2**27  # numbers of a read that are in memory at once
MANY = 4096  # rows: a memory in a model that has more is read by cells
CELL = 16  # rows of a cell, at most
ALIKE = 0.6  # a row that is less similar to the row before it begins a new cell
PROJECTED = 192  # dimensions in which a query is compared with cells
NEAREST_CELLS = 8  # whose rows are compared with a query
FAR = 0.4  # a query that is less similar than this to every cell reads nothing


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


@lru_cache(maxsize=8)
def _random_basis(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    draw = torch.randn(width, min(width, PROJECTED), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(draw).Q.to(device, dtype)


@dataclass(frozen=True, eq=False)
class Cells:
    """Stretches of similar rows that share a value, and the direction of the mean key of each in a few dimensions.

    A query is compared with the cells first, and then exactly with the rows of the nearest ones. In p dimensions of a
    random basis a cosine is off by about 1/√p, so the cell of a row that is near enough to be read stands out from
    thousands of strangers. Most queries are near to no cell, and are done.
    """

    basis: Tensor  # [d_k, p]: orthonormal columns
    centers: Tensor  # [c, p], of unit length
    first: Tensor  # [c]: the first row of each cell
    size: Tensor  # [c]: its number of rows, at most CELL

    @classmethod
    def of(cls, keys: Tensor, owner: Tensor) -> Cells:
        """Return the cells of rows."""
        basis, device = _random_basis(keys.shape[-1], keys.dtype, keys.device), keys.device
        differs = (owner[1:] != owner[:-1]) | ((keys[1:] * keys[:-1]).sum(-1) < ALIKE)
        run = functional.pad(differs.cumsum(0), (1, 0)) if len(owner) else owner  # rows that belong together
        counts = torch.bincount(run)
        place = torch.arange(len(owner), device=device) - (counts.cumsum(0) - counts)[run]
        begins = place % CELL == 0
        first, cell = begins.nonzero().squeeze(-1), begins.cumsum(0) - 1
        size = torch.bincount(cell, minlength=len(first))
        sums = keys.new_zeros(len(first), keys.shape[-1]).index_add(0, cell, keys)
        return cls(basis, functional.normalize(sums @ basis, dim=-1), first, size)

    def between(self, begin: int, end: int) -> Cells:
        """Return the cells of the rows from `begin` to `end`, which must not cut a cell."""
        low, high = torch.searchsorted(self.first, self.first.new_tensor([begin, end])).tolist()
        part = slice(low, high)
        return replace(self, centers=self.centers[part], first=self.first[part] - begin, size=self.size[part])

    def similarity(self, queries: Tensor) -> Tensor:
        """Return how similar queries [..., d_k] are to each cell, [..., c]."""
        return functional.normalize(queries @ self.basis, dim=-1) @ self.centers.mT

    def rows_near(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [..., m] of the cells with the highest scores, and which of them only fill a short cell."""
        nearest = top_rows(scores, min(NEAREST_CELLS, len(self.first)))[1].unsqueeze(-1)
        place = torch.arange(CELL, device=nearest.device)
        is_filler = place >= self.size[nearest]
        rows = self.first[nearest] + torch.where(is_filler, 0, place)
        return rows.flatten(-2), is_filler.flatten(-2)


@dataclass(frozen=True, eq=False)
class Dense:
    """Rows of a key, a threshold and a value, which rows may share. Operations return new memories."""

    keys: Tensor  # [n, d_k], of unit length
    values: Tensor  # [v, d_v]
    thresholds: Tensor  # [n]: how near a query must come to read the row
    beta: float = BETA
    top_k: int = TOP_K  # rows that take part in a read; the others weigh less than the last of them
    # [n]: the value of each row; by default, row i has value i
    owner: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    cells: Cells | None = None  # to find the nearest rows with (`with_cells`)

    def __post_init__(self) -> None:
        require_tensors(2, keys=self.keys, values=self.values)
        if not len(self.owner):
            object.__setattr__(self, "owner", torch.arange(len(self.values), device=self.keys.device))
        if not len(self.keys) == len(self.owner) == len(self.thresholds):
            shapes = ", ".join(str(list(part.shape)) for part in (self.keys, self.values, self.thresholds))
            expected = "keys [n, d_k], a value for each of them, and thresholds [n]"
            raise InputError(f"Keys, values and thresholds are {shapes}", expected=expected, code="rows_differ")

    @classmethod
    def empty(cls, d_k: int, d_v: int, *, beta: float = BETA, top_k: int = TOP_K) -> Dense:
        """Return a memory without rows, in float32."""
        return cls(torch.zeros(0, d_k), torch.zeros(0, d_v), torch.zeros(0), beta, top_k)

    @classmethod
    def concatenate(cls, parts: Sequence[Dense]) -> Dense:
        """Return the rows of several memories in one, with cells if any of them has cells."""
        rows = list(accumulate(map(len, parts), initial=0))
        values = accumulate((len(part.values) for part in parts), initial=0)
        joined = cls(
            torch.cat([part.keys for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat([part.thresholds for part in parts]),
            parts[0].beta,
            parts[0].top_k,
            torch.cat([part.owner + offset for part, offset in zip(parts, values, strict=False)]),
        )
        if not any(part.cells for part in parts):
            return joined
        cells = [part.cells or Cells.of(part.keys, part.owner) for part in parts]
        return replace(
            joined,
            cells=Cells(
                cells[0].basis,
                torch.cat([one.centers for one in cells]),
                torch.cat([one.first + offset for one, offset in zip(cells, rows, strict=False)]),
                torch.cat([one.size for one in cells]),
            ),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def write(self, keys: Tensor, values: Tensor, thresholds: Tensor | float) -> Dense:
        """Return the memory with more rows; keys [m, d_k] of unit length, values [m, d_v]."""
        require_finite(keys=keys, values=values)
        require_width("keys", keys, self.keys.shape[-1], "the memory")
        require_width("values", values, self.values.shape[-1], "the memory")
        wanted = torch.as_tensor(thresholds).to(self.thresholds).expand(len(keys))
        return Dense.concatenate([self, Dense(keys.to(self.keys), values.to(self.values), wanted)])

    def with_cells(self) -> Dense:
        """Return a memory that looks for the nearest rows in the nearest cells only."""
        return self if self.cells else replace(self, cells=Cells.of(self.keys, self.owner))

    def remove(self, rows: Tensor) -> Dense:
        """Return the memory without some rows: what the others answer does not depend on them any more."""
        stays = torch.ones(len(self), dtype=torch.bool, device=self.keys.device)
        stays[rows.to(stays.device)] = False
        used, owner = self.owner[stays].unique(return_inverse=True)
        keys, thresholds = self.keys[stays], self.thresholds[stays]
        rest = Dense(keys, self.values[used], thresholds, self.beta, self.top_k, owner)
        return rest.with_cells() if self.cells else rest

    def between(self, begin: int, end: int) -> Dense:
        """Return the rows from `begin` to `end`; `owner` must not decrease, and its runs must not be cut."""
        owner = self.owner[begin:end]
        low, high = (int(owner[0]), int(owner[-1]) + 1) if len(owner) else (0, 0)
        return replace(
            self,
            keys=self.keys[begin:end],
            values=self.values[low:high],
            thresholds=self.thresholds[begin:end],
            owner=owner - low,
            cells=self.cells and self.cells.between(begin, end),
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Dense:
        """Return the memory in another place or dtype; its cells must be made again."""
        keys, values, thresholds = (part.to(device, dtype) for part in (self.keys, self.values, self.thresholds))
        if keys is self.keys and values is self.values:
            return self
        return Dense(keys, values, thresholds, self.beta, self.top_k, self.owner.to(device))

    def weights(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [..., k] of the nearest rows, at most `top_k`, and which rows they are."""
        queries = queries.to(self.keys)
        return self._weights(queries, self._scores(queries))

    def _scores(self, queries: Tensor) -> Tensor:
        """Return s − τ of queries at every row, [..., n], or their similarity to every cell, [..., c]."""
        require_width("queries", queries, self.keys.shape[-1], "the memory")
        if self.cells is not None:
            return self.cells.similarity(queries)
        return functional.linear(queries, self.keys, -self.thresholds)

    def _weights(self, queries: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.cells is None:
            best, rows = top_rows(scores, min(self.top_k, len(self)))
        else:
            near, is_filler = self.cells.rows_near(scores)
            exact = (self.keys[near] @ queries.unsqueeze(-1)).squeeze(-1) - self.thresholds[near]
            best, places = exact.masked_fill(is_filler, -torch.inf).topk(min(self.top_k, near.shape[-1]), dim=-1)
            rows = near.gather(-1, places)
        logits = functional.pad(self.beta * best, (1, 0))  # the empty slot has logit 0
        return torch.softmax(logits, dim=-1)[..., 1:], rows

    def read(self, queries: Tensor) -> Tensor:
        """Return what the memory answers to queries [..., d_k] of unit length: [..., d_v], zero where none is near."""
        if not len(self) or not queries.numel():
            return queries.new_zeros(*queries.shape[:-1], self.values.shape[-1])
        return torch.cat([self._read(part) for part in self._parts(queries)]).reshape(*queries.shape[:-1], -1)

    def total_weights(self, queries: Tensor) -> Tensor:
        """Return how much all rows together weigh in the read of queries [n, d_k] against the empty slot: [n]."""
        if not len(self) or not queries.numel():
            return queries.new_zeros(len(queries))
        return torch.cat([self.weights(part)[0].sum(-1) for part in self._parts(queries)])

    def _parts(self, queries: Tensor) -> Sequence[Tensor]:
        """Return queries in parts [m, d_k] that can be compared with the rows at once."""
        width = queries.shape[-1]
        per_query = len(self) if self.cells is None else len(self.cells.first) + NEAREST_CELLS * CELL * width
        return queries.to(self.keys).reshape(-1, width).split(max(1, AT_ONCE // per_query))

    def _read(self, queries: Tensor) -> Tensor:
        scores = self._scores(queries)
        if torch.compiler.is_compiling() or (queries.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._weighted(*self._weights(queries, scores))  # in fixed shapes
        near = (scores.amax(-1) > self._least_score).nonzero().squeeze(-1)
        reads = self._weighted(*self._weights(queries[near], scores[near]))
        return queries.new_zeros(len(queries), self.values.shape[-1]).index_copy(0, near, reads)

    @property
    def _least_score(self) -> float:
        """The least score of the nearest row, or cell, at which a read differs from 0 in the dtype of the memory."""
        if self.cells is not None:
            return FAR
        return math.log(torch.finfo(self.keys.dtype).eps / self.top_k) / self.beta

    def _weighted(self, weights: Tensor, rows: Tensor) -> Tensor:
        return functional.embedding_bag(self.owner[rows], self.values, per_sample_weights=weights, mode="sum")


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
