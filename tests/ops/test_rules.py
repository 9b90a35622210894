"""The rules with vectors for gates, other probes than keys, and several writes per token: each against its own loop."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rebind.errors import InputError, ShapeError
from rebind.memory import get_rule, rule_names
from rebind.ops import scan, scan_rule, step
from rebind.ops.scan import scan_arguments
from tests.ops.loops import GATES, KEY, NUMBER, VALUE, rule_of, run_loop
from tests.ops.problems import compare
from tests.support import Draw, assert_close, raises

CASES = list(GATES)
OUTPUTS, GRADIENTS = 1e-12, 1e-10  # relative to the largest entry, in float64


def several(case: str) -> int:
    return 3 if get_rule(rule_of(case)).several else 1


def draw_case(
    case: str, length: int = 45, d_k: int = 6, d_v: int = 5, *, batch: int = 2, heads: int = 2, seed: int = 0
):
    """Draw q, k, v, a state and gates between 0.1 and 0.9."""
    draw, number = Draw(seed), several(case)
    rows = length * number
    tensors = {
        "q": draw.unit(batch, length, heads, d_k),
        "k": draw.unit(batch, rows, heads, d_k),
        "v": draw.normal(batch, rows, heads, d_v),
        "state": draw.normal(batch, heads, d_v, d_k),
    }
    for name, kind in GATES[case].items():
        width = {KEY: (d_k,), VALUE: (d_v,), NUMBER: ()}[kind]
        steps = length if name == "alpha" else rows
        tensors[name] = 0.1 + 0.8 * draw.uniform(batch, steps, heads, *width)
    return tensors


def with_gradients(run, tensors):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out, final = run(**leaves)
    draw = Draw(9)
    loss = (out * draw.normal(*out.shape).to(out)).sum() + (final * draw.normal(*final.shape).to(final)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out, "final": final}, dict(zip(leaves, grads, strict=True))


def test_every_rule_has_a_loop():
    older = {"sum", "rfa", "mamba2", "delta", "longhorn", "gated_delta"}  # those of tests/memory/test_rules.py
    assert set(rule_names()) == older | {rule_of(case) for case in CASES}


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 45])
def test_a_rule_is_its_loop(case, backend, length):
    tensors = draw_case(case, length)
    ours = with_gradients(lambda **t: scan_rule(rule_of(case), **t, backend=backend), tensors)
    loop = with_gradients(lambda **t: run_loop(case, **t), tensors)
    compare(ours[0], loop[0], OUTPUTS)
    compare(ours[1], loop[1], GRADIENTS)


@pytest.mark.parametrize("case", CASES)
def test_a_write_is_a_step_of_the_loop(case):
    """`Rule.write` applied token by token, several rows of a token as one write."""
    tensors = draw_case(case, 7)
    rule, number = get_rule(rule_of(case)), several(case)
    expected, final = run_loop(case, **tensors)
    state = tensors["state"]
    for t in range(7):
        here = slice(t * number, (t + 1) * number)
        rows = lambda x: x[:, here].movedim(1, 2) if number > 1 else x[:, t]  # noqa: B023
        token = {
            name: x[:, t] if name == "alpha" else rows(x) for name, x in tensors.items() if name not in ("q", "state")
        }
        state = rule.write(**token).apply(state)
        assert_close((state @ tensors["q"][:, t].unsqueeze(-1)).squeeze(-1), expected[:, t], OUTPUTS)
    assert_close(state, final, OUTPUTS)


@pytest.mark.parametrize("case", CASES)
def test_one_token_at_a_time(case):
    tensors = draw_case(case, 6)
    number, rule = several(case), rule_of(case)
    expected, final = run_loop(case, **tensors)
    memory = tensors["state"].clone()
    for t in range(6):
        here = slice(t * number, (t + 1) * number)
        pick = lambda name, x: x[:, t] if number == 1 or name in ("q", "alpha") else x[:, here]  # noqa: B023
        token = {name: pick(name, x) for name, x in tensors.items() if name != "state"}
        q, k, v = (token.pop(name) for name in "qkv")
        out = step(**scan_arguments(rule, q, k, v, token), state=memory)
        assert_close(out, expected[:, t], OUTPUTS)
    assert_close(memory, final, OUTPUTS)


@pytest.mark.parametrize("case", CASES)
def test_packed_is_alone(case):
    bounds, number = [0, 7, 7, 38, 45], several(case)
    tensors = draw_case(case, 45, batch=1)
    tensors["state"] = Draw(3).normal(4, 2, 5, 6)
    out, final = scan_rule(rule_of(case), **tensors, cu_seqlens=torch.tensor(bounds))
    for n, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            assert_close(final[n], tensors["state"][n], OUTPUTS)
            continue
        rows = lambda name: 1 if name in ("q", "alpha") else number
        alone = {name: x[:, begin * rows(name) : end * rows(name)] for name, x in tensors.items() if name != "state"}
        expected, last = run_loop(case, **alone, state=tensors["state"][n : n + 1])
        assert_close(out[:, begin:end], expected, OUTPUTS)
        assert_close(final[n : n + 1], last, OUTPUTS)


@pytest.mark.parametrize("case", ["kda", "gdn2", "rwkv7", "comba"])
def test_heads_that_share_keys(case):
    tensors = draw_case(case, 20, heads=4)
    for name in "qk":
        tensors[name] = tensors[name][:, :, :2]
    ours = with_gradients(lambda **t: scan_rule(rule_of(case), **t), tensors)
    repeat = lambda x: x.repeat_interleave(2, dim=2)
    loop = with_gradients(lambda q, k, **t: run_loop(case, repeat(q), repeat(k), **t), tensors)
    compare(ours[0], loop[0], OUTPUTS)
    compare(ours[1], loop[1], GRADIENTS)


def test_a_token_of_several_writes_decays_once():
    """Also if the decay is a constant."""
    tensors = draw_case("gated_delta_product", 9)
    tensors["alpha"] = torch.full_like(tensors["alpha"], 0.7)
    expected, _ = run_loop("gated_delta_product", **tensors)
    assert_close(scan_rule("gated_delta_product", **{**tensors, "alpha": 0.7})[0], expected, OUTPUTS)


def test_a_log_decay_takes_the_place_of_its_gate():
    tensors = draw_case("comba", 9)
    expected, _ = run_loop("comba", **tensors)
    state, alpha = tensors.pop("state"), tensors.pop("alpha")
    q, k, v = (tensors.pop(name) for name in "qkv")
    arguments = scan_arguments("comba", q, k, v, tensors, log_decay=alpha.log(), check=False)
    assert_close(scan(**arguments, state=state)[0], expected, OUTPUTS)


def test_rules_contain_one_another():
    """Law 15: with suitable gates, one rule is another."""
    t = draw_case("kda", 20, seed=5)
    q, k, v, beta, alphas = (t[name] for name in ("q", "k", "v", "beta", "alpha"))
    alpha = alphas[..., 0]
    equal = alpha.unsqueeze(-1).expand_as(k)
    run = lambda name, value=v, **gates: scan_rule(name, q, k, value, state=t["state"], **gates)
    kda, gated = run("kda", alpha=alphas, beta=beta), run("gated_delta", alpha=alpha, beta=beta)
    delta = run("delta", beta=beta)
    same = [
        (run("gla", alpha=equal), run("mamba2", alpha=alpha)),
        (run("kda", alpha=equal, beta=beta), gated),
        (run("gdn2", alpha=alphas, erase=beta, write=beta), kda),
        (run("preconditioned", alpha=alphas, beta=beta), kda),
        (run("preconditioned", alpha=alpha, beta=beta), gated),
        (run("comba", alpha=alpha, beta=beta, feedback=alpha), gated),
        (run("rwkv7", beta.unsqueeze(-1) * v, a=beta), delta),
        (run("delta_product", beta=beta), delta),
        (run("gated_delta_product", alpha=alpha, beta=beta), gated),
    ]
    for ours, other in same:
        compare(dict(enumerate(ours)), dict(enumerate(other)), OUTPUTS)


def test_a_gate_per_channel_where_the_rule_has_none():
    t = draw_case("kda", 4)
    with raises(ShapeError, "gate_does_not_match"):
        scan_rule("gated_delta", **t)


def test_bad_input():
    t = draw_case("kda", 9)
    q, k, v, alpha = (t[name] for name in ("q", "k", "v", "alpha"))
    with raises(ShapeError, "keys_do_not_match"):
        scan(q, k, v, probe=k[..., :3])
    with raises(ShapeError, "keys_do_not_match"):
        scan(q, k, v, erase_key=k[:, :3])
    with raises(ShapeError, "coefficient_does_not_match"):
        scan(q, k, v, log_decay=-alpha[..., :3])
    with raises(InputError, "mini_batch_conflict"):
        scan(q, k, v, erase_key=k, mini_batch=3)
    with raises(InputError, "mini_batch_conflict"):
        scan(q, k, v, probe=k, mini_batch=3)
    with raises(ShapeError, "not_broadcastable"):
        scan_rule("kda", q, k, v, alpha=alpha[..., :3])
    with raises(InputError, "gate_out_of_range"):
        scan_rule("gla", q, k, v, alpha=1.5)
