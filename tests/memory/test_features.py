"""Feature maps: against the papers' formulas, their widths, kernels, dtypes, gradients, bad input."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.memory import feature_names, get_feature, l2_normalize, sum_normalize
from rebind.memory.features import Dpfp, Favor, orthogonal_projection
from tests.support import BATCHES, Draw, assert_close, assert_errors, raises

NAMES = feature_names()
NON_NEGATIVE = [name for name in NAMES if name != "identity"]


def test_the_list_is_complete():
    assert set(NAMES) == {"identity", "elu+1", "relu", "dpfp", "favor"}


@pytest.mark.parametrize("name", NAMES)
class TestContract:
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("dim", [1, 5, 64])
    def test_width_is_as_stated(self, name, dim, batch):
        feature = get_feature(name, dim)
        out = feature(Draw(1).normal(*batch, dim))
        assert out.shape == (*batch, feature.width)
        assert torch.isfinite(out).all()

    def test_repeats_itself(self, name):
        """State is drawn once: calling, remaking and vmapping give the same map."""
        x = Draw(2).normal(7, 5)
        feature = get_feature(name, 5)
        assert_close(feature(x), feature(x), 0.0)
        assert_close(get_feature(name, 5, **feature.options)(x), feature(x), 0.0)
        assert_close(torch.vmap(feature)(x), feature(x), 1e-15)
        assert get_feature(feature, 5) is feature

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_dtypes(self, name, dtype):
        x = Draw(3).normal(7, 5).to(dtype)
        out = get_feature(name, 5)(x)
        assert out.dtype == dtype
        assert_close(out, get_feature(name, 5)(x.double()), (1 if dtype.itemsize == 2 else 4) * torch.finfo(dtype).eps)

    def test_gradients(self, name):
        feature = get_feature(name, 4)
        x = Draw(4).normal(3, 4).requires_grad_()
        assert torch.autograd.gradcheck(feature, x)
        if name in NON_NEGATIVE:
            assert torch.autograd.gradcheck(lambda x: sum_normalize(feature(x)), x)
        assert torch.autograd.gradcheck(lambda x: l2_normalize(feature(x)), x)

    def test_bad_input(self, name):
        assert_errors(
            (ShapeError, "wrong_width", lambda: get_feature(name, 5)(torch.zeros(6))),
            (InputError, "not_floating_point", lambda: get_feature(name, 5)(torch.zeros(5, dtype=torch.long))),
            (ShapeError, "invalid_width", lambda: get_feature(name, 0)),
            (InputError, "unknown_feature_option", lambda: get_feature(name, 5, bogus=1)),
            (ShapeError, "feature_does_not_match", lambda: get_feature(get_feature(name, 5), 6)),
        )


@pytest.mark.parametrize("name", NON_NEGATIVE)
def test_non_negative_features_normalize(name):
    phi = sum_normalize(get_feature(name, 16)(Draw(5).normal(50, 16)))
    assert (phi >= 0).all()
    assert_close(phi.sum(-1), torch.ones(50).double(), 1e-12)


@pytest.mark.parametrize("nu", [1, 2, 3, 9])
def test_dpfp_is_the_papers_listing(nu):
    """Schlag et al., listing 1, written index by index: block j, entry i is r_i · r_{i−j}, cyclically."""
    x = Draw(6).normal(5)
    r = [max(float(e), 0.0) for e in x] + [max(-float(e), 0.0) for e in x]
    expected = [r[i] * r[(i - j) % 10] for j in range(1, nu + 1) for i in range(10)]
    assert_close(Dpfp(5, nu)(x), torch.tensor(expected, dtype=x.dtype), 0.0)


def test_dpfp_is_equation_37():
    """Eq. 37 pairs r_i with r_{i+j}: the listing's features in another order, so the same kernel."""
    x, y = Draw(7).normal(2, 5)

    def eq37(x, nu=3):
        r = torch.cat([x.relu(), (-x).relu()])
        return torch.stack([r[i] * r[(i + j) % 10] for j in range(1, nu + 1) for i in range(10)])

    phi = Dpfp(5, 3)
    assert_close(phi(x) @ phi(y), eq37(x) @ eq37(y), 1e-14)
    assert_close(phi(x).sort().values, eq37(x).sort().values, 0.0)


@pytest.mark.parametrize("nu", [0, -1, 10, 11])
def test_dpfp_refuses_shifts_that_make_no_sense(nu):
    with raises(InputError, "invalid_nu"):
        Dpfp(5, nu)


def test_favor_estimates_the_softmax_kernel():
    """Unbiased for exp(q·k/√d): over many projections the mean comes within four standard errors."""
    q, k = 0.7 * Draw(9).normal(2, 8)
    exact = float(torch.exp(q @ k / 8**0.5))
    estimates = torch.stack([(phi := Favor(8, m=16, seed=seed))(q) @ phi(k) for seed in range(800)])
    error = float(estimates.std() / 800**0.5)
    assert abs(float(estimates.mean()) - exact) < 4 * error
    assert error < 0.02 * exact


def test_projections_are_orthogonal_in_blocks():
    w = orthogonal_projection(10, 4, seed=3)
    for block in w.split(4):
        gram = block @ block.mT
        assert_close(gram, torch.diag(gram.diagonal()), 1e-12)
    assert 2 < float(w.square().sum(-1).mean()) < 7, "as long as Gaussian vectors of width 4"


def test_normalizers():
    x = Draw(12).uniform(3, 5)
    assert_close(sum_normalize(x), x / x.sum(-1, keepdim=True), 1e-15)
    assert_close(l2_normalize(x).norm(dim=-1), torch.ones(3).double(), 1e-15)
    zero = torch.zeros(5, requires_grad=True)
    for normalize in (sum_normalize, l2_normalize):
        out = normalize(zero)
        assert torch.equal(out, torch.zeros(5)), "zeros stay zeros"
        (slope,) = torch.autograd.grad(out.sum(), zero)
        assert torch.isfinite(slope).all()


def test_elu_and_relu_by_hand():
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.float64)
    assert_close(get_feature("elu+1", 5)(x), torch.where(x > 0, x + 1, x.exp()), 1e-15)
    assert_close(get_feature("relu", 5)(x), torch.tensor([0.0, 0.0, 0.0, 0.5, 3.0]).double(), 0.0)


def test_favor_by_hand():
    """φ(x) = exp(±w·x̂ − ‖x̂‖²/2)/√(2m) with x̂ = x/d^¼."""
    x = Draw(13).normal(4)
    phi = Favor(4, m=3, seed=7)
    scaled = x / 4**0.25
    expected = [
        torch.exp(sign * (w @ scaled) - scaled @ scaled / 2) / 6**0.5 for sign in (1, -1) for w in phi.projection
    ]
    assert_close(phi(x), torch.stack(expected), 1e-14)


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normalizers_do_not_mind_scale(scale, dtype):
    x = Draw(15).uniform(3, 5).to(dtype)
    for normalize in (sum_normalize, l2_normalize):
        assert_close(normalize(scale * x), normalize(x), 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normalizers_work_in_single_precision(dtype):
    x = Draw(16).uniform(3, 500).to(dtype)
    for normalize in (sum_normalize, l2_normalize):
        out = normalize(x)
        assert out.dtype == dtype
        assert_close(out, normalize(x.double()), torch.finfo(dtype).eps)


def test_favor_survives_long_keys_before_a_normalizer():
    """Keys of norm 64 underflow φ itself in float32; up to scale they do not."""
    x = (8 * Draw(17).normal(64)).float()
    phi = Favor(64)
    assert float(phi(x).sum()) == 0.0
    assert_close(sum_normalize(phi.up_to_scale(x)), sum_normalize(phi.up_to_scale(x.double())), 1e-3)
    assert float(sum_normalize(phi.up_to_scale(x)).sum()) == pytest.approx(1.0, rel=1e-5)
    small = Draw(18).normal(64)
    assert_close(sum_normalize(phi.up_to_scale(small)), sum_normalize(phi(small)), 1e-12)


def test_bad_options():
    assert_errors(
        (UnknownNameError, "unknown_feature", lambda: get_feature("dpf", 5)),
        (UnknownNameError, "unknown_feature", lambda: get_feature([], 5)),
        (ShapeError, "feature_does_not_match", lambda: get_feature(Dpfp(5), 5, nu=3)),
        (InputError, "invalid_nu", lambda: get_feature("dpfp", 5, nu=1.5)),
        (InputError, "invalid_m", lambda: Favor(5, m=0)),
        (InputError, "not_a_tensor", lambda: sum_normalize([1.0, 2.0])),
        (InputError, "negative_features", lambda: sum_normalize(torch.tensor([-1.0, 2.0]))),
    )
