"""Factoring and solving: right answers, visible rescues, errors that name the remedy."""

from __future__ import annotations

import warnings

import pytest
import torch

from rebind.errors import InputError, NumericalError, NumericalWarning, ShapeError
from rebind.memory import factor
from rebind.memory.solve import Cholesky, Woodbury
from tests.support import BATCHES, Draw, assert_close, assert_errors, raises


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", [1, 2, 30])
def test_cholesky_solves(width, batch):
    draw = Draw(1)
    A, B = draw.moment(width, *batch), draw.normal(*batch, width, 3)
    solution = factor(A).solve(B)
    assert_close(A @ solution.value, B)
    assert (solution.method, solution.order, solution.jitter) == ("cholesky", width, 0.0)
    assert solution.residual < 1e-12


def test_whitening_halves_a_solve():
    draw = Draw(3)
    A, keys = draw.moment(6), draw.normal(4, 6)
    f = factor(A)
    half = f.whiten(keys)
    assert_close(half.mT @ half, keys @ torch.linalg.inv(A) @ keys.mT)
    assert_close(f.unwhiten(half), f.solve(keys.mT).value)


@pytest.mark.parametrize("condition", [1e3, 1e8, 1e12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ill_conditioned_matrices_are_solved_without_rescue(condition, dtype):
    """Backward stable: the residual is at rounding level although the answer's own error grows with the condition."""
    draw = Draw(4)
    A = draw.spectrum(torch.logspace(0, -torch.tensor(condition).log10().item(), 40, dtype=torch.float64))
    X = draw.normal(40, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = factor(A).solve((A @ X).to(dtype))
    assert solution.jitter == 0.0
    assert solution.residual < 1e-13 * condition**0.5
    if dtype == torch.float64:
        assert_close(solution.value, X, 100 * condition * torch.finfo(torch.float64).eps)


def test_float32_moments_are_solved_in_float64():
    """Condition 1e6: single precision would keep one digit, double keeps all that float32 can show."""
    draw = Draw(5)
    A = draw.spectrum(torch.logspace(0, -6, 40, dtype=torch.float64)).float()
    B = draw.normal(40, 3).float()
    exact = torch.linalg.solve(A.double(), B.double())
    got = factor(A).solve(B).value
    single = torch.cholesky_solve(B, torch.linalg.cholesky(A))
    error = lambda X: float((X.double() - exact).norm() / exact.norm())
    assert got.dtype == torch.float32
    assert error(got) < 1e-7 < 1e-3 < error(single)


@pytest.mark.parametrize("rank", [0.1, 0.5, 0.99])
def test_rank_deficient_matrices_get_a_visible_jitter(rank):
    draw = Draw(6)
    keys = draw.normal(int(rank * 100), 100)
    A = keys.mT @ keys
    with pytest.warns(NumericalWarning, match=r"singular or indefinite: added .*e-.* to its diagonal"):
        f = factor(A)
    mean = float(A.diagonal().mean())
    assert 0 < f.jitter <= 1.01e-10 * mean, "the ladder's first step is enough"
    solution = f.solve(keys.mT)  # right-hand sides in the range have an answer
    assert solution.jitter == f.jitter
    assert solution.residual < 1e-6


@pytest.mark.parametrize("negative", [2e-10, 1e-7, 1e-4])
def test_the_jitter_is_the_smallest_power_of_ten_that_works(negative):
    draw = Draw(7)
    A = draw.spectrum(torch.cat([torch.linspace(0.5, 1.5, 19), torch.tensor([-negative])]).double())
    with pytest.warns(NumericalWarning):
        f = factor(A)
    assert negative < f.jitter <= 10.1 * negative


def test_only_the_entry_that_needs_it_gets_jitter():
    draw = Draw(8)
    good, singular = draw.moment(6), torch.ones(6, 6, dtype=torch.float64)
    B = draw.normal(2, 6, 3)
    with pytest.warns(NumericalWarning):
        f = factor(torch.stack([good, singular]))
    assert_close(f.solve(B).value[0], factor(good).solve(B[0]).value, 0.0)


@pytest.mark.parametrize("matrix", [-torch.eye(4), torch.diag(torch.tensor([1.0, 1.0, -0.5])), torch.zeros(3, 3)])
def test_a_hopeless_matrix_is_refused_with_a_remedy(matrix):
    with raises(NumericalError, "not_positive_definite"):
        factor(matrix.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_answers_come_back_in_the_right_hand_sides_dtype(dtype):
    draw = Draw(10)
    A, B = draw.moment(8), draw.normal(8, 2)
    got = factor(A.to(torch.float32)).solve(B.to(dtype)).value
    assert got.dtype == dtype
    assert_close(got, torch.linalg.solve(A, B), 20 * max(torch.finfo(dtype).eps, 1e-6))


def test_vmap_is_batching():
    draw = Draw(11)
    A, B, keys = draw.moment(6, 5), draw.normal(5, 6, 2), draw.normal(5, 3, 6)
    direct = torch.vmap(lambda a, b: factor(a).solve(b).value)(A, B)
    updated = torch.vmap(lambda a, b, k: factor(a).plus(k).solve(b).value)(A, B, keys)
    assert_close(direct, factor(A).solve(B).value)
    assert_close(updated, factor(A).plus(keys).solve(B).value)


def test_gradients():
    draw = Draw(12)
    root, B, keys = (draw.normal(*s).requires_grad_() for s in ((4, 4), (4, 2), (3, 4)))
    spd = lambda r: r @ r.mT + torch.eye(4, dtype=r.dtype)
    assert torch.autograd.gradcheck(lambda r, b: factor(spd(r)).solve(b).value, (root, B))
    assert torch.autograd.gradcheck(lambda r, b, k: factor(spd(r)).plus(k).solve(b).value, (root, B, keys))
    assert torch.autograd.gradgradcheck(lambda r, b: factor(spd(r)).solve(b).value, (root, B))


def test_bad_input_is_refused():
    draw = Draw(13)
    A, several = draw.moment(4), factor(draw.moment(4, 3))
    skew, nudged = A.clone(), torch.eye(1000)
    skew[0, 1] += 0.1
    nudged[3, 700] += 0.01
    turning = 4 * torch.eye(3) + torch.tensor([[0.0, 1.0, 1.0], [-1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    assert_errors(
        (ShapeError, "not_square", lambda: factor(draw.normal(4, 5))),
        (ShapeError, "not_symmetric", lambda: factor(skew)),
        (ShapeError, "not_symmetric", lambda: factor(nudged)),
        (ShapeError, "not_symmetric", lambda: factor(turning)),
        (InputError, "not_finite", lambda: factor(A * float("nan"))),
        (InputError, "not_floating_point", lambda: factor(A.long())),
        (InputError, "not_a_tensor", lambda: factor([[1.0]])),
        (ShapeError, "right_side_does_not_match", lambda: factor(A).solve(draw.normal(5, 2))),
        (ShapeError, "wrong_width", lambda: factor(A).plus(draw.normal(2, 5))),
        (InputError, "not_finite", lambda: factor(A).solve(torch.full((4, 1), float("nan"), dtype=A.dtype))),
        (InputError, "not_finite", lambda: factor(A).plus(torch.full((1, 4), float("inf"), dtype=A.dtype))),
        (ShapeError, "not_broadcastable", lambda: several.solve(draw.normal(2, 4, 1))),
        (ShapeError, "not_broadcastable", lambda: several.plus(draw.normal(2, 1, 4))),
    )


@pytest.mark.parametrize(("negative", "rescued"), [(5e-3, True), (5e-2, False)])
def test_the_ladder_ends_at_one_per_cent(negative, rescued):
    A = Draw(14).spectrum(torch.cat([torch.linspace(0.5, 1.5, 19), torch.tensor([-negative])]).double())
    if rescued:
        with pytest.warns(NumericalWarning, match=r"\(1e-02 of the mean diagonal\)"):
            assert factor(A).jitter == pytest.approx(1e-2 * float(A.diagonal().mean()))
    else:
        with pytest.raises(NumericalError):
            factor(A)


def test_the_residual_is_the_worst_of_a_batch():
    draw = Draw(15)
    good, zero_row = torch.eye(2).double(), torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))
    with pytest.warns(NumericalWarning):
        solution = factor(torch.stack([good, zero_row])).solve(torch.ones(2, 2, 1, dtype=torch.float64))
    assert solution.residual == pytest.approx(2**-0.5, rel=1e-3)
    assert factor(draw.moment(4)).solve(torch.zeros(0, 4, 2).double()).residual == 0.0


def test_residuals_see_a_wrong_answer():
    """Every residual is computed from the value it belongs to: a factor that lies is found out."""
    draw = Draw(16)
    A, B, keys = draw.moment(5), draw.normal(5, 2), draw.normal(3, 5)
    f = factor(A)
    liar = Cholesky(f.matrix, 1.1 * f.lower, 0.0)
    assert liar.solve(B).residual > 0.1
    assert Woodbury(liar, keys, liar.whiten(keys), f.plus(keys).inner).solve(B).residual > 0.01
    assert Woodbury(liar, keys, liar.whiten(keys), f.plus(keys).inner).gain().residual > 0.01


def test_refinement_serves_each_entry_of_a_batch():
    draw = Draw(17)
    hard = draw.spectrum(torch.logspace(0, -12, 20, dtype=torch.float64))
    easy = draw.moment(20)
    keys, B = draw.normal(2, 19, 20), draw.normal(2, 20, 3)
    both = factor(torch.stack([hard, easy])).plus(keys).solve(B)
    assert both.residual < 1e-6
    assert_close(both.value[1], factor(easy).plus(keys[1]).solve(B[1]).value, 1e-9)


def test_vmap_never_returns_a_plausible_wrong_number():
    """Where a rescue cannot be decided on, an entry that needs one is NaN and its neighbors are right."""
    good = torch.eye(3).double()
    solved = torch.vmap(lambda a: factor(a).solve(torch.ones(3, 1).double()).value)(torch.stack([good, -good]))
    assert_close(solved[0], torch.ones(3, 1).double())
    assert torch.isnan(solved[1]).all()


def test_rounding_in_a_moment_is_not_asymmetry():
    draw = Draw(18)
    for dtype in (torch.float32, torch.bfloat16):
        A = draw.moment(64).to(dtype)
        noisy = A * (1 + torch.finfo(dtype).eps * draw.uniform(64, 64).to(dtype))
        factor(noisy.to(dtype) + torch.eye(64, dtype=dtype))
    widened = (draw.normal(1000, 64).float().mT @ draw.normal(1000, 64).float()).double()
    with raises(ShapeError, "not_symmetric"):
        factor(widened)
    for dtype in (torch.bfloat16, torch.float16):
        crooked = 2 * torch.eye(256, dtype=dtype)
        crooked[0, 1] = 0.5
        with raises(ShapeError, "not_symmetric"):
            factor(crooked)
