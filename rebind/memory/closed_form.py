"""Gains that write many associations at once, knowing what the memory already holds.

`moment` is C = Σ kkᵀ over the keys whose answers should stay (or its mean, E[kkᵀ], weighed by λ).
It may be the matrix [d_k, d_k], a factor of it (`solve.factor(C)`: factor once, write many), or
None for the identity, when nothing is known of the old keys.

Each function returns a `Solution` whose value is the gain G [..., n, d_k]; the update is
`Write(keys, values, gain)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rebind.errors import InputError, NumericalError, ShapeError
from rebind.memory.checks import (
    require_broadcastable,
    require_finite,
    require_floating,
    require_rank,
    require_width,
)
from rebind.memory.precision import solving_dtype
from rebind.memory.solve import Cholesky, Solution, cholesky, factor, relative_residual, symmetric

Moment = Tensor | Cholesky | None


def ridge(
    keys: Tensor, moment: Moment = None, lam: float = 1.0, *, form: Literal["auto", "primal", "dual"] = "auto"
) -> Solution:
    """MEMIT's gain, K (λC + KᵀK)⁻¹: new answers and old ones in one least-squares problem.

    It minimises Σ‖Ŵk − v‖² over the new keys plus λ·tr((Ŵ−W) C (Ŵ−W)ᵀ), the squared disturbance of
    the old ones (MEMIT eq. 14).

    The *primal* form factors the d×d matrix λC + KᵀK. The *dual* form starts from a factor of C and
    factors the n×n matrix λI + K C⁻¹ Kᵀ. `auto` takes the dual when n < d and it needs no d×d factor
    of its own (C was given factored, or is the identity), else the primal; `Solution.method` says which.
    """
    _check_keys(keys, moment)
    _check_positive("lam", lam)
    if form not in ("auto", "primal", "dual"):
        raise InputError(f"form is {form!r}, expected 'auto', 'primal' or 'dual': leave it out to let n and d decide")
    n, d = keys.shape[-2:]
    if form == "auto":
        form = "dual" if n < d and not isinstance(moment, Tensor) else "primal"
    return _dual(keys, moment, lam) if form == "dual" else _primal(keys, moment, lam)


def equality(keys: Tensor, moment: Moment = None) -> Solution:
    """ROME's and EMMET's gain, (K C⁻¹ Kᵀ)⁻¹ K C⁻¹: the new answers exactly, the old ones disturbed least.

    At n = 1 this is ROME's eq. 17: u = C⁻¹k, gain uᵀ/(uᵀk). It is `ridge` in the limit λ → 0, and
    `ridge` with λ = μ is this with μ added to the inner matrix: a rescue of the inner matrix is a
    ridge write with a small λ.
    """
    _check_keys(keys, moment)
    _check_count(keys)
    base = _base(moment)
    wide = keys.to(solving_dtype(keys))
    half = wide.mT if base is None else base.whiten(wide)  # L⁻¹Kᵀ with C = LLᵀ
    inner = cholesky(half.mT @ half, "K C⁻¹ Kᵀ")
    solved = half if base is None else base.unwhiten(half)  # C⁻¹Kᵀ
    value = torch.cholesky_solve(solved.mT, inner.lower)
    return _equality_solution(keys, value, "dual", keys.shape[-2], max(inner.jitter, _jitter(base)))


def equality_block(keys: Tensor, moment: Moment = None) -> Solution:
    """The same gain from the block system of ROME's eq. 15.

        [Ŵ | Λ] [[I, Kᵀ], [−U, 0]] = [W | Vᵀ],   U = K C⁻¹

    The gain is the lower left block of the system matrix's inverse, found by one (d+n)-sized solve.
    Slower than `equality`; kept because it is how the constraint is derived, and as a check on it.
    """
    _check_keys(keys, moment)
    _check_count(keys)
    n, d = keys.shape[-2:]
    base = _base(moment)
    wide = keys.to(solving_dtype(keys))
    solved = wide if base is None else base.solve(wide.mT).value.mT  # U = K C⁻¹
    lead = solved.shape[:-2]
    eye = torch.eye(d, dtype=wide.dtype, device=wide.device).expand(*lead, d, d)
    top = torch.cat([eye, wide.mT.expand(*lead, d, n)], dim=-1)
    bottom = torch.cat([-solved, wide.new_zeros(*lead, n, n)], dim=-1)
    block = torch.cat([top, bottom], dim=-2)
    right = torch.cat([eye, wide.new_zeros(*lead, n, d)], dim=-2)
    try:
        value = torch.linalg.solve(block, right)[..., d:, :]
    except RuntimeError:  # torch.linalg's errors are RuntimeErrors
        raise NumericalError(
            "the block system of eq. 15 is singular: two keys are the same or C is; "
            "use `equality`, which adds the smallest jitter that works"
        ) from None
    return _equality_solution(keys, value, "block", d + n, _jitter(base))


@dataclass(frozen=True, eq=False)
class NullSpace:
    """Directions that old keys hardly use: the eigenvectors of C with the smallest eigenvalues."""

    basis: Tensor  # [d_k, p], orthonormal columns: P = basis @ basisᵀ
    largest: float  # the largest eigenvalue taken in: bounds what a write of unit norm can disturb

    @classmethod
    def below(cls, moment: Tensor, threshold: float = 2e-2) -> NullSpace:
        """Eigenvalues of C below `threshold` (AlphaEdit takes 2e-2)."""
        eigenvalues, vectors = _spectrum(moment)
        return cls._of(eigenvalues, vectors, int((eigenvalues < threshold).sum()), moment)

    @classmethod
    def smallest(cls, moment: Tensor, share: float) -> NullSpace:
        """The given share of the directions, least used first."""
        if not 0 <= share <= 1:
            raise InputError(f"share is {share}, expected between 0 and 1: the part of all directions to allow")
        eigenvalues, vectors = _spectrum(moment)
        return cls._of(eigenvalues, vectors, round(share * len(eigenvalues)), moment)

    @classmethod
    def _of(cls, eigenvalues: Tensor, vectors: Tensor, count: int, moment: Tensor) -> NullSpace:
        if count == 0:
            raise NumericalError(
                f"no direction of this {list(moment.shape)} moment counts as unused: its smallest eigenvalue is "
                f"{float(eigenvalues[0]):.3g}. Raise the threshold, or take a share with NullSpace.smallest"
            )
        return cls(vectors[:, :count], float(eigenvalues[count - 1]))

    @property
    def width(self) -> int:
        return self.basis.shape[0]

    @property
    def size(self) -> int:
        return self.basis.shape[1]

    def projector(self) -> Tensor:
        """P [d_k, d_k]."""
        return self.basis @ self.basis.mT


def null_space(keys: Tensor, space: NullSpace, *, previous: Tensor | None = None, l2: float = 1.0) -> Solution:
    """AlphaEdit's gain: the ridge gain confined to directions that old keys do not use.

    It solves (P(KᵀK + KₚᵀKₚ) + l2·I) X = P Kᵀ for the keys K and the earlier edits' keys Kₚ (the
    `previous` ones, whose answers should stay). In coordinates of the null space's basis Q, where
    P = QQᵀ, that is a plain ridge problem with rows [K; Kₚ]Q, and only K's rows carry an error: the
    gain is K's part of the stacked rows' gain, from a system in the number of keys or of null
    directions, whichever is smaller.
    """
    _check_keys(keys, None)
    _check_positive("l2", l2)
    require_width("keys", keys, space.width, "this null space")
    stacked = keys
    if previous is not None:
        _check_keys(previous, None)
        require_width("previous", previous, keys.shape[-1], "a write with these keys")
        shape = require_broadcastable("keys and previous", keys.shape[:-2], previous.shape[:-2])
        stacked = torch.cat([t.expand(*shape, *t.shape[-2:]) for t in (keys, previous)], dim=-2)
    basis = space.basis.to(keys.device)
    solution = ridge(stacked.to(basis.dtype) @ basis, None, l2)
    value = solution.value[..., : keys.shape[-2], :] @ basis.mT
    return replace(solution, value=value.to(keys.dtype))


@dataclass(frozen=True, eq=False)
class Recursive:
    """Least squares that remembers: C ← C + KᵀK after each batch.

    Writing batch after batch with the gains of `step` leaves the memory where one ridge write of all
    the rows together would have left it. A step factors one d×d matrix, whatever the batch's size.
    """

    moment: Tensor  # [..., d_k, d_k] C, in the solving dtype

    @classmethod
    def start(
        cls,
        moment: Tensor | None = None,
        lam: float = 1.0,
        *,
        width: int | None = None,
        device: torch.device | str | None = None,
    ) -> Recursive:
        """From λC, or from λI of the given width when no moment is known."""
        _check_positive("lam", lam)
        if moment is None:
            if width is None or width < 1:
                raise InputError(f"got no moment and width {width}, expected one: width=d_k starts from λI")
            moment = torch.eye(width, dtype=torch.float64, device=device)
        return cls(lam * symmetric(moment, "moment"))

    def step(self, keys: Tensor) -> tuple[Solution, Recursive]:
        """The gain for these keys, and the state that has absorbed them."""
        _check_keys(keys, self.moment)
        moment = _plus_rows(self.moment, keys)
        solution = cholesky(moment, "C + KᵀK").solve(keys.to(moment.dtype).mT)
        gain = replace(solution, value=solution.value.mT.to(keys.dtype), method="primal")
        return gain, Recursive(moment)


def _primal(keys: Tensor, moment: Moment, lam: float) -> Solution:
    wide = keys.to(solving_dtype(keys))
    if moment is None:
        old = torch.eye(keys.shape[-1], dtype=wide.dtype, device=wide.device)
    else:
        old = moment.matrix if isinstance(moment, Cholesky) else symmetric(moment, "moment")
    solution = cholesky(_plus_rows(lam * old, keys), "λC + KᵀK").solve(wide.mT)
    return replace(solution, value=solution.value.mT.to(keys.dtype), method="primal")


def _dual(keys: Tensor, moment: Moment, lam: float) -> Solution:
    if moment is None:
        wide = keys.to(solving_dtype(keys))
        eye = torch.eye(keys.shape[-2], dtype=wide.dtype, device=wide.device)
        inner = cholesky(lam * eye + wide @ wide.mT, "λI + K Kᵀ")
        solution = inner.solve(wide)
        value = solution.value
        return replace(
            solution,
            value=value.to(keys.dtype),
            method="dual",
            _residual=lambda: relative_residual(lam * value + (value @ wide.mT) @ wide, wide),
        )
    base = moment if isinstance(moment, Cholesky) else factor(moment, "moment")
    # λC + KᵀK = λ (C + K̂ᵀK̂) with K̂ = K/√λ: one factor of C serves every λ.
    root = lam**0.5
    solution = base.plus(keys.to(base.lower.dtype) / root).gain()
    return replace(solution, value=(solution.value / root).to(keys.dtype))


def _base(moment: Moment) -> Cholesky | None:
    return factor(moment, "moment") if isinstance(moment, Tensor) else moment


def _jitter(base: Cholesky | None) -> float:
    return 0.0 if base is None else base.jitter


def _equality_solution(keys: Tensor, value: Tensor, method: str, order: int, jitter: float) -> Solution:
    """A gain of the equality form is right when G Kᵀ = I: each key then reads its own value and no other's."""
    wide = keys.to(value.dtype)
    eye = torch.eye(keys.shape[-2], dtype=value.dtype, device=value.device)
    return Solution(value.to(keys.dtype), method, order, jitter, lambda: relative_residual(value @ wide.mT, eye))


def _plus_rows(moment: Tensor, rows: Tensor) -> Tensor:
    wide = rows.to(moment.dtype)
    return moment + wide.mT @ wide


def _spectrum(moment: Tensor) -> tuple[Tensor, Tensor]:
    wide = symmetric(moment, "moment")
    if wide.ndim != 2:
        raise ShapeError(
            f"moment is {list(moment.shape)}, expected one [d_k, d_k] matrix: take one null space at a time"
        )
    eigenvalues, vectors = torch.linalg.eigh(wide)
    return eigenvalues, vectors


def _check_keys(keys: Tensor, moment: Moment) -> None:
    require_rank(2, keys=keys)
    require_floating(keys=keys)
    if isinstance(moment, Cholesky):
        require_width("keys", keys, moment.width, "this factored moment")
        require_broadcastable("keys and the moment", keys.shape[:-2], moment.matrix.shape[:-2])
    elif moment is not None:
        require_rank(2, moment=moment)
        require_width("keys", keys, moment.shape[-1], "this moment")
        require_broadcastable("keys and the moment", keys.shape[:-2], moment.shape[:-2])
    require_finite(keys=keys)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InputError(
            f"{name} is {value}, expected a positive number: it weighs what is old against the new keys; "
            f"its limit 0 is `equality`"
        )


def _check_count(keys: Tensor) -> None:
    n, d = keys.shape[-2:]
    if n > d:
        raise NumericalError(
            f"{n} keys of width {d} cannot all be given exact values: at most {d} can; use `ridge`, or write fewer rows"
        )
