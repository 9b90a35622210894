"""The contract of a fast rule. Every registered rule is held to it; a new one is picked up by itself."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from rebind import chain
from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.memory import Coefficients, Rule, get_rule, rule_names
from tests.support import BATCHES, Draw, assert_close, assert_errors, raises, recurrence

RULES = [
    name for name in rule_names() if not get_rule(name).several
]  # those of several writes: tests/ops/test_rules.py


def gates_of(rule: Rule, draw: Draw, *batch: int) -> dict[str, torch.Tensor]:
    return {name: draw.uniform(*batch) for name in rule.gates}


def objective(rule: Rule, memory, previous, k, v, **gates) -> torch.Tensor:
    """What the step from S′ to S minimizes: ‖S − S~‖² − 2η ⟨S u, v⟩ + 2ε ⟨S e, S~p⟩ with S~ = S′ diag(d).

    A probe that reads before the decay has S′p in place of S~p. Longhorn, which reads the memory after the step,
    minimizes ‖S − S′‖² + β‖S k − v‖².
    """
    read = lambda matrix, key=k: (matrix @ key.unsqueeze(-1)).squeeze(-1)
    if rule.name == "longhorn":
        return (memory - previous).square().sum((-2, -1)) + gates["beta"] * (read(memory) - v).square().sum(-1)
    c = rule.coefficients(k, **gates)
    retained, key, error, erase_key = parts(rule, c, previous, k)
    gained = (read(memory, key) * c.value * v).sum(-1)
    lost = (read(memory, erase_key) * error).sum(-1)
    return (memory - retained).square().sum((-2, -1)) - 2 * c.write * gained + 2 * c.erase * lost


def parts(rule: Rule, c: Coefficients, memory, k):
    """W~, u, what p reads, and e."""
    decay = torch.as_tensor(c.decay)
    decay = decay.unsqueeze(-2) if rule.decays_by_channel(c.decay, k) else decay[..., None, None]
    key = k if c.key is None else c.key
    retained, probe = decay * memory, k if c.probe is None else c.probe
    reads = ((memory if c.probe_before_decay else retained) @ probe.unsqueeze(-1)).squeeze(-1)
    return retained, key, reads, key if c.erase_key is None else c.erase_key


def test_the_table_is_complete():
    older = {"sum", "rfa", "mamba2", "delta", "longhorn", "gated_delta"}
    newer = {"gla", "kda", "gdn2", "comba", "preconditioned", "rwkv7"}
    assert set(rule_names()) == older | newer | {"delta_product", "gated_delta_product"}


@pytest.mark.parametrize("name", RULES)
class TestContract:
    def test_write_is_the_recurrence(self, name):
        rule, draw = get_rule(name), Draw(1)
        W, k, v = draw.normal(4, 6), draw.normal(6), draw.normal(4)
        gates = gates_of(rule, draw)
        c = rule.coefficients(k, **gates)
        assert isinstance(c, Coefficients)
        retained, key, reads, erase_key = parts(rule, c, W, k)
        expected = retained + c.write * torch.outer(c.value * v, key) - c.erase * torch.outer(reads, erase_key)
        assert_close(rule.write(k, v, **gates).apply(W), expected)
        if c.key is c.probe is c.erase_key is None:
            assert_close(expected, recurrence(W, k, v, c.decay, c.erase, c.write))

    @pytest.mark.parametrize("batch", BATCHES)
    def test_step_is_the_stationary_point_of_the_objective(self, name, batch):
        rule, draw = get_rule(name), Draw(2)
        previous, k, v = draw.normal(*batch, 4, 6), draw.normal(*batch, 6), draw.normal(*batch, 4)
        gates = gates_of(rule, draw, *batch)
        step = rule.write(k, v, **gates).apply(previous).requires_grad_()
        value = objective(rule, step, previous, k, v, **gates)
        assert value.shape == batch
        (slope,) = torch.autograd.grad(value.sum(), step)
        assert_close(slope, torch.zeros_like(slope))
        for _ in range(5):
            elsewhere = step + 0.1 * draw.normal(*batch, 4, 6)
            assert (objective(rule, elsewhere, previous, k, v, **gates) > value).all(), "a minimum, not only stationary"

    def test_gates_have_defaults(self, name):
        rule, draw = get_rule(name), Draw(3)
        k, v, W = draw.normal(6), draw.normal(4), draw.normal(4, 6)
        named = rule.write(k, v, **rule.gates).apply(W)
        assert_close(rule.write(k, v).apply(W), named, 0.0)

    def test_constant_and_tensor_gates_agree(self, name):
        rule, draw = get_rule(name), Draw(4)
        k, v, W = draw.normal(5, 6), draw.normal(5, 4), draw.normal(5, 4, 6)
        constant = dict.fromkeys(rule.gates, 0.3)
        tensors = {gate: torch.full((5,), 0.3, dtype=W.dtype) for gate in rule.gates}
        assert_close(rule.write(k, v, **constant).apply(W), rule.write(k, v, **tensors).apply(W))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_dtypes(self, name, dtype):
        rule, exact = get_rule(name), Draw(5)
        k, v, W = (t.to(dtype) for t in (exact.unit(9, 60), exact.normal(9, 40), exact.normal(40, 60)))
        g = {name: gate.to(dtype) for name, gate in gates_of(rule, exact, 9).items()}
        g64 = {name: gate.double() for name, gate in g.items()}
        once = 2 * torch.finfo(dtype).eps
        written, exactly = rule.write(k, v, **g), rule.write(k.double(), v.double(), **g64)
        assert written.gain.dtype == dtype
        assert_close(written.gain, exactly.gain, once)
        got = chain(written).apply(W)
        assert got.dtype == dtype
        assert_close(got, chain(exactly).apply(W.double()), 16 * torch.finfo(dtype).eps)

    def test_vmap(self, name):
        rule, draw = get_rule(name), Draw(6)
        k, v, W, gates = draw.normal(5, 6), draw.normal(5, 4), draw.normal(5, 4, 6), gates_of(rule, draw, 5)
        got = torch.vmap(lambda k, v, W, gates: rule.write(k, v, **gates).apply(W))(k, v, W, gates)
        assert_close(got, rule.write(k, v, **gates).apply(W))

    def test_gradients(self, name):
        rule, draw = get_rule(name), Draw(7)
        k, v, W = (draw.normal(*shape).requires_grad_() for shape in ((3, 4), (3, 2), (2, 4)))
        gates = [(0.1 + 0.8 * draw.uniform(3)).requires_grad_() for _ in rule.gates]

        def stepped(k, v, W, *gates):
            return chain(rule.write(k, v, **dict(zip(rule.gates, gates, strict=True))), chunk=2).apply(W)

        assert torch.autograd.gradcheck(stepped, (k, v, W, *gates))
        assert torch.autograd.gradgradcheck(stepped, (k, v, W, *gates))

    def test_bad_input(self, name):
        rule, draw = get_rule(name), Draw(8)
        k, v = draw.normal(6), draw.normal(4)
        assert_errors(
            (InputError, "unknown_gate", lambda: rule.write(k, v, bogus=0.5)),
            (InputError, "not_finite", lambda: rule.write(k * float("nan"), v)),
        )
        for gate in rule.gates:
            with nullcontext() if gate in rule.signed else raises(InputError, "gate_out_of_range"):
                rule.write(k, v, **{gate: -1e-6})
            with raises(InputError, "not_finite"):
                rule.write(k, v, **{gate: float("nan")})
            with raises(ShapeError, "not_broadcastable"):
                rule.write(draw.normal(3, 6), draw.normal(3, 4), **{gate: torch.ones(2)})


def test_a_preconditioned_step_is_a_delta_step_in_another_norm():
    """It minimizes ‖(S − S~) M^(−1/2)‖² − 2β ⟨S k, v − S~k⟩: the delta rule's objective, channels weighed by 1/M."""
    draw, rule = Draw(12), get_rule("preconditioned")
    previous, k, v, alpha, scale = draw.normal(4, 6), draw.normal(6), draw.normal(4), draw.uniform(6), draw.uniform(6)
    step = rule.write(k, v, alpha=alpha, beta=0.7, scale=scale).apply(previous).requires_grad_()
    retained = previous * alpha
    value = ((step - retained).square() / scale).sum() - 2 * 0.7 * (step @ k) @ (v - retained @ k)
    assert_close(torch.autograd.grad(value, step)[0], torch.zeros(4, 6, dtype=torch.float64))


def test_a_new_rule_is_one_class():
    class Half(type(get_rule("sum"))):
        name = "half"

        def _coefficients(self, k, gates):
            return Coefficients(decay=1.0, erase=0.0, write=0.5)

    try:
        draw = Draw(9)
        W, k, v = draw.normal(4, 6), draw.normal(6), draw.normal(4)
        assert_close(get_rule("half").write(k, v).apply(W), W + 0.5 * torch.outer(v, k))
    finally:
        del Rule._known["half"]


@pytest.mark.parametrize("norm", [1e-6, 1.0, 1e3])
def test_longhorn_is_bounded_for_keys_of_any_norm(norm):
    """Its erase never exceeds what the key reads: ε‖k‖² < 1, where delta at β = 1 would blow up."""
    draw = Draw(10)
    k, v = norm * draw.unit(50, 6), draw.normal(50, 4)
    rate = get_rule("longhorn").coefficients(k, beta=1.0).erase
    assert ((rate * k.square().sum(-1)) < 1).all()
    written = chain(get_rule("longhorn").write(k, v)).apply(torch.zeros(4, 6, dtype=k.dtype))
    assert float((k @ written.mT).abs().max()) < 10 * float(v.abs().max())


def test_gates_of_the_wrong_kind():
    draw = Draw(11)
    k, v = draw.normal(6), draw.normal(4)
    for bad in ("x", True, None, [0.5]):
        with raises(InputError, "invalid_gate"):
            get_rule("delta").write(k, v, beta=bad)
    assert_errors(
        (InputError, "gate_out_of_range", lambda: get_rule("rfa").write(k, v, beta=1.5)),
        (UnknownNameError, "unknown_rule", lambda: get_rule("delts")),
        (UnknownNameError, "unknown_rule", lambda: get_rule([])),
    )
