"""The layer of MesaNet: its reads are those of a closed form."""

from __future__ import annotations

import torch

from rebind.errors import InputError
from rebind.memory import Write, ridge
from rebind.nn import MesaLayer
from rebind.nn.parts.dense import project_jointly
from tests.support import Draw, assert_close, raises


def bare_layer() -> MesaLayer:
    """Return a layer of one head of width 5 whose output is what it read."""
    torch.manual_seed(0)
    layer = MesaLayer(5, 1, iterations=15, norm_eps=None).double()
    with torch.no_grad():
        layer.o_proj.weight.copy_(torch.eye(5))
        layer.raw_ridge.normal_()
    return layer


def test_a_read_is_the_ridge_write_of_all_pairs():
    """A pair counts β, times the decays since: `ridge` with C = Λ, keys and values times the root of that."""
    layer, x = bare_layer(), Draw(1).normal(1, 23, 5)
    out, _ = layer(x)
    q, k = layer.phi.query(layer.q_proj(x)[0]), layer.phi.key(layer.k_proj(x)[0])
    v = layer.v_proj(x)[0]
    gates, log_decay = layer.gates(project_jointly(x, *layer.gates.projections))
    for length in (1, 4, 23):
        since = log_decay[0, :length].flip(0).cumsum(0).flip(0) - log_decay[0, :length]
        root = (gates["beta"][0, :length] * since.exp()).sqrt()  # [length, 1]
        K, V = root * k[:length], root * v[:length]
        memory = Write(K, V, ridge(K, torch.diag(layer.ridge[0]), 1.0)).apply(torch.zeros(5, 5).double())
        assert_close(out[0, length - 1], memory @ q[length - 1], 1e-11)


def test_gradients_of_every_parameter():
    layer, x = bare_layer(), Draw(2).normal(1, 6, 5)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(*parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, values, atol=1e-7)


def test_the_ridge_starts_at_one_and_stays_above_its_bound():
    layer = MesaLayer(8, 2)
    assert_close(layer.ridge, torch.ones(2, 4), 1e-6)
    layer.raw_ridge.data.fill_(-50.0)
    assert bool((layer.ridge == 0.25).all())


def test_what_is_refused():
    with raises(InputError, "mesa_with_denominator"):
        MesaLayer(8, 2, feature="elu+1", normalizer="attention")
    with raises(InputError, "invalid_size"):
        MesaLayer(8, 2, iterations=0)
