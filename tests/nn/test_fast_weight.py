"""`FastWeight` against the recurrence and the papers' formulas, written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.memory.features import Dpfp, Favor
from rebind.memory.rules import Coefficients, Rule, get_rule, rule_names
from rebind.nn import FastWeight
from rebind.nn.parts.convolution import ShortConvolution
from rebind.nn.parts.gates import Decay, Gates
from rebind.ops import scan
from tests.support import Draw, assert_close


def gates_by_hand(layer: FastWeight, x):
    """β = σ(W_β x); log α = −exp(A_log) · softplus(W_a x + dt_bias)."""
    found = {}
    if layer.gates.beta is not None:
        found["beta"] = 1 / (1 + torch.exp(-x @ layer.gates.beta.weight.T))
    if layer.gates.decay is not None:
        decay = layer.gates.decay
        found["dt"] = torch.log1p(torch.exp(x @ decay.project.weight.T + decay.dt_bias))
        found["alpha"] = torch.exp(-torch.exp(decay.A_log) * found["dt"])
    return {name: found[name] for name in layer.rule.gates}


@pytest.mark.parametrize("rule", rule_names())
def test_it_is_the_rule_token_by_token(rule):
    if any(gate not in Gates.makes for gate in get_rule(rule).gates):
        pytest.skip("a rule with gates of its own")
    layer, x = FastWeight(6, 2, rule=rule, normalise="l2", norm=False).double(), Draw(0).normal(1, 8, 6)
    out, state = layer(x)
    gates, reads = gates_by_hand(layer, x[0]), []
    q, k, v = (project(x[0]).unflatten(-1, (2, 3)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    memory = torch.zeros(2, 3, 3, dtype=torch.float64)
    for t in range(8):
        write = layer.rule.write(k[t], v[t], **{name: gate[t] for name, gate in gates.items()})
        memory = write.apply(memory)
        reads.append((memory @ q[t].unsqueeze(-1)).flatten())
    assert_close(state.memory[0], memory)
    assert_close(out[0], layer.o_proj(torch.stack(reads)))


@pytest.mark.parametrize("feature", ["elu+1", Dpfp(3, nu=2), Favor(3, m=5)])
def test_the_sum_is_normalised_attention(feature):
    """Schlag et al. eq. 19: weights φ(k)·φ(q) over their sum."""
    layer = FastWeight(6, 2, rule="sum", feature=feature, normalise="attention", norm=False).double()
    x = Draw(1).normal(1, 8, 6)
    q, k, v = (project(x[0]).unflatten(-1, (2, 3)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    phi = layer.phi.feature
    weights = torch.einsum("thd,shd->hts", phi.up_to_scale(q), phi(k)).tril()
    read = torch.einsum("hts,shv->thv", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    assert_close(layer(x)[0][0], layer.o_proj(read.flatten(1)))


def test_sparse_features_that_never_meet_answer_zero():
    """DPFP keys and queries with nothing in common: 0, not 0/0."""
    layer = FastWeight(4, 1, rule="sum", feature=Dpfp(4), normalise="attention", norm=False).double()
    torch.nn.init.eye_(layer.q_proj.weight)
    torch.nn.init.zeros_(layer.k_proj.weight)
    assert torch.equal(layer(Draw(2).normal(1, 3, 4))[0], torch.zeros(1, 3, 4, dtype=torch.float64))


def test_the_delta_rule_of_the_seed_balances():
    """A.2: sum-normalised keys that see one value again and again leave exactly that value to be read."""
    layer = FastWeight(4, 1, rule="delta", feature="elu+1", normalise="sum", norm=False).double()
    x = Draw(3).normal(1, 1, 4).expand(1, 5_000, 4)
    _, state = layer(x)
    assert_close(state.memory[0, 0] @ layer.phi.key(layer.k_proj(x[0, 0])), layer.v_proj(x[0, 0]), 1e-6)
    key = layer.phi.key(layer.k_proj(x[0, 0]))
    assert_close(key.sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "size", "held"),
    [
        ({"rule": "delta", "feature": "elu+1", "normalise": "sum"}, 8 * 32 * 32, 8 * 32 * 32),
        ({"rule": "sum", "feature": "elu+1", "normalise": "attention"}, 8 * 32 * 32, 8 * 32 * 33),
        ({"feature": Dpfp(32, nu=2), "normalise": "sum"}, 8 * 128 * 32, 8 * 128 * 32),
        ({"feature": Favor(32, m=16), "normalise": "sum"}, 8 * 32 * 32, 8 * 32 * 32),
        ({"key_dim": 16, "value_dim": 64}, 8 * 16 * 64, 8 * 16 * 64),
        ({"conv": 4}, 8 * 32 * 32, 8 * 32 * 32 + 3 * 3 * 256),
    ],
)
def test_state_size_is_the_seeds(options, size, held):
    """Seed 002, appendix F: 8 heads of 32 × 32 are 8,192 numbers a layer, whatever the context."""
    layer = FastWeight(256, 8, **options)
    assert layer.state_size == size
    for length in (1, 9):
        _, state = layer(torch.zeros(2, length, 256))
        assert state.size == held


def test_the_convolution_written_out():
    conv = ShortConvolution(3, 4).double()
    x = Draw(4).normal(1, 6, 3)
    padded = torch.cat([torch.zeros(1, 3, 3, dtype=torch.float64), x], dim=1)
    expected = torch.stack([(padded[0, t : t + 4] * conv.weight.T).sum(0) for t in range(6)])
    (out,), window = conv(x, conv.initial(1))
    assert_close(out[0], functional.silu(expected))
    assert_close(window, x[:, -3:])


def test_decays_start_where_mamba_does():
    torch.manual_seed(0)
    decay = Decay(4, 1_000)
    rate, step = decay.A_log.exp(), functional.softplus(decay.dt_bias)
    assert 1 <= rate.min() < 1.1
    assert 15 < rate.max() <= 16
    assert 0.0009 < step.min() < 0.0011
    assert 0.09 < step.max() < 0.1


def test_a_slow_decay_survives_half_precision():
    """α = exp(−1e-6) is 1 in bfloat16; the layer hands on its logarithm."""
    layer = FastWeight(4, 1, rule="gated_delta").to(torch.bfloat16)
    with torch.no_grad():
        layer.gates.decay.project.weight.zero_()
        layer.gates.decay.dt_bias.fill_(math.log(1e-3))
        layer.gates.decay.A_log.fill_(math.log(1e-3))
    made = layer.gates(torch.zeros(1, 4, dtype=torch.bfloat16))
    assert set(made.gates) == {"beta"}
    assert made.log_decay.dtype == torch.float32
    assert -1.1e-6 < float(made.log_decay.detach()) < -0.9e-6


class Halfway(Rule):
    """A rule that makes its decay of α, which it must then be given; it has no name, so nobody finds it."""

    gates = {"alpha": 1.0, "beta": 1.0}  # noqa: RUF012
    reads = True

    def _coefficients(self, k, gate):
        return Coefficients((1 + gate.alpha) / 2, gate.beta, gate.beta)

    def _objective(self, memory, previous, k, v, gate):
        raise NotImplementedError


def test_a_rule_with_a_formula_for_its_decay():
    layer, x = FastWeight(6, 2, rule=Halfway(), normalise="l2", norm=False).double(), Draw(15).normal(1, 8, 6)
    gates, reads = gates_by_hand(layer, x[0]), []
    q, k, v = (project(x[0]).unflatten(-1, (2, 3)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    memory = torch.zeros(2, 3, 3, dtype=torch.float64)
    for t in range(8):
        memory = layer.rule.write(k[t], v[t], alpha=gates["alpha"][t], beta=gates["beta"][t]).apply(memory)
        reads.append((memory @ q[t].unsqueeze(-1)).flatten())
    out, state = layer(x)
    assert_close(state.memory[0], memory)
    assert_close(out[0], layer.o_proj(torch.stack(reads)))


@pytest.mark.parametrize("rule", ["delta", "gated_delta", "longhorn"])
def test_erasing_and_writing_share_a_tensor(rule):
    """ε = η: one number a head is computed, passed twice."""
    layer = FastWeight(6, 2, rule=rule)
    writes = layer._writes(torch.zeros(1, 4, 18).split(layer._parts, dim=-1), layer.gates(torch.zeros(1, 4, 6)), None)
    assert writes.erase is writes.write


def test_a_steps_state_of_other_widths_is_explained():
    x = torch.zeros(1, 8)
    with pytest.raises(ShapeError, match=r"state is \[1, 2, 4, 4\], expected"):
        FastWeight(8, 4).step(x, FastWeight(8, 2).initial(1))


def test_a_feature_object_can_be_shared():
    """Each layer has a copy: what one loads reaches neither the other nor the object that was given."""
    feature = Favor(4, m=6)
    drawn = feature.projection
    one, other = FastWeight(8, 2, feature=feature), FastWeight(8, 2, feature=feature)
    with torch.no_grad():
        one.phi.projection.zero_()
    one(torch.ones(1, 2, 8))
    assert feature.projection is drawn
    assert other.phi.feature.projection.abs().max() > 0
    assert "phi.projection" in one.state_dict()


def test_features_are_drawn_even_where_nothing_can_be():
    """On "meta", where transformers builds what it is about to load, FAVOR+ still follows from its seed."""
    with torch.device("meta"):
        layer = FastWeight(8, 2, feature="favor", normalise="sum")
    assert layer.k_proj.weight.is_meta
    assert torch.equal(layer.phi.projection, Favor(4).projection.float())


class Odd(Rule):
    """A rule with a gate that no layer makes; it has no name, so nobody finds it."""

    gates = {"gamma": 1.0}  # noqa: RUF012
    reads = False

    def _coefficients(self, k, gate):
        return Coefficients(1.0, 0.0, gate.gamma)

    def _objective(self, memory, previous, k, v, gate):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: FastWeight(10, 3), ShapeError, "dim is 10 and heads 3, expected a multiple .* or give key_dim"),
        (lambda: FastWeight(0, 1), InputError, "dim is 0, expected a whole number of 1 or more"),
        (lambda: FastWeight(8, 0), InputError, "heads is 0, expected"),
        (lambda: FastWeight(8, 2, rule="dalta"), UnknownNameError, "did you mean 'delta'"),
        (lambda: FastWeight(8, 2, feature="dpfq"), UnknownNameError, "did you mean 'dpfp'"),
        (lambda: FastWeight(8, 2, feature=Dpfp(5)), ShapeError, "takes inputs 5 wide, expected 4"),
        (lambda: FastWeight(8, 2, normalise="summ"), UnknownNameError, "did you mean 'sum'"),
        (lambda: FastWeight(8, 2, normalise="sum"), InputError, "got feature 'identity', expected one .* never neg"),
        (lambda: FastWeight(8, 2, normalise="attention"), InputError, "choose one of these, or normalise by 'l2'"),
        (lambda: FastWeight(8, 4, key_heads=3), ShapeError, "heads is 4 and key_heads 3, expected .* divide"),
        (lambda: FastWeight(8, 2, conv=0), InputError, "size is 0, expected a whole number of 1 or more"),
    ],
)
def test_bad_layers_are_explained(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_a_gate_that_no_layer_makes_is_explained():
    odd = Odd()
    odd.name = "odd"
    with pytest.raises(InputError, match="rule 'odd' takes a gate 'gamma', a layer makes alpha, beta, dt"):
        FastWeight(8, 2, rule=odd)


def test_a_state_of_other_widths_is_explained():
    x = torch.zeros(1, 2, 8)
    _, state = FastWeight(8, 2)(x)
    with pytest.raises(ShapeError, match=r"state is \[1, 2, 4, 4\], expected"):
        FastWeight(8, 4)(x, state)


@pytest.mark.parametrize(
    ("normalise", "feature", "new", "apart"),
    [
        ("sum", "elu+1", True, True),
        ("l2", "relu", True, True),
        ("plain", "relu", True, True),
        ("l2", "identity", True, False),
        ("plain", "identity", False, False),
    ],
)
def test_what_waits_for_the_gradients(monkeypatch, normalise, feature, new, apart):
    """Values have memory of their own where queries and keys are new. Where a norm keeps what it was given, or nothing
    is new, all three are there anyway, and values are a part of them."""
    given = {}

    def noted(q, k, v, **rest):
        given.update(k=k, v=v)
        return scan(q, k, v, **rest)

    monkeypatch.setattr("rebind.nn.layers.fast_weight.scan", noted)
    FastWeight(16, 2, rule="delta", feature=feature, normalise=normalise)(torch.randn(1, 8, 16))
    k, v = (given[name].untyped_storage() for name in "kv")
    assert (v.nbytes() == given["v"].nbytes) == apart
    assert (k.data_ptr() != v.data_ptr()) == new
