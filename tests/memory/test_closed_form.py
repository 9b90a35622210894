"""Gains: every route against the dense formula, hard cases, dtypes, gradients, bad input."""

from __future__ import annotations

import warnings

import mpmath
import pytest
import torch

from rebind import Write
from rebind.errors import InputError, NumericalError, NumericalWarning, ShapeError
from rebind.memory import NullSpace, Recursive, equality, equality_block, factor, null_space, ridge
from tests.support import Draw, assert_close, assert_errors, raises


def test_the_form_is_picked_by_what_is_cheaper_and_reported():
    draw = Draw(1)
    moment = draw.moment(5)
    few, many = draw.normal(3, 5), draw.normal(8, 5)
    assert (ridge(few, factor(moment)).method, ridge(few, factor(moment)).order) == ("dual", 3)
    assert (ridge(many, factor(moment)).method, ridge(many, factor(moment)).order) == ("primal", 5)
    assert ridge(few, moment).method == "primal", "without a factor the d×d system has to be factored anyway"
    assert (ridge(few).method, ridge(many).method) == ("dual", "primal")
    assert ridge(draw.normal(5, 5)).method == "primal", "at n = d the d×d system is as small and needs no C⁻¹"


def test_one_factor_serves_every_lambda():
    draw = Draw(2)
    keys, moment = draw.normal(3, 5), draw.moment(5)
    f = factor(moment)
    for lam in (1e-3, 1.0, 1.5e4):
        assert_close(ridge(keys, f, lam).value, keys @ torch.linalg.inv(lam * moment + keys.mT @ keys))


def in_fifty_digits(keys, moment, lam):
    """K (λC + KᵀK)⁻¹ by mpmath."""
    with mpmath.workdps(50):
        K, C = mpmath.matrix(keys.tolist()), mpmath.matrix(moment.tolist())
        gain = mpmath.inverse(lam * C + K.T * K)
        return torch.tensor((K * gain).tolist(), dtype=torch.float64)


@pytest.mark.parametrize(
    ("form", "n"),
    [(form, n) for form in ("auto", "primal", "dual") for n in (1, 10, 19, 20, 200) if (form, n) != ("dual", 200)],
)
def test_ridge_with_an_ill_conditioned_moment(form, n):
    """Condition 1e12, against fifty digits. The sum's own condition decides how many survive, not the route."""
    draw = Draw(3)
    moment = draw.spectrum(torch.logspace(0, -12, 20, dtype=torch.float64))
    keys = draw.normal(n, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = ridge(keys, factor(moment), 0.5, form=form)
    assert solution.jitter == 0.0
    assert solution.residual < 1e-9
    condition = float(torch.linalg.cond(0.5 * moment + keys.mT @ keys))
    expected = in_fifty_digits(keys, moment, 0.5)
    assert_close(solution.value, expected, max(1e-11, 10 * condition * torch.finfo(torch.float64).eps))


def test_a_dual_that_loses_too_many_digits_warns():
    """Ten times more keys than directions on a moment of condition 1e12, the dual form insisted on."""
    draw = Draw(3)
    moment = draw.spectrum(torch.logspace(0, -12, 20, dtype=torch.float64))
    with pytest.warns(NumericalWarning, match="left a relative residual of .*form='primal'"):
        ridge(draw.normal(200, 20), factor(moment), 0.5, form="dual")


@pytest.mark.parametrize("n", [1, 5, 10])
def test_a_rank_deficient_moment_is_reported(n):
    """30 old keys in 40 directions. Where C is singular the gain uses the free directions; old answers stay."""
    draw = Draw(4)
    old, keys, values = draw.normal(30, 40), draw.normal(n, 40), draw.normal(n, 3)
    moment, W = old.mT @ old, draw.normal(3, 40)
    for gain in (lambda: equality(keys, moment), lambda: ridge(keys, moment, form="dual")):
        with pytest.warns(NumericalWarning, match="moment .* singular"):
            solution = gain()
        assert solution.jitter > 0
        edited = Write(keys, values, solution).apply(W)
        assert_close(keys @ edited.mT, values, 1e-6)
        assert_close(old @ edited.mT, old @ W.mT, 1e-6)  # as many free directions as new keys: nothing has to move


def test_a_rank_deficient_moment_with_enough_keys_needs_no_rescue():
    """30 old keys and 30 new ones span all 40 directions: the primal form, which `auto` takes, is well posed."""
    draw = Draw(5)
    old, keys = draw.normal(30, 40), draw.normal(30, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = ridge(keys, old.mT @ old)
    assert (solution.jitter, solution.method) == (0.0, "primal")
    both = torch.cat([keys, old])
    assert_close(solution.value, torch.linalg.lstsq(both, torch.eye(60).double()).solution.mT[:30], 1e-9)


def test_duplicate_keys_that_agree_are_written():
    draw = Draw(5)
    k, v = draw.normal(1, 6), draw.normal(1, 4)
    keys, values = torch.cat([k, k, draw.normal(1, 6)]), torch.cat([v, v, draw.normal(1, 4)])
    with pytest.warns(NumericalWarning, match="K C⁻¹ Kᵀ .* singular"):
        solution = equality(keys, draw.moment(6))
    edited = Write(keys, values, solution).apply(draw.normal(4, 6))
    assert_close(keys @ edited.mT, values, 1e-6)
    smooth = ridge(keys, draw.moment(6), 1e-9)
    assert_close(keys @ Write(keys, values, smooth.value).apply(torch.zeros(4, 6).double()).mT, values, 1e-6)


def test_duplicate_keys_that_disagree_meet_in_the_middle():
    draw = Draw(6)
    k, v = draw.normal(1, 6), draw.normal(2, 4)
    with pytest.warns(NumericalWarning):
        gain = equality(torch.cat([k, k])).value
    edited = Write(torch.cat([k, k]), v, gain).apply(draw.normal(4, 6))
    assert_close((k @ edited.mT)[0], v.mean(0), 1e-6)


def test_more_keys_than_width():
    draw = Draw(7)
    keys = draw.normal(50, 5)
    for form in (equality, equality_block):
        with raises(NumericalError, "too_many_keys"):
            form(keys)
    values = draw.normal(50, 3)
    fitted = Write(keys, values, ridge(keys, None, 1e-12).value).apply(torch.zeros(3, 5).double())
    assert_close(fitted, torch.linalg.lstsq(keys, values).solution.mT, 1e-9)


def test_the_block_system_refuses_what_it_cannot_solve():
    k = Draw(8).normal(1, 6)
    with raises(NumericalError, "singular_block_system"):
        equality_block(torch.cat([k, k]))


@pytest.mark.parametrize("form", [equality, equality_block, ridge])
def test_no_keys_give_an_empty_gain(form):
    draw = Draw(9)
    W = draw.normal(4, 6)
    gain = form(torch.zeros(0, 6, dtype=W.dtype), draw.moment(6)).value
    assert gain.shape == (0, 6)
    assert_close(Write(torch.zeros(0, 6).double(), torch.zeros(0, 4).double(), gain).apply(W), W, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    draw = Draw(10)
    keys64, moment = draw.normal(3, 8), draw.moment(8)
    keys = keys64.to(dtype)
    space = NullSpace.smallest(moment, 0.5)
    tolerance = 40 * torch.finfo(dtype).eps
    for got, expected in (
        (ridge(keys, moment), ridge(keys64, moment)),
        (ridge(keys, factor(moment.float()), 3.0), ridge(keys64, factor(moment.float()), 3.0)),
        (equality(keys, moment), equality(keys64, moment)),
        (equality_block(keys, moment), equality_block(keys64, moment)),
        (null_space(keys, space), null_space(keys64, space)),
        (Recursive.start(moment).step(keys)[0], Recursive.start(moment).step(keys64)[0]),
    ):
        assert got.value.dtype == dtype
        assert_close(got.value, expected.value, tolerance)
        assert got.residual < 1e-10


def test_vmap_is_batching():
    draw = Draw(11)
    keys, moment, space = draw.normal(5, 3, 8), draw.moment(8), NullSpace.smallest(draw.moment(8), 0.5)
    for gain in (
        lambda k: ridge(k, moment).value,
        lambda k: ridge(k, factor(moment)).value,
        lambda k: ridge(k).value,
        lambda k: equality(k, moment).value,
        lambda k: equality_block(k, moment).value,
        lambda k: null_space(k, space, previous=k[..., :1, :]).value,
        lambda k: Recursive.start(moment).step(k)[0].value,
    ):
        assert_close(torch.vmap(gain)(keys), gain(keys))
        assert_close(gain(keys)[2], gain(keys[2]))


def test_gradients():
    draw = Draw(12)
    keys, root, values, W = (draw.normal(*s).requires_grad_() for s in ((2, 4), (4, 4), (2, 3), (3, 4)))
    spd = lambda r: r @ r.mT + torch.eye(4, dtype=r.dtype)
    space = NullSpace.smallest(draw.moment(4), 0.5)
    for gain in (
        lambda k, r: ridge(k, spd(r), 0.7),
        lambda k, r: ridge(k, factor(spd(r)), 0.7),
        lambda k, r: ridge(k, None, 0.7),
        lambda k, r: equality(k, spd(r)),
        lambda k, r: equality_block(k, spd(r)),
        lambda k, r: null_space(k, space, previous=r),
        lambda k, r: Recursive.start(spd(r)).step(k)[0],
    ):
        assert torch.autograd.gradcheck(
            lambda k, r, v, w, gain=gain: Write(k, v, gain(k, r).value).apply(w), (keys, root, values, W)
        )


def test_a_bounded_null_space_bounds_the_disturbance():
    """tr(ΔCΔᵀ) ≤ largest·‖Δ‖²: what `NullSpace.largest` promises."""
    draw = Draw(13)
    moment = draw.spectrum(torch.logspace(-4, 1, 12, dtype=torch.float64))
    space = NullSpace.below(moment, 2e-2)
    assert 0 < space.size < 12
    assert space.largest < 2e-2
    keys = draw.normal(3, 12)
    change = Write(keys, draw.normal(3, 4), null_space(keys, space).value).delta(draw.normal(4, 12)).dense()
    assert float((change @ moment * change).sum()) <= space.largest * float(change.square().sum()) * (1 + 1e-9)


def test_earlier_edits_survive_a_null_space_edit_that_knows_of_them():
    draw = Draw(14)
    space = NullSpace.smallest(draw.moment(12), 0.9)
    first, second = draw.normal(3, 12), draw.normal(3, 12)
    v1, v2, W = draw.normal(3, 4), draw.normal(3, 4), draw.normal(4, 12)
    after = Write(first, v1, null_space(first, space, lam=1e-8).value).apply(W)
    knowing = Write(second, v2, null_space(second, space, previous=first, lam=1e-8).value).apply(after)
    blind = Write(second, v2, null_space(second, space, lam=1e-8).value).apply(after)
    assert_close(first @ knowing.mT, v1, 1e-5)
    assert float((first @ blind.mT - v1).abs().max()) > 0.1


def test_recursive_without_a_moment_starts_from_the_identity():
    draw = Draw(15)
    keys = draw.normal(3, 5)
    gain, state = Recursive.start(lam=2.0, width=5).step(keys)
    assert_close(gain.value, ridge(keys, None, 2.0).value)
    assert_close(state.moment, 2 * torch.eye(5).double() + keys.mT @ keys)


@pytest.mark.parametrize("form", [ridge, equality, equality_block])
def test_bad_keys_and_moments(form):
    draw = Draw(16)
    keys, moment, moments = draw.normal(3, 6), draw.moment(6), draw.moment(6, 3)
    assert_errors(
        (ShapeError, "wrong_width", lambda: form(draw.normal(3, 5), moment)),
        (ShapeError, "wrong_width", lambda: form(draw.normal(3, 5), factor(moment))),
        (ShapeError, "not_square", lambda: form(keys, draw.normal(5, 6))),
        (ShapeError, "not_symmetric", lambda: form(keys, draw.normal(6, 6))),
        (InputError, "not_finite", lambda: form(keys * float("nan"), moment)),
        (InputError, "not_finite", lambda: form(keys, moment * float("inf"))),
        (ShapeError, "not_broadcastable", lambda: form(draw.normal(2, 2, 6), moments)),
        (ShapeError, "not_broadcastable", lambda: form(draw.normal(2, 2, 6), factor(moments))),
    )


@pytest.mark.parametrize("lam", [0.0, -1.0, float("nan"), float("inf")])
def test_lambda_is_positive(lam):
    keys, moment = Draw(16).normal(3, 6), Draw(16).moment(6)
    assert_errors(
        (InputError, "invalid_lambda", lambda: ridge(keys, moment, lam)),
        (InputError, "invalid_lambda", lambda: Recursive.start(moment, lam)),
        (InputError, "invalid_lambda", lambda: null_space(keys, NullSpace.smallest(moment, 0.5), lam=lam)),
    )


def test_bad_settings():
    draw = Draw(16)
    keys, moment = draw.normal(3, 6), draw.moment(6)
    space = NullSpace.smallest(moment, 0.5)
    assert_errors(
        (InputError, "unknown_form", lambda: ridge(keys, moment, form="best")),
        (InputError, "missing_moment", lambda: Recursive.start()),
        (InputError, "missing_moment", lambda: Recursive.start(width=-1)),
        (ShapeError, "not_symmetric", lambda: Recursive.start(draw.normal(6, 6))),
        (ShapeError, "not_broadcastable", lambda: Recursive.start(draw.moment(6, 3)).step(draw.normal(2, 2, 6))),
        (NumericalError, "empty_null_space", lambda: NullSpace.below(torch.eye(4).double())),
        (InputError, "invalid_share", lambda: NullSpace.smallest(moment, 1.5)),
        (ShapeError, "batch_of_moments", lambda: NullSpace.below(moment.expand(2, 6, 6))),
        (InputError, "not_a_tensor", lambda: NullSpace.below(factor(moment))),
        (ShapeError, "wrong_width", lambda: null_space(draw.normal(3, 5), space)),
        (ShapeError, "wrong_width", lambda: null_space(keys, space, previous=draw.normal(3, 5))),
        (
            ShapeError,
            "not_broadcastable",
            lambda: null_space(keys.expand(2, 3, 6), space, previous=draw.normal(3, 1, 6)),
        ),
    )


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("known", [True, False])
def test_residuals_are_of_the_whole_equation(form, known):
    draw = Draw(17)
    keys, moment = draw.normal(3, 6), draw.moment(6)
    solution = ridge(keys, moment if known else None, 0.5, form=form)
    C = moment if known else torch.eye(6).double()
    assert solution.residual < 1e-12
    missing = float((solution.value @ (0.5 * C + keys.mT @ keys) - keys).norm() / keys.norm())
    assert solution.residual == pytest.approx(missing, abs=1e-13)


def test_null_spaces_have_the_stated_size():
    moment = Draw(19).spectrum(torch.tensor([1e-3, 1e-2, 1.9e-2, 2.1e-2, 1.0, 2.0]).double())
    assert NullSpace.below(moment).size == 3
    assert NullSpace.smallest(moment, 0.4).size == 2
