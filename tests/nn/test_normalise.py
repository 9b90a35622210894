"""Few operations, the same numbers: `unit`, `share` and RMSNorm against the formulas."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError
from rebind.memory.features import Feature, l2_normalise, sum_normalise
from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.parts.feature_map import FeatureMap
from rebind.nn.parts.norm import RMSNorm, entering
from rebind.nn.parts.normalizers import share, unit
from tests.support import Draw, assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 64, 128])
def test_unit_is_l2_normalise(dtype, width):
    x = Draw(0).normal(3, 7, width).to(dtype)
    out = unit(x)
    assert out.dtype == dtype
    assert_close(out.double(), l2_normalise(x.double()), 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unit_takes_large_and_small_rows(dtype):
    x = Draw(1).normal(4, 64).to(dtype)
    for scale in (1e-4, 1e4, 1e15):
        assert_close(unit(x * scale).double(), l2_normalise(x.double()), 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_row_of_zeros_stays_zero_with_a_bounded_gradient(dtype):
    for normalise, slope in ((unit, 1 / torch.finfo(torch.promote_types(dtype, torch.float32)).eps), (share, 1.0)):
        x = torch.zeros(2, 64, dtype=dtype, requires_grad=True)
        out = normalise(x)
        assert torch.equal(out, torch.zeros_like(out))
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert gradient.abs().max() <= slope


def test_gradients_of_unit_and_share():
    assert torch.autograd.gradcheck(unit, Draw(2).normal(3, 4).requires_grad_())
    assert torch.autograd.gradgradcheck(unit, Draw(2).normal(3, 4).requires_grad_())
    assert torch.autograd.gradcheck(share, Draw(3).uniform(3, 4).requires_grad_())


def test_share_is_sum_normalise():
    x = Draw(4).uniform(3, 7, 5)
    assert_close(share(x), sum_normalise(x), 1e-15)


@pytest.mark.parametrize(
    ("feature", "normalise"), [("identity", "l2"), ("elu+1", "l2"), ("dpfp", "sum"), ("favor", "sum")]
)
def test_a_pair_is_its_query_and_its_key(feature, normalise):
    phi, both = FeatureMap(feature, normalise, 4).double(), Draw(5).normal(2, 3, 2, 5, 4)
    q, k = phi.pair(both)
    assert_close(q, phi.query(both[..., 0, :, :]), 1e-15)
    assert_close(k, phi.key(both[..., 1, :, :]), 1e-15)
    assert q.is_contiguous()
    assert k.is_contiguous()


class Signed(Feature):
    """A user's feature with negative entries; it has no name, so nobody finds it."""

    def _map(self, x):
        return -x.abs()


def test_negative_features_under_a_sum_are_explained():
    feature = Signed(4)
    feature.name = "signed"
    with pytest.raises(InputError, match="sum normalisation got entries down to -1, expected none below 0"):
        FeatureMap(feature, "sum", 4).key(torch.ones(2, 4))


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_its_formula_whatever_the_dtypes(dtype, weights):
    norm, x = RMSNorm(64).to(weights), (100 * Draw(6).normal(3, 64)).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * Draw(7).normal(64))
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.to(dtype).double()
    assert norm(x).dtype == dtype
    assert_close(norm(x).double(), expected, 2 * torch.finfo(dtype).eps)


def test_rms_norm_sums_squares_that_half_precision_cannot_hold():
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    assert_close(RMSNorm(64)(x).double(), torch.ones(1, 64).double(), 1e-3)


def test_rms_norm_keeps_its_dtype_under_autocast():
    norm = RMSNorm(8)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            out = norm(Draw(8).normal(2, 8).to(dtype).requires_grad_())
        assert out.dtype == dtype
        out.sum().backward()
        assert norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("read", [True, False])
def test_what_enters_a_layer_is_the_norm_of_what_goes_on(read):
    norm, draw = RMSNorm(8).double(), Draw(8)
    x, more = draw.normal(2, 3, 8), draw.normal(2, 3, 8) if read else None
    on, normed = entering(norm, x, more)
    expected = x + more if read else x
    assert torch.equal(on, expected)
    assert torch.equal(normed, norm(expected))


def test_under_autocast_it_enters_as_a_product_takes_it():
    norm, x = RMSNorm(8), Draw(9).normal(2, 3, 8).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on, normed = entering(norm, x, x.bfloat16())
        expected = norm(x + x.bfloat16())
    assert (on.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(normed, expected.bfloat16())


def test_norms_that_are_hooked_are_called():
    norm, x, seen = RMSNorm(8), torch.ones(1, 8), []
    norm.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    on, _ = entering(norm, x, x)
    assert len(seen) == 1
    assert torch.equal(seen[0], on)


def test_other_norms_are_called():
    norm, x = torch.nn.LayerNorm(8), Draw(10).normal(3, 8).float()
    on, normed = entering(norm, x, x)
    assert torch.equal(normed, norm(on))


@pytest.mark.parametrize("kind", ["delta", "attention"])
def test_a_model_by_the_kernels_is_the_model(monkeypatch, kind):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs on a CPU")
    from rebind.ops import normed

    torch.manual_seed(0)
    config = RebindConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        layer_kinds=kind,
        intermediate_size=24,
    )
    model = RebindForCausalLM(config)
    ids = torch.randint(50, (2, 9))

    def trained():
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = trained()
    monkeypatch.setattr(normed, "_has_kernels", lambda *given: True)
    for one, true in zip(trained(), expected, strict=True):
        assert_close(one, true, 1e-5)
