"""`TTTLayer`, `HopfieldLayer`, `Attention` and the cross layers against what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rebind.errors import ShapeError
from rebind.memory import hopfield, ttt
from rebind.memory.features import Dpfp, Favor
from rebind.nn import Attention, CrossAttention, CrossFastWeight, FastWeight, HopfieldLayer, TTTLayer
from tests.support import Draw, assert_close, raises

# Test-time training


@pytest.mark.parametrize("inner", [ttt.Linear(), ttt.Mlp(expand=2)], ids=["linear", "mlp"])
@pytest.mark.parametrize("mini_batch", [1, 4, 20])
def test_it_is_the_reference_with_its_gradients(inner, mini_batch):
    """The dual form agrees with the reference, which differentiates the loss, in outputs, states and gradients."""
    layer = TTTLayer(8, 2, inner=inner, mini_batch=mini_batch, rate=2.0).double()
    draw = Draw(0)
    with torch.no_grad():
        for parameter in (*layer.initial_weights, layer.norm_weight, layer.norm_bias):
            parameter += 0.3 * draw.normal(*parameter.shape)
    x, weights = draw.normal(2, 11, 8), draw.normal(2, 11, 8)
    out, state = layer(x)
    (out * weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()

    q, k, v = (project(x).unflatten(-1, (2, 4)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    rate = torch.sigmoid(layer.rate_proj(x)) * 2.0 / 4
    reads = []
    for head in range(2):
        model = ttt.ResidualNorm(inner, layer.norm_weight[head], layer.norm_bias[head])
        start = tuple(weight[head] for weight in layer.initial_weights)
        qkv = (tensor[:, :, head] for tensor in (q, k, v))
        trained = ttt.run(model, start, *qkv, rate=rate[:, :, head], mini_batch=mini_batch)
        reads.append(trained.out)
        for weight, expected in zip(state.now, trained.state, strict=True):
            assert_close(weight[:, head], expected)
    expected = layer.o_proj(layer.norm(torch.stack(reads, dim=2)).flatten(-2))
    assert_close(out, expected)
    (expected * weights).sum().backward()
    for name, parameter in layer.named_parameters():
        assert_close(gradients[name], parameter.grad, 1e-9)


def test_a_mini_batch_longer_than_the_sequence_is_cut_to_it():
    """A mini-batch of ten million tokens for five of them fits in memory."""
    layer, x = TTTLayer(8, 2, mini_batch=10_000_000), Draw(2).normal(2, 5, 8).float()
    out, state = layer(x)
    assert state.filled.tolist() == [5, 5]
    assert layer.state_size == 2 * 4 * 4  # the inner model once
    other = TTTLayer(8, 2, mini_batch=5)
    other.load_state_dict(layer.state_dict())
    assert_close(out, other(x)[0], 1e-6)


@pytest.mark.parametrize("inner", [ttt.Linear(), ttt.Mlp(expand=2)], ids=["linear", "mlp"])
def test_autocast_does_not_narrow_the_products_of_the_inner_model(inner):
    """Under autocast only the projections run in bfloat16, which are exact here."""
    layer, x = TTTLayer(8, 2, inner=inner, mini_batch=4), Draw(1).normal(2, 11, 8).float()
    for project in (layer.q_proj, layer.k_proj, layer.v_proj):
        torch.nn.init.eye_(project.weight)
    torch.nn.init.zeros_(layer.rate_proj.weight)
    torch.nn.init.zeros_(layer.rate_proj.bias)
    x = x.bfloat16().float()
    with torch.no_grad():
        _, expected = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, state = layer(x)
            _, stepped = layer.step(x[:, 0], layer.initial_state(2))
    for one, true in zip(state.now, expected.now, strict=True):
        assert_close(one, true, 1e-6)
    assert all(tensor.dtype == torch.float32 for tensor in stepped.now)


def test_inside_a_mini_batch_gradients_are_taken_at_its_start():
    layer, x = TTTLayer(8, 2, mini_batch=4).double(), Draw(1).normal(1, 6, 8)
    _, state = layer(x)
    _, boundary = layer(x[:, :4])
    assert (state.filled.tolist(), boundary.filled.tolist()) == ([2], [0])
    assert_close(state.start[0], boundary.now[0])
    assert (state.now[0] - state.start[0]).abs().max() > 0


# Hopfield


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_it_retrieves_as_the_modern_network_does(steps):
    layer, x = HopfieldLayer(6, 2, patterns=7, steps=steps, beta=2.0).double(), Draw(2).normal(2, 3, 6)
    with torch.no_grad():
        layer.answers.copy_(layer.patterns)
    queries = layer.q_proj(x).unflatten(-1, (2, 3))
    states = []
    for head in range(2):
        network = hopfield.Modern(layer.patterns[head].detach(), beta=2.0)
        states.append(network.recall(queries[:, :, head], steps=steps).state)
    assert_close(layer(x)[0], layer.o_proj(torch.stack(states, dim=2).flatten(-2)))


def test_one_step_is_softmax_attention():
    layer, x = HopfieldLayer(6, 2, patterns=7).double(), Draw(3).normal(2, 4, 6)
    q = layer.q_proj(x).unflatten(-1, (2, 3)).transpose(1, 2)
    stored = (pattern.expand(2, -1, -1, -1) for pattern in (layer.patterns, layer.answers))
    read = functional.scaled_dot_product_attention(q, *stored)
    assert_close(layer(x)[0], layer.o_proj(read.transpose(1, 2).flatten(-2)))


# Softmax attention


def test_attention_written_out():
    layer, x = Attention(8, 2, rotary=None).double(), Draw(4).normal(1, 5, 8)
    q, k, v = (project(x[0]).unflatten(-1, (2, 4)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    scores = torch.einsum("thd,shd->hts", q, k) / 2
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    read = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    assert_close(layer(x)[0][0], layer.o_proj(read.flatten(1)))


def test_rotary_positions_are_relative():
    """Of one token repeated, products of keys depend on their distance alone."""
    layer, x = Attention(8, 2).double(), Draw(5).normal(1, 1, 8).expand(1, 6, 8)
    keys = layer(x)[1].keys[0]
    products = keys @ keys.mT
    assert_close(products[:, 1:, 1:], products[:, :-1, :-1], 1e-9)
    assert (products[:, 0, 1:] - products[:, 0, :1]).abs().min() > 1e-3


def test_the_state_of_attention_grows():
    layer = Attention(8, 4)
    _, state = layer(torch.zeros(3, 7, 8))
    assert layer.grows
    assert not FastWeight.grows
    assert state.size == 7 * layer.state_size == 7 * 2 * 8


# Cross layers


@pytest.mark.parametrize("feature", ["elu+1", Dpfp(4), Favor(4, m=8)])
def test_cross_fast_weights_written_out(feature):
    layer, draw = CrossFastWeight(8, 2, source_dim=5, feature=feature).double(), Draw(6)
    x, source = draw.normal(2, 3, 8), draw.normal(2, 6, 5)
    phi = layer.phi.feature
    q = phi.up_to_scale(layer.q_proj(x).unflatten(-1, (2, 4)))
    k = phi(layer.k_proj(source).unflatten(-1, (2, 4)))
    v = layer.v_proj(source).unflatten(-1, (2, 4))
    weights = torch.einsum("bthk,bshk->bhts", q, k)
    read = torch.einsum("bhts,bshv->bthv", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    assert_close(layer(x, layer.write(source)), layer.o_proj(read.flatten(-2)))


@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention_written_out(masked):
    layer, draw = CrossAttention(8, 2).double(), Draw(3)
    source, x = draw.normal(2, 5, 8), draw.normal(2, 3, 8)
    mask = torch.tensor([[True, True, False, True, False], [True] * 5]) if masked else None
    inputs = (layer.q_proj(x), layer.k_proj(source), layer.v_proj(source))
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in inputs)
    scores = q @ k.mT / 2
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    expected = layer.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    assert_close(layer(x, layer.write(source, mask)), expected, 1e-12)


@pytest.mark.parametrize("cross", [CrossFastWeight, CrossAttention])
def test_a_source_is_written_without_its_padding_and_in_any_order(cross):
    layer, draw = cross(8, 2).double(), Draw(7)
    x, source = draw.normal(1, 3, 8), draw.normal(1, 6, 8)
    mask = torch.tensor([[True, False, True, True, False, True]])
    expected = layer(x, layer.write(source[mask][None]))
    assert_close(layer(x, layer.write(source, mask)), expected)
    assert_close(layer(x, layer.write(source.flip(1), mask.flip(1))), expected)
    assert_close(layer(x[:, 1:2], layer.write(source, mask)), expected[:, 1:2])


@pytest.mark.parametrize("cross", [CrossFastWeight, CrossAttention])
def test_cross_layers_learn_and_refuse_what_does_not_fit(cross):
    layer = cross(8, 2)
    state = layer.write(torch.randn(2, 4, 8))
    denominators = 2 * 4 if cross is CrossFastWeight else 0
    assert state.size == layer.state_size * (4 if layer.grows else 1) + denominators
    layer(torch.randn(2, 3, 8), state).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())
    with raises(ShapeError, "wrong_sequence_shape"):
        layer.write(torch.zeros(2, 4, 5))
    with raises(ShapeError, "state_of_other_batch"):
        layer(torch.zeros(1, 3, 8), state)
