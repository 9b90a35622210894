"""Symmetric positive definite systems: factor once, solve many times, never invert.

There are two factorizations with the same interface:

- `Cholesky`, from `factor(A)`: the direct route, d³/3 operations once.
- `Woodbury`, from `factor(C).plus(K)`: C + KᵀK for n new rows on top of an existing factor of C. Only an n×n system
  is factored; no d×d inverse is ever formed.

Systems are solved in float64 whatever the inputs are (float32 where the device has no float64), and results have the
dtype of the right-hand side. A matrix that is singular or slightly indefinite gets the smallest multiple of the
identity, on a ladder of powers of ten of its mean diagonal, that makes a factorization possible; the amount is in the
result and in a `NumericalWarning`. The ladder begins where the answer rises above rounding noise (1e-10 in float64).
If no step up to 1 % helps, a `NumericalError` says what to do.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from rebind.errors import NumericalError, NumericalWarning, ShapeError
from rebind.memory.checks import known, require_broadcastable, require_finite, require_tensors, require_width
from rebind.memory.precision import solving_dtype

LARGEST_JITTER = 1e-2  # relative to the mean diagonal
REFINE_BELOW = 1e-7  # squared ratio of the factor's extreme pivots: 1 / (an estimate of) the condition number
MOST_REFINEMENTS = 3
GOOD_RESIDUAL = 1e-10
POOR_RESIDUAL = 1e-6


@dataclass(frozen=True, eq=False)
class Solution:
    """The solution of a system, and how it was computed."""

    value: Tensor
    method: str  # the form that was solved: cholesky, woodbury, primal, dual, block
    order: int  # size of the system that was factored
    jitter: float  # what was added to a diagonal to make a factorization possible; 0 if nothing was
    _residual: Callable[[], Tensor] = field(repr=False)

    @cached_property
    def residual(self) -> float:
        """Relative residual of the equation as it was posed (without jitter), the worst of a batch.

        It is computed on first access: it costs about as much as a solve.
        """
        with torch.no_grad():
            residual = self._residual()
            return float(residual.max()) if residual.numel() else 0.0


@dataclass(frozen=True, eq=False)
class Cholesky:
    """A = L Lᵀ, ready to solve with."""

    matrix: Tensor  # [..., d, d] A itself, without jitter
    lower: Tensor  # [..., d, d] L
    jitter: float

    @property
    def width(self) -> int:
        return self.matrix.shape[-1]

    def solve(self, right: Tensor) -> Solution:
        """Return X with A X = right [..., d, m]."""
        self._check(right)
        wide = right.to(self.lower.dtype)
        half = torch.linalg.solve_triangular(self.lower, wide, upper=False)
        return _solution(self, self.unwhiten(half), right, "cholesky", self.width)

    def multiply(self, columns: Tensor) -> Tensor:
        """Return A columns."""
        return self.matrix @ columns

    def whiten(self, rows: Tensor) -> Tensor:
        """Return L⁻¹ rowsᵀ, [..., d, n]: half a solve. Inner products of its columns are those under A⁻¹."""
        require_width("keys", rows, self.width, "this factor")
        return torch.linalg.solve_triangular(self.lower, rows.to(self.lower.dtype).mT, upper=False)

    def unwhiten(self, columns: Tensor) -> Tensor:
        """Return L⁻ᵀ columns: the other half, so that `unwhiten(whiten(K))` is A⁻¹Kᵀ."""
        return torch.linalg.solve_triangular(self.lower.mT, columns, upper=True)

    def plus(self, rows: Tensor) -> Woodbury:
        """Return the factorization of A + KᵀK for rows K [..., n, d], built on this one."""
        require_tensors(2, keys=rows)
        require_broadcastable("the factor and the keys", self.matrix.shape[:-2], rows.shape[:-2])
        require_finite(keys=rows)
        half = self.whiten(rows)
        eye = torch.eye(rows.shape[-2], dtype=half.dtype, device=half.device)
        inner = cholesky(eye + half.mT @ half, "matrix I + K C⁻¹ Kᵀ")
        return Woodbury(self, rows, half, inner)

    def _check(self, right: Tensor) -> None:
        require_tensors(2, right=right)
        if right.shape[-2] != self.width:
            problem = f"The right-hand side has shape {list(right.shape)}"
            expected = f"{self.width} rows, as the system has"
            advice = "Pass right-hand sides as columns; transpose rows of keys"
            raise ShapeError(problem, expected=expected, advice=advice, code="right_side_does_not_match")
        require_broadcastable("the factor and the right-hand side", self.matrix.shape[:-2], right.shape[:-2])
        require_finite(right=right)


@dataclass(frozen=True, eq=False)
class Woodbury:
    """A + KᵀK on top of a factor of A: only the n×n matrix I + K A⁻¹ Kᵀ is factored."""

    base: Cholesky
    rows: Tensor  # [..., n, d] K
    half: Tensor  # [..., d, n] L⁻¹Kᵀ
    inner: Cholesky  # of I + K A⁻¹ Kᵀ, n×n

    @property
    def jitter(self) -> float:
        return max(self.base.jitter, self.inner.jitter)

    def solve(self, right: Tensor) -> Solution:
        """Return X with (A + KᵀK) X = right [..., d, m].

        (A + KᵀK)⁻¹ = L⁻ᵀ (I − H (I + HᵀH)⁻¹ Hᵀ) L⁻¹ with H = L⁻¹Kᵀ: Woodbury's identity with A⁻¹ replaced
        by its factor.
        """
        self.base._check(right)
        wide = right.to(self.half.dtype)
        return _solution(self, self._refine(self._solve(wide), wide), right, "woodbury", self.rows.shape[-2])

    def gain(self) -> Solution:
        """Return K (A + KᵀK)⁻¹ = (I + K A⁻¹ Kᵀ)⁻¹ K A⁻¹, [..., n, d]: the push-through form, shorter still."""
        value = torch.cholesky_solve(self.base.unwhiten(self.half).mT, self.inner.lower).mT
        right = self.rows.mT
        solution = _solution(self, self._refine(value, right.to(value.dtype)), right, "dual", right.shape[-1])
        return replace(solution, value=solution.value.mT)

    def multiply(self, columns: Tensor) -> Tensor:
        """Return (A + KᵀK) columns, without forming the sum."""
        rows = self.rows.to(columns.dtype)
        return self.base.matrix @ columns + rows.mT @ (rows @ columns)

    def _solve(self, right: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(self.base.lower, right, upper=False)
        white = white - self.half @ torch.cholesky_solve(self.half.mT @ white, self.inner.lower)
        return self.base.unwhiten(white)

    def _refine(self, value: Tensor, right: Tensor) -> Tensor:
        """Recover the digits lost by subtracting nearly equal terms, if A is ill-conditioned.

        A well-conditioned sum on an ill-conditioned A is where Woodbury loses digits and the direct route does not.
        One correction by the residual usually recovers them; a warning reports what it cannot recover. A base with
        jitter solves a different equation, so there is nothing to refine towards.
        """
        pivots = self.base.lower.diagonal(dim1=-2, dim2=-1)
        suspect = (pivots.amin(-1) / pivots.amax(-1)).square() < REFINE_BELOW
        if self.jitter or not right.numel() or not known(suspect.any()):
            return value
        residual = relative_residual(self.multiply(value), right)
        for _ in range(MOST_REFINEMENTS):
            if known((residual <= GOOD_RESIDUAL).all()):
                return value
            better = value + self._solve(right - self.multiply(value))
            after = relative_residual(self.multiply(better), right)
            if not known((after < residual).any()):
                break
            value = torch.where((after < residual)[..., None, None], better, value)
            residual = torch.minimum(after, residual)
        if known((residual > POOR_RESIDUAL).any()):
            message = f"Woodbury on an ill-conditioned matrix left a relative residual of {float(residual.max()):.1e}"
            warnings.warn(f"{message}. Factor the whole sum instead (form='primal').", NumericalWarning, stacklevel=3)
        return value


def _solution(system: Cholesky | Woodbury, value: Tensor, right: Tensor, method: str, order: int) -> Solution:
    """Return the value that solves `system · value = right`, in the dtype of `right`."""
    return Solution(
        value.to(right.dtype),
        method,
        order,
        system.jitter,
        lambda: relative_residual(system.multiply(value), right.to(value.dtype)),
    )


def factor(matrix: Tensor, what: str = "matrix") -> Cholesky:
    """Factor a symmetric positive definite matrix [..., d, d]; add jitter, with a warning, if it needs some."""
    return cholesky(symmetric(matrix, what), what)


def symmetric(matrix: Tensor, what: str = "matrix") -> Tensor:
    """Return the matrix in the solving dtype, after checking that it is square, finite and symmetric.

    The check matters because only the lower triangle is factored later.
    """
    require_tensors(2, **{what: matrix})
    if matrix.shape[-1] != matrix.shape[-2]:
        problem = f"The {what} of shape {list(matrix.shape)} is not square"
        advice = "Compute a second moment as keys.mT @ keys"
        raise ShapeError(problem, expected="[d_k, d_k]", advice=advice, code="not_square")
    require_finite(**{what: matrix})
    wide = matrix.to(solving_dtype(matrix))
    if wide.numel() == 0:
        return wide
    scale = torch.linalg.vector_norm(wide.detach(), ord=float("inf"), dim=(-2, -1))
    # At least 1e-5: the matrix may have been accumulated in float32 and widened since.
    tolerance = max(4 * torch.finfo(matrix.dtype).eps, 1e-5)
    gap = (wide - wide.mT).detach().abs().amax((-2, -1))
    if known((gap > tolerance * scale).any()):
        problem = f"The {what} of shape {list(matrix.shape)} is not symmetric (by up to {float(gap.max()):.3g})"
        advice = "Check how it was accumulated"
        raise ShapeError(problem, expected="a second moment, keys.mT @ keys", advice=advice, code="not_symmetric")
    return wide


def relative_residual(got: Tensor, wanted: Tensor) -> Tensor:
    """Return ‖got − wanted‖ / ‖wanted‖ in the Frobenius norm, [...]; the plain norm where `wanted` is 0."""
    size = torch.linalg.vector_norm(wanted, dim=(-2, -1))
    return torch.linalg.vector_norm(got - wanted, dim=(-2, -1)) / size.where(size > 0, 1.0)


def cholesky(matrix: Tensor, what: str) -> Cholesky:
    """Factor a matrix that is known to be symmetric, finite and in the solving dtype.

    A batch entry gets jitter only if it needs it.
    """
    lower, failed = _try_cholesky(matrix)
    rescue = known(failed.any())
    if rescue is None:  # vmap and compile cannot branch: an entry that needs a rescue becomes NaN, never a wrong number
        lower = torch.where(failed[..., None, None], torch.nan, lower)
    if not rescue:
        return Cholesky(matrix, lower, jitter=0.0)
    mean = matrix.diagonal(dim1=-2, dim2=-1).detach().mean(-1)
    # Noise in the rescued directions is about eps/jitter, the bias elsewhere about jitter: eps^(2/3) keeps both small.
    relative = 10.0 ** math.ceil(math.log10(torch.finfo(matrix.dtype).eps ** (2 / 3)))
    jitter = torch.zeros_like(mean)
    while relative <= LARGEST_JITTER * (1 + 1e-9):
        jitter = torch.where(failed, relative * mean, jitter)
        lower, failed = _try_cholesky(matrix, jitter)
        if not failed.any():
            amount = float(jitter.max())
            rescue_note = f"added {amount:.1e} to its diagonal ({relative:.0e} of the mean diagonal)"
            message = f"The {what} of shape {list(matrix.shape)} is singular or indefinite: {rescue_note}"
            warnings.warn(message, NumericalWarning, stacklevel=3)
            return Cholesky(matrix, lower, jitter=amount)
        relative *= 10
    smallest = float(torch.linalg.eigvalsh(matrix.detach()).min())
    problem = (
        f"The {what} of shape {list(matrix.shape)} is not positive definite: its smallest eigenvalue is {smallest:.3g}"
        f", its mean diagonal {float(mean.min()):.3g}, and adding {LARGEST_JITTER:.0%} of the latter does not help"
    )
    advice = "Collect the moment from more keys in a wider dtype, or add a multiple of the identity"
    raise NumericalError(problem, advice=advice, code="not_positive_definite")


def _try_cholesky(matrix: Tensor, jitter: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the factor, and which batch entries have no trustworthy one.

    L_ii² / A_ii is the part of row i not explained by the rows before it: below d·eps it is rounding error, and a
    factor that contains it would return noise.
    """
    if jitter is not None:
        matrix = matrix + torch.diag_embed(jitter.unsqueeze(-1).expand(matrix.shape[:-1]))
    lower, info = torch.linalg.cholesky_ex(matrix)
    pivots = lower.diagonal(dim1=-2, dim2=-1).square()
    floor = matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    dependent = (pivots <= floor * matrix.diagonal(dim1=-2, dim2=-1)).any(-1)
    return lower, (info != 0) | dependent
