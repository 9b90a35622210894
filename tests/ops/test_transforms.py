"""torch.func, forward mode, batched and second gradients, on the default backend."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

from rebind.nn import FastWeight
from rebind.ops import scan
from rebind.ops.chunked.plain import chunk_form
from rebind.ops.inputs import ScanInputs
from tests.ops.problems import CHANNELS, COEFFICIENTS, compare, problem
from tests.support import Draw, assert_close

FORMS = pytest.mark.parametrize("coefficients", [COEFFICIENTS, CHANNELS, ()], ids=["gated", "channels", "sum"])
BEFORE = pytest.mark.parametrize("before", [False, True], ids=["after", "before"])


def draw(coefficients, **options):
    case = problem(37, batch=2, heads=2, coefficients=coefficients, state=False, **options)
    return case.tensors


def loss(tensors, backend="auto"):
    out, final = scan(**tensors, backend=backend)
    return out.sin().sum() + final.cos().sum()


def plain_gradients(tensors):
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves, "reference"), list(leaves.values())), strict=True))


@FORMS
@BEFORE
@pytest.mark.parametrize("lengths", [None, (0, 7, 30)], ids=["rows", "packed"])
def test_the_plain_form_is_the_recurrence(coefficients, lengths, before):
    case = problem(37, coefficients=coefficients, lengths=lengths, probe_before_decay=before)
    if "log_decay" in case.tensors:
        case.tensors["log_decay"][:, 5] = float("-inf")
    out, final = chunk_form(ScanInputs(**case.tensors, **case.options).checked())
    expected = scan(**case.tensors, **case.options, backend="reference")
    compare({"out": out, "final": final}, dict(zip(("out", "final"), expected, strict=True)), 1e-12)


@FORMS
def test_grad(coefficients):
    tensors = draw(coefficients)
    compare(grad(loss)(tensors), plain_gradients(tensors), 1e-10)


@FORMS
def test_vmap_and_per_sample_gradients(coefficients):
    tensors = draw(coefficients)
    samples = {name: x.unsqueeze(1) for name, x in tensors.items()}  # each a batch of one
    got = vmap(grad(loss))(samples)
    for sample in range(2):
        expected = plain_gradients({name: x[sample] for name, x in samples.items()})
        compare({name: x[sample] for name, x in got.items()}, expected, 1e-10)
    out, final = vmap(lambda t: scan(**t))(samples)
    whole = scan(**tensors)
    assert_close(out.squeeze(1), whole[0], 1e-12)
    assert_close(final.squeeze(1), whole[1], 1e-12)


@FORMS
def test_jvp_is_the_transposed_vjp(coefficients):
    """⟨s, J t⟩ = ⟨Jᵀ s, t⟩, and forward-mode AD outside of torch.func gives the same."""
    tensors, draws = draw(coefficients), Draw(3)
    tangents = {name: draws.normal(*x.shape) for name, x in tensors.items()}
    out, pushed = jvp(lambda t: scan(**t)[0], (tensors,), (tangents,))
    slope = draws.normal(*out.shape)
    (pulled,) = vjp(lambda t: scan(**t)[0], tensors)[1](slope)
    inner = sum((pulled[name] * tangents[name]).sum() for name in tensors)
    assert_close((slope * pushed).sum(), inner, 1e-10)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(x, tangents[name]) for name, x in tensors.items()}
        assert_close(forward_ad.unpack_dual(scan(**duals)[0]).tangent, pushed, 1e-10)


@FORMS
def test_jacobians(coefficients):
    tensors = {name: x[:1, :5, :1] for name, x in draw(coefficients).items()}
    others = {name: x for name, x in tensors.items() if name != "v"}
    run = lambda v: scan(v=v, **others)[0]
    reverse, forward = jacrev(run)(tensors["v"]), jacfwd(run)(tensors["v"])
    assert_close(reverse, forward, 1e-12)
    assert_close(torch.autograd.functional.jacobian(run, tensors["v"], vectorize=True), forward, 1e-12)
    assert_close(torch.autograd.functional.jacobian(run, tensors["v"]), forward, 1e-12)


@FORMS
def test_batched_gradients(coefficients):
    tensors = {name: x.clone().requires_grad_() for name, x in draw(coefficients).items()}
    out, final = scan(**tensors)
    slopes = Draw(5).normal(3, *out.shape), Draw(6).normal(3, *final.shape)
    leaves = list(tensors.values())
    batched = torch.autograd.grad((out, final), leaves, slopes, is_grads_batched=True, retain_graph=True)
    for index in range(3):
        one = torch.autograd.grad((out, final), leaves, [x[index] for x in slopes], retain_graph=True)
        compare(dict(enumerate(x[index] for x in batched)), dict(enumerate(one)), 1e-10)


def test_per_sample_gradients_of_a_layer():
    torch.manual_seed(0)
    layer = FastWeight(8, 2, rule="gated_delta").double()
    x = Draw(7).normal(3, 9, 8)
    parameters = dict(layer.named_parameters())

    def loss_of(parameters, sample):
        return functional_call(layer, parameters, (sample.unsqueeze(0),))[0].square().sum()

    got = vmap(grad(loss_of), (None, 0))(parameters, x)
    for index in range(3):
        value = layer(x[index : index + 1])[0].square().sum()
        expected = torch.autograd.grad(value, list(parameters.values()))
        compare({name: x[index] for name, x in got.items()}, dict(zip(parameters, expected, strict=True)), 1e-10)
