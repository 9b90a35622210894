"""`FastWeight` and its parts against the recurrence and the formulas of the papers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional

from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.memory import ttt
from rebind.memory.features import Dpfp, Favor, Feature, l2_normalize, sum_normalize
from rebind.memory.rules import Coefficients, Rule, get_rule
from rebind.nn import Attention, CrossFastWeight, FastWeight, HopfieldLayer, TTTLayer
from rebind.nn.parts.dense import project_jointly
from rebind.nn.parts.feature_map import FeatureMap
from rebind.nn.parts.gates import ShortConvolution
from rebind.ops import scan
from tests.support import Draw, assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def projected(layer: FastWeight, x):
    return (project(x).unflatten(-1, (layer.heads, -1)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))


# The recurrence


class Halfway(Rule):
    """A rule that computes its decay from α; it has no name, so get_rule does not find it."""

    gates = {"alpha": 1.0, "beta": 1.0}  # noqa: RUF012
    reads = True

    def _coefficients(self, k, gates):
        return Coefficients((1 + gates["alpha"]) / 2, gates["beta"], gates["beta"])


@pytest.mark.parametrize("rule", ["sum", "rfa", "mamba2", "delta", "longhorn", "gated_delta", Halfway()], ids=str)
def test_it_is_the_rule_token_by_token(rule):
    """β = σ(W_β x); log α = −exp(A_log) · softplus(W_a x + dt_bias)."""
    rule = get_rule(rule)
    layer, x = FastWeight(6, 2, rule=rule, normalizer="l2", norm_eps=None).double(), Draw(0).normal(1, 8, 6)
    gates = {}
    if layer.gates.beta is not None:
        gates["beta"] = 1 / (1 + torch.exp(-x[0] @ layer.gates.beta.weight.T))
    if (decay := layer.gates.decay) is not None:
        gates["dt"] = torch.log1p(torch.exp(x[0] @ decay.project.weight.T + decay.dt_bias))
        gates["alpha"] = torch.exp(-torch.exp(decay.A_log) * gates["dt"])
    q, k, v = projected(layer, x[0])
    q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    memory, reads = torch.zeros(2, 3, 3, dtype=torch.float64), []
    for t in range(8):
        memory = rule.write(k[t], v[t], **{name: gates[name][t] for name in rule.gates}).apply(memory)
        reads.append((memory @ q[t].unsqueeze(-1)).flatten())
    out, state = layer(x)
    assert_close(state.memory[0], memory)
    assert_close(out[0], layer.o_proj(torch.stack(reads)))


@pytest.mark.parametrize("feature", ["elu+1", Dpfp(3, nu=2), Favor(3, m=5)])
def test_the_sum_is_normalized_attention(feature):
    """Schlag et al. eq. 19: weights φ(k)·φ(q) over their sum."""
    layer = FastWeight(6, 2, rule="sum", feature=feature, normalizer="attention", norm_eps=None).double()
    x = Draw(1).normal(1, 8, 6)
    q, k, v = projected(layer, x[0])
    phi = layer.phi.feature
    weights = torch.einsum("thd,shd->hts", phi.up_to_scale(q), phi(k)).tril()
    read = torch.einsum("hts,shv->thv", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    assert_close(layer(x)[0][0], layer.o_proj(read.flatten(1)))


def test_sparse_features_that_never_meet_read_zero():
    """DPFP keys and queries with nothing in common: 0, not 0/0."""
    layer = FastWeight(4, 1, rule="sum", feature=Dpfp(4), normalizer="attention", norm_eps=None).double()
    torch.nn.init.eye_(layer.q_proj.weight)
    torch.nn.init.zeros_(layer.k_proj.weight)
    assert torch.equal(layer(Draw(2).normal(1, 3, 4))[0], torch.zeros(1, 3, 4, dtype=torch.float64))


def test_repeated_delta_writes_converge_to_the_value():
    """Schlag et al. A.2: sum-normalized keys that see one value again and again read exactly that value."""
    layer = FastWeight(4, 1, rule="delta", feature="elu+1", normalizer="sum", norm_eps=None).double()
    x = Draw(3).normal(1, 1, 4).expand(1, 5_000, 4)
    _, state = layer(x)
    key = layer.phi.key(layer.k_proj(x[0, 0]))
    assert_close(key.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert_close(state.memory[0, 0] @ key, layer.v_proj(x[0, 0]), 1e-6)


@pytest.mark.parametrize(
    ("options", "size", "stored"),
    [
        ({"rule": "delta", "feature": "elu+1", "normalizer": "sum"}, 8 * 32 * 32, 8 * 32 * 32),
        ({"rule": "sum", "feature": "elu+1", "normalizer": "attention"}, 8 * 32 * 32, 8 * 32 * 33),
        ({"feature": Dpfp(32, nu=2), "normalizer": "sum"}, 8 * 128 * 32, 8 * 128 * 32),
        ({"feature": Favor(32, m=16), "normalizer": "sum"}, 8 * 32 * 32, 8 * 32 * 32),
        ({"d_k": 16, "d_v": 64}, 8 * 16 * 64, 8 * 16 * 64),
        ({"conv_size": 4}, 8 * 32 * 32, 8 * 32 * 32 + 3 * 3 * 256),
    ],
)
def test_state_size_is_that_of_the_paper(options, size, stored):
    """Schlag et al., appendix F: 8 heads of 32 × 32 are 8,192 numbers per layer, whatever the context."""
    layer = FastWeight(256, 8, **options)
    assert layer.state_size == size
    for length in (1, 9):
        assert layer(torch.zeros(2, length, 256))[1].size == stored


@pytest.mark.parametrize("rule", ["delta", "gated_delta", "longhorn"])
def test_what_the_scan_gets(monkeypatch, rule):
    """ε = η is one tensor, and values are no view that keeps q and k before φ in memory."""
    arguments = {}

    def spy(q, k, v, **others):
        arguments.update(others, v=v)
        return scan(q, k, v, **others)

    monkeypatch.setattr("rebind.nn.layers.fast_weight.scan", spy)
    FastWeight(16, 2, rule=rule, feature="relu")(torch.randn(1, 8, 16))
    assert arguments["erase"] is arguments["write"]
    assert arguments["v"].untyped_storage().nbytes() == arguments["v"].nbytes


# Convolution and gates


def test_the_convolution_written_out():
    conv = ShortConvolution(3, 4).double()
    x = Draw(4).normal(1, 6, 3)
    padded = torch.cat([torch.zeros(1, 3, 3, dtype=torch.float64), x], dim=1)
    expected = torch.stack([(padded[0, t : t + 4] * conv.weight.T).sum(0) for t in range(6)])
    (out,), window = conv(x, conv.initial_window(1))
    assert_close(out[0], functional.silu(expected))
    assert_close(window, x[:, -3:])


def test_a_slow_decay_survives_half_precision():
    """α = exp(−1e-6) is 1 in bfloat16, so the layer passes its logarithm on."""
    gates = FastWeight(4, 1, rule="gated_delta").to(torch.bfloat16).gates
    with torch.no_grad():
        gates.decay.project.weight.zero_()
        gates.decay.dt_bias.fill_(math.log(1e-3))
        gates.decay.A_log.fill_(math.log(1e-3))
    values, log_decay = gates(project_jointly(torch.zeros(1, 4, dtype=torch.bfloat16), *gates.projections))
    assert set(values) == {"beta"}
    assert log_decay.dtype == torch.float32
    assert -1.1e-6 < float(log_decay.detach()) < -0.9e-6


# Feature maps and normalizers


@pytest.mark.parametrize("rule", ["gated_delta", "kda", "comba", "mamba2"])
def test_the_gradient_of_fast_decays_keeps_its_digits(rule):
    """With the rates and steps that Qwen3-Next begins with, α falls to e⁻⁴⁰: in float32 against float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = FastWeight(32, 8, rule=rule, conv_size=4)
    with torch.no_grad():
        layer.gates.decay.A_log.copy_(torch.linspace(0.5, 16.0, 8).log())
        layer.gates.decay.dt_bias.fill_(1.0)
    x = Draw(1).normal(4, 100, 32).float()

    def gradients(layer, x):
        loss = (layer(x)[0] * Draw(2).normal(*x.shape).to(x)).sum()
        return torch.autograd.grad(loss, (layer.gates.decay.A_log, layer.gates.decay.dt_bias))

    exact = gradients(copy.deepcopy(layer).double(), x.double())
    for got, true in zip(gradients(layer, x), exact, strict=True):  # of some heads, a sum of tokens that cancel
        assert float(((got - true).abs() / true.abs()).quantile(0.9)) < 1e-3


def test_a_feature_object_can_be_shared():
    """Each layer copies it: what one loads reaches neither the other layer nor the object."""
    feature = Favor(4, m=6)
    drawn = feature.projection
    one, other = FastWeight(8, 2, feature=feature), FastWeight(8, 2, feature=feature)
    with torch.no_grad():
        one.phi.projection.zero_()
    one(torch.ones(1, 2, 8))
    assert feature.projection is drawn
    assert other.phi.feature.projection.abs().max() > 0
    assert "phi.projection" in one.state_dict()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 128])
def test_scaling_to_unit_norm_and_unit_sum(dtype, width):
    x = Draw(0).normal(3, 7, width).to(dtype)
    unit = FeatureMap("identity", "l2", width)
    assert unit.key(x).dtype == dtype
    assert_close(unit.key(x).double(), l2_normalize(x.double()), 2 * torch.finfo(dtype).eps)
    positive = x.abs().double()
    assert_close(FeatureMap("relu", "sum", width).key(positive), sum_normalize(positive), 1e-15)
    if width == 128 and dtype in (torch.float32, torch.bfloat16):
        for scale in (1e-4, 1e15):
            assert_close(unit.key(x * scale).double(), l2_normalize((x * scale).double()), 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(("feature", "normalizer"), [("identity", "l2"), ("relu", "sum")])
def test_a_row_of_zeros_stays_zero_with_a_bounded_gradient(dtype, feature, normalizer):
    x = torch.zeros(2, 64, dtype=dtype, requires_grad=True)
    out = FeatureMap(feature, normalizer, 64).key(x)
    assert torch.equal(out, torch.zeros_like(out))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert gradient.abs().max() <= (1 / eps if normalizer == "l2" else 1.0)


def test_gradients_of_the_normalizers():
    unit = FeatureMap("identity", "l2", 4).key
    assert torch.autograd.gradcheck(unit, Draw(2).normal(3, 4).requires_grad_())
    assert torch.autograd.gradgradcheck(unit, Draw(2).normal(3, 4).requires_grad_())
    assert torch.autograd.gradcheck(FeatureMap("relu", "sum", 4).key, Draw(3).uniform(3, 4).requires_grad_())


# Errors


class Negative(Feature):
    """A user's feature with negative entries."""

    def __init__(self, dim):
        super().__init__(dim)
        self.name = "negative"  # of the object alone: no other test finds it

    def _map(self, x):
        return -x.abs()


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        (lambda: FastWeight(10, 3), ShapeError, "indivisible_heads"),
        (lambda: FastWeight(0, 1), InputError, "invalid_size"),
        (lambda: FastWeight(8, 2, conv_size=0), InputError, "invalid_size"),
        (lambda: FastWeight(8, 4, key_heads=3), ShapeError, "indivisible_heads"),
        (lambda: FastWeight(8, 2, rule="dalta"), UnknownNameError, "unknown_rule"),
        (lambda: FastWeight(8, 2, normalizer="summ"), UnknownNameError, "unknown_normalizer"),
        (lambda: FastWeight(8, 2, normalizer="sum"), InputError, "feature_may_be_negative"),
        (lambda: CrossFastWeight(8, 2, feature="identity"), InputError, "feature_may_be_negative"),
        (lambda: FeatureMap(Negative(4), "sum", 4).key(torch.ones(2, 4)), InputError, None),
        (lambda: FastWeight(8, 4)(torch.zeros(1, 2, 8), FastWeight(8, 2).initial_state(1)), ShapeError, None),
        (lambda: FastWeight(8, 4).step(torch.zeros(1, 8), FastWeight(8, 2).initial_state(1)), ShapeError, None),
        (lambda: CrossFastWeight(6, 4), ShapeError, "indivisible_heads"),
        (lambda: Attention(6, 2), ShapeError, "indivisible_heads"),
        (lambda: TTTLayer(8, 2, mini_batch=0), InputError, "invalid_size"),
        (lambda: TTTLayer(8, 2, inner=ttt.ResidualNorm(ttt.Linear())), InputError, "unsupported_inner_model"),
        (lambda: HopfieldLayer(8, 2, patterns=0), InputError, "invalid_size"),
    ],
)
def test_bad_layers_are_refused(call, error, code):
    with pytest.raises(error) as caught:
        call()
    assert code in (None, caught.value.code)  # None: the memory or the scan refuses it
