"""`TTTLayer`, `HopfieldLayer`, `Attention` and `CrossFastWeight` against what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rebind.errors import InputError, ShapeError
from rebind.memory import hopfield, ttt
from rebind.memory.features import Dpfp, Favor
from rebind.nn import Attention, CrossFastWeight, FastWeight, HopfieldLayer, TTTLayer
from tests.support import Draw, assert_close

# Test-time training


@pytest.mark.parametrize("inner", [ttt.Linear(), ttt.Mlp(expand=2)], ids=["linear", "mlp"])
@pytest.mark.parametrize("mini_batch", [1, 4, 20])
def test_it_is_the_reference_with_its_gradients(inner, mini_batch):
    """The dual form and the reference, which differentiates the loss, are one: outputs, states, gradients."""
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
        ran = ttt.run(
            model,
            start,
            q[:, :, head],
            k[:, :, head],
            v[:, :, head],
            rate=rate[:, :, head],
            mini_batch=mini_batch,
        )
        reads.append(ran.out)
        for got, expected in zip(state.now, ran.state, strict=True):
            assert_close(got[:, head], expected)
    expected = layer.o_proj(layer.norm(torch.stack(reads, dim=2)).flatten(-2))
    assert_close(out, expected)
    (expected * weights).sum().backward()
    for name, parameter in layer.named_parameters():
        assert_close(gradients[name], parameter.grad, 1e-9)


def test_a_mini_batch_longer_than_the_sequence_costs_no_more(monkeypatch):
    layer, x, sizes = TTTLayer(8, 2, mini_batch=10_000), Draw(2).normal(2, 5, 8).float(), []
    own = layer._run
    monkeypatch.setattr(layer, "_run", lambda *given: sizes.append(given[2].scores.shape[-1]) or own(*given))
    out, state = layer(x)
    assert sizes == [5]
    assert state.filled.tolist() == [5, 5]
    other = TTTLayer(8, 2, mini_batch=5)
    other.load_state_dict(layer.state_dict())
    assert_close(out, other(x)[0], 1e-6)


@pytest.mark.parametrize("inner", [ttt.Linear(), ttt.Mlp(expand=2)], ids=["linear", "mlp"])
def test_autocast_does_not_narrow_the_inner_models_products(inner):
    layer, x = TTTLayer(8, 2, inner=inner, mini_batch=4), Draw(1).normal(2, 11, 8).float()
    with torch.no_grad():
        start, tokens = layer.initial(2), layer._tokens(x)
        expected, end = layer._train(tokens, start, start.filled + 11)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, narrow = layer._train(tokens, start, start.filled + 11)
            stepped = layer.step(x[:, 0], start)[1]
    assert torch.equal(out, expected)
    assert all(torch.equal(one, true) for one, true in zip(narrow.now, end.now, strict=True))
    assert all(one.dtype == torch.float32 for one in stepped.now)


def test_inside_a_mini_batch_gradients_are_taken_at_its_start():
    layer, x = TTTLayer(8, 2, mini_batch=4).double(), Draw(1).normal(1, 6, 8)
    _, state = layer(x)
    _, boundary = layer(x[:, :4])
    assert state.filled.tolist() == [2]
    assert boundary.filled.tolist() == [0]
    assert_close(state.start[0], boundary.now[0])
    assert (state.now[0] - state.start[0]).abs().max() > 0


def test_ttt_state_size_counts_the_inner_model_once():
    assert TTTLayer(8, 2).state_size == 2 * 4 * 4
    assert TTTLayer(8, 2, inner=ttt.Mlp(expand=4)).state_size == 2 * (16 * 4 + 16 + 4 * 16 + 4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mini_batch": 0}, "mini_batch is 0, expected a whole number of 1 or more"),
        ({"rate": 0.0}, "rate is 0.0, expected a positive number"),
        ({"inner": ttt.ResidualNorm(ttt.Linear())}, r"expected ttt.Linear\(\) or ttt.Mlp\(\)"),
    ],
)
def test_bad_ttt_layers_are_explained(options, says):
    with pytest.raises(InputError, match=says):
        TTTLayer(8, 2, **options)


# Hopfield


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_it_retrieves_as_the_modern_network_does(steps):
    layer, x = HopfieldLayer(6, 2, patterns=7, steps=steps, beta=2.0).double(), Draw(2).normal(2, 3, 6)
    with torch.no_grad():
        layer.answers.copy_(layer.patterns)
    queries = layer.q_proj(x).unflatten(-1, (2, 3))
    found = []
    for head in range(2):
        network = hopfield.Modern(layer.patterns[head].detach(), beta=2.0)
        found.append(network.recall(queries[:, :, head], steps=steps).state)
    assert_close(layer(x)[0], layer.o_proj(torch.stack(found, dim=2).flatten(-2)))


def test_one_step_is_an_attention_pass():
    layer, x = HopfieldLayer(6, 2, patterns=7).double(), Draw(3).normal(2, 4, 6)
    q = layer.q_proj(x).unflatten(-1, (2, 3)).transpose(1, 2)
    stored = (pattern.expand(2, -1, -1, -1) for pattern in (layer.patterns, layer.answers))
    read = functional.scaled_dot_product_attention(q, *stored)
    assert_close(layer(x)[0], layer.o_proj(read.transpose(1, 2).flatten(-2)))


def test_a_cold_network_is_explained():
    with pytest.raises(InputError, match=r"beta is -1.0, expected a positive number"):
        HopfieldLayer(6, 2, beta=-1.0)


# Softmax attention


def test_attention_written_out():
    layer, x = Attention(8, 2, rope_theta=None).double(), Draw(4).normal(1, 5, 8)
    q, k, v = (project(x[0]).unflatten(-1, (2, 4)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    scores = torch.einsum("thd,shd->hts", q, k) / 2
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    read = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    assert_close(layer(x)[0][0], layer.o_proj(read.flatten(1)))


def test_rotary_positions_are_relative():
    """The same tokens later in the sequence, with nothing before them to be seen, answer the same."""
    layer, x = Attention(8, 2).double(), Draw(5).normal(1, 6, 8)
    q, k, _ = layer._project(x, torch.tensor([0]), None)
    late_q, late_k, _ = layer._project(x, torch.tensor([1_000]), None)
    assert_close(late_q @ late_k.mT, q @ k.mT, 1e-9)
    assert (late_q - q).abs().max() > 0.1


def test_its_state_grows_and_says_so():
    layer = Attention(8, 4, key_heads=2)
    _, state = layer(torch.zeros(3, 7, 8))
    assert layer.grows
    assert not FastWeight.grows
    assert layer.state_size == 2 * (2 + 2)
    assert state.size == 7 * layer.state_size


def test_an_odd_head_is_explained():
    with pytest.raises(InputError, match="head_dim is 3, expected an even number for rotary positions"):
        Attention(6, 2)


# Cross attention


@pytest.mark.parametrize("feature", ["elu+1", Dpfp(4), Favor(4, m=8)])
def test_cross_attention_written_out(feature):
    layer, draw = CrossFastWeight(8, 2, source_dim=5, feature=feature).double(), Draw(6)
    x, source = draw.normal(2, 3, 8), draw.normal(2, 6, 5)
    phi = layer.phi.feature
    q = phi.up_to_scale(layer.q_proj(x).unflatten(-1, (2, 4)))
    k = phi(layer.k_proj(source).unflatten(-1, (2, 4)))
    v = layer.v_proj(source).unflatten(-1, (2, 4))
    weights = torch.einsum("bthk,bshk->bhts", q, k)
    read = torch.einsum("bhts,bshv->bthv", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    assert_close(layer(x, layer.write(source)), layer.o_proj(read.flatten(-2)))


def test_a_source_is_written_without_its_padding_and_in_any_order():
    layer, draw = CrossFastWeight(8, 2, norm=True).double(), Draw(7)
    x, source = draw.normal(1, 3, 8), draw.normal(1, 6, 8)
    mask = torch.tensor([[True, False, True, True, False, True]])
    expected = layer(x, layer.write(source[mask][None]))
    assert_close(layer(x, layer.write(source, mask)), expected)
    assert_close(layer(x, layer.write(source.flip(1), mask.flip(1))), expected)
    assert_close(layer(x[:, 1:2], layer.write(source, mask)), expected[:, 1:2])


def test_cross_attention_learns_and_explains():
    layer = CrossFastWeight(8, 2, source_dim=5)
    state = layer.write(torch.randn(2, 4, 5))
    assert state.size == layer.state_size + 2 * 4  # and the denominators
    layer(torch.randn(2, 3, 8), state).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())
    with pytest.raises(ShapeError, match=r"source is \[2, 4, 8\], expected \[B, T, 5\]"):
        layer.write(torch.zeros(2, 4, 8))
    with pytest.raises(ShapeError, match="x holds 1 sequences and the state 2"):
        layer(torch.zeros(1, 3, 8), state)
