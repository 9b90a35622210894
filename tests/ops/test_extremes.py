"""Where recurrences usually break: no decay and all of it, full erasure, reflections, tiny and huge keys, long T."""

from __future__ import annotations

import math

import pytest
import torch

from rebind.memory import get_rule, rule_names
from rebind.ops import scan, scan_rule
from tests.ops.problems import CHANNELS, COEFFICIENTS, compare, outcome, problem, tolerance_of
from tests.support import Draw, assert_close

EXACT = tolerance_of(torch.float64)
SINGLE = tolerance_of(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("erase", [1.0, 2.0])  # a projection, a reflection
@pytest.mark.parametrize("log_decay", [0.0, float("-inf"), -1e-8, -50.0, -1e4])
def test_constants(dtype, erase, log_decay):
    case = problem(150)
    shape = case.tensors["erase"].shape
    case = case.change(erase=torch.full(shape, erase).double(), log_decay=torch.full(shape, log_decay).double()).to(
        dtype
    )
    compare(outcome(case, "chunked"), outcome(case.double(), "reference"), tolerance_of(dtype))


def test_products_of_decays_that_underflow():
    """Half of the tokens keep e⁻⁸⁰: over a chunk e⁻²⁵⁶⁰. What comes after them keeps every digit."""
    case = problem(128, chunk=64).to(torch.float32)
    log_decay = case.tensors["log_decay"].clone()
    log_decay[:, ::2] = -80.0
    log_decay[:, 64 + 32 :] *= 1e-3
    log_decay[:, 64 + 32 :: 2] = -1e-4
    case = case.change(log_decay=log_decay)
    compare(outcome(case, "chunked"), outcome(case.double(), "reference"), SINGLE)


def test_decays_of_very_different_sizes():
    case = problem(128, chunk=64, coefficients=("log_decay",)).to(torch.float32)
    log_decay = -(10.0 ** Draw(1).uniform(2, 128, 3).mul(9).sub(7)).float()  # −1e-7 to −1e2
    case = case.change(log_decay=log_decay)
    compare(outcome(case, "chunked"), outcome(case.double(), "reference"), SINGLE)


@pytest.mark.parametrize("coefficients", [COEFFICIENTS, CHANNELS], ids=["token", "channel"])
@pytest.mark.parametrize("decay", [0.5, 1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_the_gradient_of_a_strong_decay_keeps_its_digits(coefficients, decay, before):
    """In float32, relative to the gradient itself and not to others: it is of the size of the decay."""
    case = problem(100, 16, 16, coefficients=coefficients, probe_before_decay=before).to(torch.float32)
    log_decay = case.tensors["log_decay"]
    case = case.change(log_decay=math.log(decay) * (0.5 + Draw(2).uniform(*log_decay.shape)).float())
    got, exact = (outcome(c, b)["d_log_decay"].double() for c, b in ((case, "chunked"), (case.double(), "reference")))
    assert float((got - exact).norm() / exact.norm()) < 1e-6
    assert float(((got - exact).abs() / exact.abs()).quantile(0.9)) < 1e-5


@pytest.mark.parametrize("rule", [name for name in rule_names() if get_rule(name).decay and not get_rule(name).several])
def test_every_rule_keeps_them(rule):
    draw, alpha = Draw(3), torch.full((1, 70, 2), 0.9)
    alpha[:, ::5] = 1e-6
    q, k, v = draw.unit(1, 70, 2, 8).float(), draw.unit(1, 70, 2, 8).float(), draw.normal(1, 70, 2, 8).float()
    slope = draw.normal(1, 70, 2, 8)

    def gradient(dtype, backend):
        gate = alpha.to(dtype).requires_grad_()
        out, _ = scan_rule(rule, *(x.to(dtype) for x in (q, k, v)), alpha=gate, backend=backend)
        return torch.autograd.grad((out * slope).sum(), gate)[0][:, ::5].double()

    exact = gradient(torch.float64, "reference")
    assert float((gradient(torch.float32, "chunked") - exact).norm() / exact.norm()) < 1e-5


def test_a_decay_that_changes_from_channel_to_channel_does_not_overflow():
    """KDA's gates reach ln d = −5: over a chunk of 64 tokens the inverse of their product is e^320."""
    case = problem(128, 16, 16, coefficients=CHANNELS, chunk=64).to(torch.float32)
    log_decay = -(10.0 ** Draw(1).uniform(2, 128, 3, 16).mul(9).sub(6)).float()  # −1e-6 to −1e3
    log_decay[..., 0] = -5.0
    case = case.change(log_decay=log_decay)
    compare(outcome(case, "chunked"), outcome(case.double(), "reference"), SINGLE)


@pytest.mark.parametrize("norm", [1e-6, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_longhorn_stays_bounded(norm, dtype, backend):
    """What it answers at a key stays within reach of the values whatever the key's norm; the delta rule explodes."""
    t = problem(300, coefficients=(), state=False).to(dtype).tensors
    keys, values = norm * t["k"], t["v"]
    out, _ = scan_rule("longhorn", keys, keys, values, beta=1.0, backend=backend)
    exact, _ = scan_rule("longhorn", keys.double(), keys.double(), values.double(), beta=1.0, backend="reference")
    scale = float(exact.abs().max())
    assert_close(out / scale, exact / scale, tolerance_of(dtype))
    assert scale < 2 * float(values.abs().max())
    if norm > 1:
        wild, _ = scan_rule("delta", keys, keys, values, beta=1.0, backend=backend)
        assert not wild.abs().max() < 1e6


def test_a_long_sequence_does_not_drift():
    """T = 65536 in float32: the error at the end is no larger than at the start, and within the tolerance."""
    length = 65536
    case = problem(length, 16, 16, batch=1, heads=1, state=False)
    case = case.change(log_decay=0.01 * case.tensors["log_decay"]).to(torch.float32)

    def run(case):
        t = case.tensors
        return scan(t["q"], t["k"], t["v"], log_decay=t["log_decay"], erase=t["erase"], write=t["write"])

    out, final = run(case)
    exact, exactly = run(case.double())
    assert_close(out, exact, SINGLE)
    assert_close(final, exactly, SINGLE)
    error = (out.double() - exact).square().mean((0, 2, 3)).sqrt()
    assert float(error[-length // 8 :].mean()) < 2 * float(error[: length // 8].mean())


def test_a_long_sequence_against_the_recurrence():
    case = problem(8192, 3, 2, batch=1, heads=1)
    with torch.no_grad():
        t = dict(case.tensors)
        arguments = [t.pop(name) for name in "qkv"]
        for got, expected in zip(
            scan(*arguments, **t, backend="chunked"), scan(*arguments, **t, backend="reference"), strict=True
        ):
            assert_close(got, expected, EXACT)


def test_memory_is_linear_in_time():
    """What a graph keeps grows with T and not with T²: one state, T and U per chunk beside the inputs."""

    def kept(length):
        t = problem(length, 8, 8, batch=1, heads=1, state=False).tensors
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.numel()) or x, lambda x: x):
            scan(t["q"].requires_grad_(), t["k"], t["v"], log_decay=t["log_decay"], erase=t["erase"])
        return sum(held)

    assert kept(4096) < 2.01 * kept(2048)
    tokens = 2048 * (3 * 8 + 2 + 32 + 8 + 8 * 8 / 32)  # inputs, T, U, one state per chunk of 32
    assert kept(2048) <= tokens + 200
