"""Joined products are the products apart, and joined only where that is less work and nobody is passed over."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rebind.nn import FastWeight
from rebind.nn.parts import products
from rebind.nn.parts.mlp import SwiGlu
from rebind.nn.parts.products import joined
from rebind.precision import as_autocast
from tests.nn.layers import LAYERS, made
from tests.support import Draw, assert_close


class Counted(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def three(dim: int = 4) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(dim, width, bias=False).double() for width in (3, 5, 1)]


def apart(x, projections):
    return torch.cat([project(x) for project in projections], dim=-1)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (1, 3, 4), (2, 9, 4)])
def test_it_is_the_products_apart_with_their_gradients(shape):
    projections, x = three(), Draw(0).normal(*shape).requires_grad_()
    weights = Draw(1).normal(*shape[:-1], 9)
    leaves = [x, *(project.weight for project in projections)]
    expected = apart(x, projections)
    slopes = torch.autograd.grad((expected * weights).sum(), leaves)
    out = joined(x, *projections)
    assert_close(out, expected, 1e-14)
    for got, slope in zip(torch.autograd.grad((out * weights).sum(), leaves), slopes, strict=True):
        assert_close(got, slope, 1e-14)


@pytest.mark.parametrize(("tokens", "dispatched"), [(4, 1), (3, 3)])
def test_weights_are_joined_where_there_are_tokens_for_it(tokens, dispatched):
    """On a CPU copying the weights for a few tokens would cost as much as the products do."""
    projections, x = three(), torch.zeros(tokens, 4, dtype=torch.float64)
    with Counted() as counted:
        joined(x, *projections)
    assert counted.counts["mm"] == dispatched


def biased(project):
    project.bias = nn.Parameter(Draw(2).normal(project.out_features))


def hooked(project):
    project.register_forward_hook(lambda module, given, out: 2 * out)


def prepared(project):
    project.register_forward_pre_hook(lambda module, given: (3 * given[0],))


def bounded(project):
    nn.utils.parametrizations.orthogonal(project)


def replaced(project):
    """As tools do that move a weight in before it is used."""
    before = project.forward
    project.forward = lambda given: 2 * before(given)


CHANGES = [biased, hooked, prepared, bounded, replaced]


@pytest.mark.parametrize("change", CHANGES)
def test_a_projection_that_is_more_than_a_matrix_is_called(change):
    projections, x = three(), Draw(3).normal(9, 4)
    plain = joined(x, *projections)
    change(projections[1])
    out = joined(x, *projections)
    assert_close(out, apart(x, projections), 1e-14)
    assert (out - plain).abs().max() > 0.01


@pytest.mark.parametrize("change", CHANGES)
def test_mlps_and_gated_reads_call_it_too(change):
    mlp, x = SwiGlu(4, 8).double(), Draw(5).normal(9, 4)
    before = mlp(x)
    change(mlp.down_proj)
    assert_close(mlp(x), mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)), 1e-14)
    assert (mlp(x) - before).abs().max() > 0.01
    layer, x = FastWeight(4, 2, rule="delta", gate=True).double(), Draw(6).normal(1, 9, 4)
    before, _ = layer(x)
    seen = []
    layer.norm.register_forward_hook(lambda module, given, out: seen.append(out))
    change(layer.o_proj)
    out, _ = layer(x)
    gate = nn.functional.silu(layer.g_proj(x))
    assert_close(out, layer.o_proj(seen[0].flatten(-2) * gate), 1e-12)
    assert (out - before).abs().max() > 1e-3


@pytest.mark.parametrize("hook", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_whoever_watches_all_modules_sees_every_projection(hook):
    seen, mlp, x = [], SwiGlu(4, 8), torch.randn(3, 4, requires_grad=True)
    register = getattr(nn.modules.module, f"register_module_{hook}_hook")
    handle = register(lambda module, *given: seen.append(module) and None)
    try:
        mlp(x).sum().backward()
    finally:
        handle.remove()
    assert mlp.down_proj in seen


def test_an_input_enters_autocast_once():
    x = Draw(4).normal(6, 4).float()
    assert as_autocast(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert as_autocast(x).dtype == torch.bfloat16
        assert as_autocast(x.double()).dtype == torch.float64
        mlp = SwiGlu(4, 8)
        expected = mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        assert torch.equal(mlp(x), expected)


FAST = [name for name in LAYERS if hasattr(made(name), "phi")]


@pytest.mark.parametrize("name", FAST)
def test_steps_with_joined_weights_are_steps_without(name, monkeypatch):
    """What a GPU does for one token."""
    layer, x = made(name), Draw(5).normal(3, 12)
    expected, end = layer.step(x, layer.initial(3))
    monkeypatch.setattr(products, "_worth_joining", lambda x, weights: True)
    with Counted() as counted:
        out, state = layer.step(x, layer.initial(3))
    own = (1 if layer.phi.normalise.paired else 2) if "favor" in str(layer.phi).lower() else 0  # FAVOR+'s projections
    assert counted.counts["mm"] == 2 + own
    assert_close(out, expected, 1e-12)
    assert_close(state.memory, end.memory, 1e-12)
