"""Gains that write many associations at once and take into account what the memory already holds.

`moment` is C = Σ kkᵀ over the keys whose answers should stay (or its mean, E[kkᵀ], weighted by λ). It may be the
matrix [d_k, d_k], a factor of it (`solve.factor(C)`: factor once, write many times), or None for the identity, when
nothing is known about the old keys.

Each function returns a `Solution` with the gain G [..., n, d_k] as its value; the update is
`Write(keys, values, solution)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rebind.errors import InputError, NumericalError, ShapeError
from rebind.memory.checks import require_broadcastable, require_finite, require_tensors, require_width
from rebind.memory.precision import solving_dtype
from rebind.memory.solve import Cholesky, Solution, cholesky, factor, relative_residual, symmetric
from rebind.memory.write import concatenate

Moment = Tensor | Cholesky | None


def ridge(
    keys: Tensor, moment: Moment = None, lam: float = 1.0, *, form: Literal["auto", "primal", "dual"] = "auto"
) -> Solution:
    """Return MEMIT's gain, K (λC + KᵀK)⁻¹: new answers and old ones in one least-squares problem.

    It minimizes Σ‖Ŵk − v‖² over the new keys plus λ·tr((Ŵ−W) C (Ŵ−W)ᵀ), the squared disturbance of the old ones
    (MEMIT eq. 14).

    The *primal* form factors the d×d matrix λC + KᵀK. The *dual* form starts from a factor of C and factors the n×n
    matrix λI + K C⁻¹ Kᵀ. `auto` takes the dual form if n < d and no d×d factor has to be computed for it (C was
    passed as a factor, or is the identity), else the primal form; `Solution.method` says which.
    """
    _check_keys(keys, moment)
    _check_lam(lam)
    if form not in ("auto", "primal", "dual"):
        raise InputError(f"The form is {form!r}", expected="'auto', 'primal' or 'dual'", code="unknown_form")
    n, d = keys.shape[-2:]
    if form == "auto":
        form = "dual" if n < d and not isinstance(moment, Tensor) else "primal"
    if form == "dual":
        return _dual(keys, moment, lam)
    if moment is None:
        old = torch.eye(d, dtype=solving_dtype(keys), device=keys.device)
    else:
        old = moment.matrix if isinstance(moment, Cholesky) else symmetric(moment, "moment")
    return _primal(keys, lam * old, "matrix λC + KᵀK")[0]


def equality(keys: Tensor, moment: Moment = None) -> Solution:
    """Return ROME's and EMMET's gain, (K C⁻¹ Kᵀ)⁻¹ K C⁻¹: exact new answers, least disturbance of the old ones.

    At n = 1 this is ROME's eq. 17: u = C⁻¹k, gain uᵀ/(uᵀk). It is `ridge` in the limit λ → 0, and `ridge` with λ = μ
    is this with μ added to the inner matrix: jitter on the inner matrix makes a ridge write with a small λ.
    """
    base, wide = _prepare_equality(keys, moment)
    half = wide.mT if base is None else base.whiten(wide)  # L⁻¹Kᵀ with C = LLᵀ
    inner = cholesky(half.mT @ half, "matrix K C⁻¹ Kᵀ")
    solved = half if base is None else base.unwhiten(half)  # C⁻¹Kᵀ
    value = torch.cholesky_solve(solved.mT, inner.lower)
    jitter = inner.jitter if base is None else max(inner.jitter, base.jitter)
    return _equality_solution(keys, value, "dual", keys.shape[-2], jitter)


def equality_block(keys: Tensor, moment: Moment = None) -> Solution:
    """Return the same gain from the block system of ROME's eq. 15.

        [Ŵ | Λ] [[I, Kᵀ], [−U, 0]] = [W | Vᵀ],   U = K C⁻¹

    The gain is the lower left block of the inverse of the system matrix, computed by one (d+n)-sized solve. This is
    slower than `equality`; it exists because it is how the constraint is derived, and as a check on `equality`.
    """
    base, wide = _prepare_equality(keys, moment)
    n, d = keys.shape[-2:]
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
        problem = "The block system of eq. 15 is singular: two keys are the same, or C is singular"
        advice = "Use `equality`, which adds the smallest jitter that works"
        raise NumericalError(problem, advice=advice, code="singular_block_system") from None
    return _equality_solution(keys, value, "block", d + n, 0.0 if base is None else base.jitter)


@dataclass(frozen=True, eq=False)
class NullSpace:
    """Directions that old keys hardly use: the eigenvectors of C with the smallest eigenvalues."""

    basis: Tensor  # [d_k, p], orthonormal columns: P = basis @ basisᵀ
    largest: float  # the largest eigenvalue among them: bounds what a write of unit norm can disturb

    @classmethod
    def below(cls, moment: Tensor, threshold: float = 2e-2) -> NullSpace:
        """Take the directions with eigenvalues of C below `threshold` (2e-2 in AlphaEdit)."""
        return cls._of(moment, lambda eigenvalues: int((eigenvalues < threshold).sum()))

    @classmethod
    def smallest(cls, moment: Tensor, share: float) -> NullSpace:
        """Take this share of all directions, the least used first."""
        if not 0 <= share <= 1:
            raise InputError(f"The share is {share}", expected="a number from 0 to 1", code="invalid_share")
        return cls._of(moment, lambda eigenvalues: round(share * len(eigenvalues)))

    @classmethod
    def _of(cls, moment: Tensor, count_of: Callable[[Tensor], int]) -> NullSpace:
        """Take as many of the smallest eigenvalues as `count_of` says."""
        wide = symmetric(moment, "moment")
        if wide.ndim != 2:
            problem = f"The moment has shape {list(moment.shape)}"
            advice = "Compute one null space at a time"
            raise ShapeError(problem, expected="one [d_k, d_k] matrix", advice=advice, code="batch_of_moments")
        eigenvalues, vectors = torch.linalg.eigh(wide)
        count = count_of(eigenvalues)
        if count == 0:
            problem = f"No direction of this moment is unused: its smallest eigenvalue is {float(eigenvalues[0]):.3g}"
            advice = "Raise the threshold, or take a share of the directions with NullSpace.smallest"
            raise NumericalError(problem, advice=advice, code="empty_null_space")
        return cls(vectors[:, :count], float(eigenvalues[count - 1]))

    @property
    def width(self) -> int:
        """d_k."""
        return self.basis.shape[0]

    @property
    def size(self) -> int:
        """Number of directions, p."""
        return self.basis.shape[1]


def null_space(keys: Tensor, space: NullSpace, *, previous: Tensor | None = None, lam: float = 1.0) -> Solution:
    """Return AlphaEdit's gain: the ridge gain restricted to directions that old keys do not use.

    It solves (P(KᵀK + KₚᵀKₚ) + λI) X = P Kᵀ for the keys K and the `previous` keys Kₚ, those of earlier edits, whose
    answers should stay. In coordinates of the null space's basis Q, where P = QQᵀ, that is a plain ridge problem with
    rows [K; Kₚ]Q, and only K's rows carry an error: the gain is K's part of the stacked rows' gain, from a system in
    the number of keys or of null directions, whichever is smaller.
    """
    _check_keys(keys, None)
    _check_lam(lam)
    require_width("keys", keys, space.width, "this null space")
    stacked = keys
    if previous is not None:
        _check_keys(previous, None)
        require_width("previous", previous, keys.shape[-1], "a write with these keys")
        require_broadcastable("keys and previous", keys.shape[:-2], previous.shape[:-2])
        stacked = concatenate(keys, previous, dim=-2)
    basis = space.basis.to(keys.device)
    solution = ridge(stacked.to(basis.dtype) @ basis, None, lam)
    value = solution.value[..., : keys.shape[-2], :] @ basis.mT
    return replace(solution, value=value.to(keys.dtype))


@dataclass(frozen=True, eq=False)
class Recursive:
    """Recursive least squares: C ← C + KᵀK after each batch.

    Writing batch after batch with the gains of `step` gives the memory that one ridge write of all the rows together
    would give. A step factors one d×d matrix, whatever the size of the batch.
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
        """Start from λC, or from λI of the given width if no moment is known."""
        _check_lam(lam)
        if moment is None:
            if width is None or width < 1:
                problem = f"There is no moment, and the width is {width}"
                expected = "a moment, or a width of 1 or more to start from λI"
                raise InputError(problem, expected=expected, code="missing_moment")
            moment = torch.eye(width, dtype=torch.float64, device=device)
        return cls(lam * symmetric(moment, "moment"))

    def step(self, keys: Tensor) -> tuple[Solution, Recursive]:
        """Return the gain for these keys, and the state that has absorbed them."""
        _check_keys(keys, self.moment)
        solution, moment = _primal(keys, self.moment, "matrix C + KᵀK")
        return solution, Recursive(moment)


def _primal(keys: Tensor, moment: Tensor, what: str) -> tuple[Solution, Tensor]:
    """Return the gain K (M + KᵀK)⁻¹ and the sum, which an error calls `what`."""
    rows = keys.to(moment.dtype)
    total = moment + rows.mT @ rows
    solution = cholesky(total, what).solve(keys.to(moment.dtype).mT)
    return replace(solution, value=solution.value.mT.to(keys.dtype), method="primal"), total


def _dual(keys: Tensor, moment: Moment, lam: float) -> Solution:
    if moment is None:
        wide = keys.to(solving_dtype(keys))
        eye = torch.eye(keys.shape[-2], dtype=wide.dtype, device=wide.device)
        inner = cholesky(lam * eye + wide @ wide.mT, "matrix λI + K Kᵀ")
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


def _prepare_equality(keys: Tensor, moment: Moment) -> tuple[Cholesky | None, Tensor]:
    """Check the arguments; return a factor of C, None for the identity, and the keys in the solving dtype."""
    _check_keys(keys, moment)
    n, d = keys.shape[-2:]
    if n > d:
        problem = f"There are {n} keys of width {d}, and at most {d} can have exact answers"
        raise NumericalError(problem, advice="Use `ridge`, or write fewer rows", code="too_many_keys")
    base = factor(moment, "moment") if isinstance(moment, Tensor) else moment
    return base, keys.to(solving_dtype(keys))


def _equality_solution(keys: Tensor, value: Tensor, method: str, order: int, jitter: float) -> Solution:
    """Wrap a gain of the equality form, which is right if G Kᵀ = I: each key reads its own value and no other."""
    wide = keys.to(value.dtype)
    eye = torch.eye(keys.shape[-2], dtype=value.dtype, device=value.device)
    return Solution(value.to(keys.dtype), method, order, jitter, lambda: relative_residual(value @ wide.mT, eye))


def _check_keys(keys: Tensor, moment: Moment) -> None:
    require_tensors(2, keys=keys)
    if moment is not None:
        matrix = moment.matrix if isinstance(moment, Cholesky) else moment
        require_tensors(2, moment=matrix)
        require_width("keys", keys, matrix.shape[-1], "this moment")
        require_broadcastable("keys and the moment", keys.shape[:-2], matrix.shape[:-2])
    require_finite(keys=keys)


def _check_lam(lam: float) -> None:
    if not 0 < lam < float("inf"):
        problem = f"λ is {lam}"
        expected = "a positive number, the weight of old keys against new ones"
        raise InputError(problem, expected=expected, advice="Use `equality` for the limit λ → 0", code="invalid_lambda")
