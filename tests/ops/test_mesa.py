"""MesaNet: every answer is a ridge regression."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError, ShapeError
from rebind.memory import Write, ridge
from rebind.ops import mesa, mesa_step
from tests.ops.problems import compare
from tests.support import Draw, assert_close, raises

EXACT = 1e-11  # of solves


def draw_case(length=23, d_k=5, d_v=4, batch=2, heads=2, key_heads=2):
    draw = Draw(1)
    return {
        "q": draw.normal(batch, length, key_heads, d_k),
        "k": draw.unit(batch, length, key_heads, d_k),
        "v": draw.normal(batch, length, heads, d_v),
        "ridge": 0.3 + draw.uniform(heads, d_k),
        "log_decay": -0.3 * draw.uniform(batch, length, heads),
        "write": 0.1 + draw.uniform(batch, length, heads),
    }


def loop(q, k, v, ridge, log_decay, write):
    """Every A + Λ formed and solved with."""
    sharing = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(sharing, dim=2) for x in (q, k))
    A = torch.zeros(*v[:, 0].shape[:2], k.shape[-1], k.shape[-1], dtype=v.dtype)
    B = torch.zeros(*v[:, 0].shape, k.shape[-1], dtype=v.dtype)
    outs = []
    for t in range(q.shape[1]):
        decay, rate, key = (x[:, t] for x in (log_decay.exp()[..., None, None], write[..., None, None], k))
        A = decay * A + rate * key.unsqueeze(-1) * key.unsqueeze(-2)
        B = decay * B + rate * v[:, t].unsqueeze(-1) * key.unsqueeze(-2)
        x = torch.linalg.solve(A + torch.diag_embed(ridge), q[:, t].unsqueeze(-1))
        outs.append((B @ x).squeeze(-1))
    return torch.stack(outs, dim=1), A, B


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_it_is_the_loop_and_its_gradients(backend, key_heads):
    tensors = draw_case(key_heads=key_heads)

    def results(run):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        outs = dict(zip(("out", "A", "B"), run(**leaves), strict=True))
        value = sum((x * Draw(7).normal(*x.shape)).sum() for x in outs.values())
        return outs | dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))

    def ours(**t):
        out, state = mesa(t.pop("q"), t.pop("k"), t.pop("v"), **t, backend=backend, iterations=12)
        return out, *state

    compare(results(ours), results(loop), 1e-10)


def test_an_answer_is_the_ridge_write_of_all_pairs():
    """With nothing decaying: `ridge` with C = Λ, written into an empty memory."""
    t = draw_case(batch=1, heads=1, key_heads=1)
    out, _ = mesa(t["q"], t["k"], t["v"], ridge=t["ridge"], iterations=12)
    for length in (1, 4, 5, 23):
        K, V = t["k"][0, :length, 0], t["v"][0, :length, 0]
        memory = Write(K, V, ridge(K, torch.diag(t["ridge"][0]), 1.0)).apply(torch.zeros(4, 5, dtype=V.dtype))
        assert_close(out[0, length - 1, 0], memory @ t["q"][0, length - 1, 0], EXACT)


def test_one_token_at_a_time_and_continued():
    t = draw_case()
    fixed = {"ridge": t.pop("ridge"), "iterations": 12}
    out, end = mesa(**t, **fixed)
    first, state = mesa(**{name: x[:, :9] for name, x in t.items()}, **fixed)
    assert_close(first, out[:, :9], EXACT)
    rest, last = mesa(**{name: x[:, 9:] for name, x in t.items()}, **fixed, state=state)
    assert_close(rest, out[:, 9:], EXACT)
    for one, other in zip(last, end, strict=True):
        assert_close(one, other, EXACT)
    for token in range(9, 23):
        answer = mesa_step(**{name: x[:, token] for name, x in t.items()}, **fixed, state=state)
        assert_close(answer, out[:, token], EXACT)


def test_packed_sequences_and_zero_queries():
    t = draw_case(batch=1)
    fixed = {"ridge": t.pop("ridge"), "iterations": 12}
    t["q"][:, 3] = 0
    out, _ = mesa(**t, **fixed, cu_seqlens=torch.tensor([0, 6, 23]))
    assert (out[:, 3] == 0).all()
    alone, _ = mesa(**{name: x[:, 6:] for name, x in t.items()}, **fixed)
    assert_close(out[:, 6:], alone, EXACT)


def scalar(run, tensors):
    outs = run(**tensors)
    return sum((x.sin() * Draw(7).normal(*x.shape)).sum() for x in outs)


def small_case():
    tensors = draw_case(length=5, d_k=3, d_v=2, heads=1, key_heads=1)
    ours = lambda **t: (lambda out, state: (out, *state))(*mesa(**t, iterations=6))
    return tensors, ours


def test_transforms():
    tensors, ours = small_case()
    slope = torch.func.grad(lambda t: scalar(ours, t))(tensors)
    compare(slope, torch.func.grad(lambda t: scalar(loop, t))(tensors), 1e-9)
    tangents = {name: Draw(5).normal(*x.shape) for name, x in tensors.items()}
    _, forward = torch.func.jvp(lambda t: scalar(ours, t), (tensors,), (tangents,))
    assert_close(forward, sum((slope[name] * tangents[name]).sum() for name in slope), 1e-9)
    samples = {name: x if name == "ridge" else x.unsqueeze(1) for name, x in tensors.items()}
    dims = {name: None if name == "ridge" else 0 for name in samples}
    out = torch.vmap(lambda t: ours(**t)[0], (dims,))(samples)
    assert_close(out.squeeze(1), ours(**tensors)[0], EXACT)


def test_gradients_of_gradients():
    tensors, ours = small_case()

    def second(run):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        first = torch.autograd.grad(scalar(run, leaves), list(leaves.values()), create_graph=True)
        again = torch.autograd.grad(sum(x.square().sum() for x in first), list(leaves.values()))
        return {
            f"{order} {name}": x for order, xs in ((1, first), (2, again)) for name, x in zip(leaves, xs, strict=True)
        }

    compare(second(ours), second(loop), 1e-8)


def test_batched_gradients():
    tensors, ours = small_case()
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out, slopes = ours(**leaves)[0], Draw(4).normal(3, 2, 5, 1, 2)
    batched = torch.autograd.grad(out, list(leaves.values()), slopes, is_grads_batched=True, retain_graph=True)
    for n, slope in enumerate(slopes):
        alone = torch.autograd.grad(out, list(leaves.values()), slope, retain_graph=True)
        for got, expected in zip(batched, alone, strict=True):
            assert_close(got[n], expected, 1e-9)


def test_bad_input():
    t = draw_case()
    with raises(ShapeError, "ridge_does_not_match"):
        mesa(**{**t, "ridge": t["ridge"][:, 1:]})
    with raises(InputError, "invalid_iterations"):
        mesa(**t, iterations=0)
