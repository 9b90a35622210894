"""Gradients of every order, and torch.compile."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError, ShapeError
from rebind.ops import dispatch, scan, scan_rule
from rebind.ops.inputs import ScanInputs
from tests.ops.problems import CHANNELS, COEFFICIENTS, compare, outcome, problem
from tests.support import Draw, assert_close, raises

ORDER = ("q", "k", "v", "log_decay", "erase", "write", "probe", "state")


def as_function(case, backend):
    """The scan as a function of its tensors, and those tensors."""
    names = [name for name in ORDER if name in case.tensors]

    def call(*tensors):
        named = dict(zip(names, tensors, strict=True))
        return scan(named.pop("q"), named.pop("k"), named.pop("v"), **named, **case.options, backend=backend)

    return call, [case.tensors[name].clone().requires_grad_() for name in names]


SMALL = {
    "gated": problem(5, 2, 3, batch=1, heads=2, chunk=2),
    "shared": problem(4, 2, 2, batch=1, heads=2, key_heads=1, chunk=3),
    "sum": problem(5, 2, 3, batch=1, heads=1, coefficients=(), state=False, chunk=2),
    "packed": problem(d_k=2, d_v=2, heads=1, lengths=(3, 0, 2), chunk=2),
    "channels": problem(5, 2, 3, batch=1, heads=1, coefficients=CHANNELS, chunk=4),
    "mini-batch": problem(5, 2, 2, batch=1, heads=1, coefficients=("erase", "write"), mini_batch=2),
}


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", SMALL)
def test_gradcheck(backend, name):
    call, tensors = as_function(SMALL[name], backend)
    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", SMALL)
def test_gradgradcheck(backend, name):
    call, tensors = as_function(SMALL[name], backend)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["erase is write", "q is k", "the probe depends on k"])
def test_tensors_that_are_not_independent(name, create_graph):
    """Each place of a tensor has its own part of the gradient, also where that can be differentiated again."""
    t = problem(20, state=False).tensors

    def gradients(backend):
        k, rate = t["k"].clone().requires_grad_(), t["erase"].clone().requires_grad_()
        options = {
            "erase is write": {"q": t["q"], "erase": rate, "write": rate},
            "q is k": {"q": k, "erase": rate},
            "the probe depends on k": {"q": t["q"], "erase": rate, "probe": k.roll(1, -1)},
        }[name]
        out, _ = scan(**options, k=k, v=t["v"], log_decay=t["log_decay"], backend=backend)
        first = torch.autograd.grad(out.sin().sum(), (k, rate), create_graph=create_graph)
        if not create_graph:
            return first
        return *first, *torch.autograd.grad(sum(x.square().sum() for x in first), (k, rate))

    for got, expected in zip(gradients("chunked"), gradients("reference"), strict=True):
        assert_close(got, expected, 1e-11)


@pytest.mark.parametrize(
    "wanted", [["q"], ["k"], ["v"], ["log_decay"], ["erase"], ["write"], ["state"], ["q", "write"]]
)
def test_gradients_of_some(wanted):
    """What is not asked for is neither returned nor in the way; second derivatives too."""
    case = problem(9)

    def second(backend):
        tensors = {name: x.clone().requires_grad_(name in wanted) for name, x in case.tensors.items()}
        named = dict(tensors)
        out, final = scan(named.pop("q"), named.pop("k"), named.pop("v"), **named, backend=backend)
        leaves = [tensors[name] for name in wanted]
        first = torch.autograd.grad(out.square().sum() + final.square().sum(), leaves, create_graph=True)
        again = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
        return dict(enumerate([*first, *again]))

    compare(second("chunked"), second("reference"), 1e-10)


def test_no_graph_where_none_is_wanted():
    case = problem(9)
    q, k, v = (case.tensors[name] for name in "qkv")
    assert not scan(q, k, v)[0].requires_grad
    with torch.no_grad():
        assert not scan(q.clone().requires_grad_(), k, v)[0].requires_grad


def test_autocast_leaves_the_sums_alone():
    case = problem(130).to(torch.float32)
    plain = outcome(case, "chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(outcome(case, "chunked"), plain, 0.0)
        got = outcome(case, "reference")
    for name in ("out", "final"):  # its gradients are plain torch's, which autocast gets at
        assert_close(got[name], plain[name], 1e-4)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


class TestCompile:
    @pytest.mark.parametrize(
        "case",
        [
            problem(40, chunk=16),
            problem(40, coefficients=(), state=False),
            problem(40, coefficients=CHANNELS),
            problem(lengths=(7, 0, 33)),
            problem(40, coefficients=("erase",), mini_batch=8),
        ],
        ids=["gated", "sum", "channels", "packed", "mini-batch"],
    )
    def test_same_results_and_gradients(self, case):
        self.check(case, "auto")

    def test_the_reference_is_traced_through(self):
        self.check(problem(3), "reference")

    def check(self, case, backend):
        call, tensors = as_function(case, backend)
        out, final = compiled(call)(*tensors)
        got = torch.autograd.grad(out.sin().sum() + final.cos().sum(), tensors)
        out_eager, final_eager = call(*tensors)
        expected = torch.autograd.grad(out_eager.sin().sum() + final_eager.cos().sum(), tensors)
        for a, b in zip((out, final, *got), (out_eager, final_eager, *expected), strict=True):
            assert_close(a, b, 1e-12)

    def test_dynamic_lengths(self):
        call = compiled(lambda q, k, v, beta: scan(q, k, v, erase=beta, write=beta)[0], dynamic=True)
        for length in (70, 33, 100):
            t = problem(length).tensors
            arguments = [t[name].requires_grad_() for name in ("q", "k", "v", "erase")]
            got = call(*arguments)
            expected = scan(*arguments[:3], erase=arguments[3], write=arguments[3])[0]
            assert_close(got, expected, 1e-12)
            got.sum().backward()

    @pytest.mark.parametrize("rule", ["gated_delta", "longhorn", "rfa", "sum"])
    def test_rules(self, rule):
        t = problem(20).tensors
        gates = {"gated_delta": {"alpha": 0.9, "beta": t["erase"]}, "sum": {}}.get(rule, {"beta": t["erase"]})
        call = lambda q, k, v: scan_rule(rule, q, k, v, normalize=rule == "sum", **gates)[0]
        assert_close(compiled(call)(t["q"], t["k"], t["v"]), call(t["q"], t["k"], t["v"]), 1e-12)

    def test_bad_input_is_still_refused(self):
        t = problem(20).tensors
        torch._dynamo.reset()
        with raises(ShapeError, "sequences_do_not_match"):
            torch.compile(lambda q, k, v: scan(q, k, v)[0], backend="aot_eager")(t["q"], t["k"][:, 1:], t["v"])


@pytest.mark.parametrize("coefficients", [COEFFICIENTS, (), CHANNELS], ids=["gated", "sum", "channels"])
def test_registered_operators_keep_torchs_rules(coefficients):
    """Schema, fake kernel, autograd registration, tracing: torch's own checks of a custom operator."""
    case = problem(20, coefficients=coefficients, state=bool(coefficients))
    tensors = [case.tensors.get(name) for name in ORDER]
    leaves = [None if x is None else x.clone().requires_grad_() for x in tensors]
    rest = (None, None, None, False, True, "chunked")
    torch.library.opcheck(torch.ops.rebind.scan.default, (*leaves, *rest))
    inputs = ScanInputs(*tensors, keep=True)
    saved = torch.ops.rebind.scan(*tensors, *rest)[2:]
    draw = Draw(1)
    d_out, d_final = draw.normal(*inputs.v.shape), draw.normal(*inputs.state_shape)
    torch.library.opcheck(
        torch.ops.rebind.scan_backward.default,
        (saved, d_out, d_final, *tensors, *rest),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_unknown_backend_under_compile():
    t = problem(5).tensors
    with pytest.raises((InputError, torch._dynamo.exc.TorchRuntimeError), match="Unknown backend"):
        compiled(lambda q, k, v: scan(q, k, v, backend="cuda")[0])(t["q"], t["k"], t["v"])


class Recorder:
    """A backend that does nothing, and remembers what it was given."""

    name = "chunked"

    def refuses(self, inputs):
        return None

    def forward(self, inputs):
        self.keep = inputs.keep
        return torch.zeros_like(inputs.v), torch.zeros(inputs.state_shape), []

    def backward(self, inputs, saved, d_out, d_final):
        self.slopes = d_out, d_final
        return tuple(None if x is None else torch.zeros_like(x) for x in inputs.tensors)


def test_what_a_backend_is_promised(monkeypatch):
    """Contiguous cotangents, None for a final state that nobody used, coefficients contiguous, the state wide."""
    backend = Recorder()
    monkeypatch.setattr(dispatch, "CHUNKED", backend)
    t = problem(8).to(torch.float32).tensors
    q, k, v = (t[name] for name in "qkv")
    scan(q, k, v)
    assert backend.keep is False
    out, final = scan(q.clone().requires_grad_(), k, v)
    assert backend.keep is True
    (out.transpose(1, 2) * torch.ones(3, 8, 1)).sum().backward(retain_graph=True)
    d_out, d_final = backend.slopes
    assert d_out.is_contiguous()
    assert d_final is None
    final.mT.sum().backward()
    d_out, d_final = backend.slopes
    assert (d_out == 0).all()
    assert d_final.is_contiguous()
    turned = t["erase"].mT.contiguous().mT, t["state"].half().mT.contiguous().mT
    inputs = ScanInputs(q, k, v, erase=turned[0], state=turned[1]).checked()
    assert inputs.erase.is_contiguous()
    assert inputs.state.is_contiguous()
    assert inputs.state.dtype == torch.float32
