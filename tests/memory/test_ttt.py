"""Test-time training and the fast weight programmer, against loops written out by hand."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError, ShapeError
from rebind.memory import FastWeightProgrammer, ttt
from tests.support import BATCHES, Draw, assert_close, assert_errors, raises

MODELS = {
    "linear": (ttt.Linear(), 3),
    "mlp": (ttt.Mlp(expand=2), 3),
    "normed linear": (ttt.ResidualNorm(ttt.Linear()), 4),
    "normed mlp": (ttt.ResidualNorm(ttt.Mlp(expand=2)), 4),
}  # name: (model, d_v); d_k is 4


def start(model, d_v, seed=0):
    """A state away from zero, so that every gradient is alive."""
    draw = Draw(seed + 100)
    return tuple(s + 0.3 * draw.normal(*s.shape) for s in model.initial(4, d_v, seed=seed, dtype=torch.float64))


def by_hand(model, state, q, k, v, rates, size):
    """The definition, with plain autograd and a loop over tokens."""
    outputs = []
    for begin in range(0, len(k), size):
        anchor = tuple(s.detach().clone().requires_grad_() for s in state)
        total = [torch.zeros_like(s) for s in anchor]
        for t in range(begin, min(begin + size, len(k))):
            slopes = torch.autograd.grad((model(anchor, k[t]) - v[t]).square().sum(), anchor)
            total = [acc + rates[t] * slope for acc, slope in zip(total, slopes, strict=True)]
            state = tuple(a.detach() - acc for a, acc in zip(anchor, total, strict=True))
            outputs.append(model(state, q[t]))
    return torch.stack(outputs), state


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, None])
def test_run_is_the_definition(name, size):
    model, d_v = MODELS[name]
    draw = Draw(1)
    q, k, v, rates = draw.normal(7, 4), draw.normal(7, 4), draw.normal(7, d_v), 0.1 * draw.uniform(7)
    trained = ttt.run(model, start(model, d_v), q, k, v, rate=rates, mini_batch=size)
    out, state = by_hand(model, start(model, d_v), q, k, v, rates, size or 7)
    assert_close(trained.out, out)
    for got, expected in zip(trained.state, state, strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", BATCHES)
def test_batches_run_side_by_side(name, batch):
    model, d_v = MODELS[name]
    draw = Draw(2)
    q, k, v = draw.normal(*batch, 5, 4), draw.normal(*batch, 5, 4), draw.normal(*batch, 5, d_v)
    trained = ttt.run(model, start(model, d_v), q, k, v, rate=0.05, mini_batch=2)
    assert trained.out.shape == (*batch, 5, d_v)
    one = tuple(0 for _ in batch)
    alone = ttt.run(model, start(model, d_v), q[one], k[one], v[one], rate=0.05, mini_batch=2)
    assert_close(trained.out[one], alone.out)
    assert_close(trained.state[0][one], alone.state[0])


def test_a_run_continues_from_its_state():
    model = ttt.Mlp()
    draw = Draw(3)
    q, k, v = draw.normal(6, 4), draw.normal(6, 4), draw.normal(6, 3)
    whole = ttt.run(model, start(model, 3), q, k, v, rate=0.05, mini_batch=2)
    first = ttt.run(model, start(model, 3), q[:4], k[:4], v[:4], rate=0.05, mini_batch=2)
    second = ttt.run(model, first.state, q[4:], k[4:], v[4:], rate=0.05, mini_batch=2)
    assert_close(torch.cat([first.out, second.out]), whole.out)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_reach_everything(name, size):
    """Through the inner steps to q, k, v, the rates and the starting state."""
    model, d_v = MODELS[name]
    draw = Draw(7)
    inputs = [draw.normal(3, 4), draw.normal(3, 4), draw.normal(3, d_v), 0.1 + 0.1 * draw.uniform(3)]
    inputs = [tensor.requires_grad_() for tensor in (*inputs, *start(model, d_v))]

    def outputs(q, k, v, rate, *state):
        trained = ttt.run(model, state, q, k, v, rate=rate, mini_batch=size)
        return (trained.out, *trained.state)

    assert torch.autograd.gradcheck(outputs, inputs)


def test_the_norms_own_weights_get_gradients():
    draw = Draw(8)
    weight, bias = draw.normal(4).requires_grad_(), draw.normal(4).requires_grad_()
    x = draw.normal(3, 4)

    def outputs(weight, bias):
        model = ttt.ResidualNorm(ttt.Linear(), weight, bias)
        return ttt.run(model, start(model, 4), x, x, x.flip(0), rate=0.1, mini_batch=2).out

    assert torch.autograd.gradcheck(outputs, (weight, bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    draw = Draw(9)
    q, k, v = (draw.unit(60, 40).to(dtype) for _ in range(3))
    state = (draw.normal(40, 40).to(dtype),)
    trained = ttt.run(ttt.Linear(), state, q, k, v, rate=0.1)
    exact = ttt.run(ttt.Linear(), (state[0].double(),), q.double(), k.double(), v.double(), rate=0.1)
    assert trained.out.dtype == trained.state[0].dtype == dtype
    once = (1 if dtype.itemsize == 2 else 32) * torch.finfo(dtype).eps
    assert_close(trained.out, exact.out, once)
    assert_close(trained.state[0], exact.state[0], once)
    wide = ttt.Linear().write(k, v, 0.3).gain
    assert_close(wide, 0.6 * k.double(), once)


def test_bad_input_is_refused():
    draw = Draw(10)
    q, k, v = draw.normal(5, 4), draw.normal(5, 4), draw.normal(5, 3)
    state = start(ttt.Linear(), 3)

    def run(q=q, k=k, v=v, model=None, state=state, **options):
        return lambda: ttt.run(model or ttt.Linear(), state, q, k, v, **options)

    assert_errors(
        (InputError, "invalid_mini_batch", run(mini_batch=0)),
        (ShapeError, "token_counts_differ", run(v=v[:4])),
        (ShapeError, "wrong_width", run(q=q[:, :3])),
        (ShapeError, "wrong_width", run(rate=torch.ones(4))),
        (InputError, "not_finite", run(k=k * float("nan"))),
        (InputError, "not_finite", run(rate=float("inf"))),
        (ShapeError, "widths_differ", lambda: ttt.ResidualNorm(ttt.Linear()).initial(4, 3)),
        (ShapeError, "state_does_not_match", run(model=ttt.Mlp())),
        (ShapeError, "state_does_not_match", run(state=(draw.normal(5),))),
        (ShapeError, "state_does_not_match", run(state=(draw.normal(3, 5),))),
        (ShapeError, "state_does_not_match", run(state=(draw.normal(2, 4),))),
        (InputError, "not_floating_point", run(state=(torch.zeros(3, 4, dtype=torch.long),))),
        (InputError, "not_finite", run(state=(state[0] * float("nan"),))),
    )


def test_the_mlp_by_hand():
    draw = Draw(20)
    w1, b1, w2, b2 = state = start(ttt.Mlp(expand=2), 3)
    x = draw.normal(4)
    hidden = w1 @ x + b1
    gelu = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    assert_close(ttt.Mlp(expand=2)(state, x), w2 @ gelu + b2)


def test_the_norm_by_hand():
    draw = Draw(21)
    (W,) = state = start(ttt.Linear(), 4)
    x, weight, bias = draw.normal(4), draw.normal(4), draw.normal(4)
    y = W @ x
    normed = (y - y.mean()) / (y.var(correction=0) + 1e-5).sqrt()
    assert_close(ttt.ResidualNorm(ttt.Linear(), weight, bias)(state, x), x + weight * normed + bias)


def test_an_mlp_starts_small_seeded_and_in_shape():
    first, again, other = (ttt.Mlp().initial(6, 3, seed=s) for s in (1, 1, 2))
    assert [tuple(t.shape) for t in first] == [(24, 6), (24,), (3, 24), (3,)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert float(first[0].std()) == pytest.approx(0.02, rel=0.2)


def test_a_write_with_one_rate_per_row():
    draw = Draw(22)
    k, v, rate, W = draw.normal(3, 4), draw.normal(3, 2), draw.uniform(3), draw.normal(2, 4)
    expected = W - sum(rate[i] * 2 * torch.outer(W @ k[i] - v[i], k[i]) for i in range(3))
    assert_close(ttt.Linear().write(k, v, rate).apply(W), expected)
    with raises(ShapeError, "wrong_width"):
        ttt.Linear().write(k, v, rate[:2])


def test_a_batch_of_rates_or_states_makes_a_batch():
    draw = Draw(23)
    q, k, v = draw.normal(5, 4), draw.normal(5, 4), draw.normal(5, 3)
    rates, states = 0.1 * draw.uniform(2, 5), draw.normal(2, 3, 4)
    trained = ttt.run(ttt.Linear(), (states,), q, k, v, rate=rates)
    for i in range(2):
        assert_close(trained.out[i], ttt.run(ttt.Linear(), (states[i],), q, k, v, rate=rates[i]).out)
    none = ttt.run(ttt.Linear(), (states[:0],), q, k, v)
    assert none.out.shape == (0, 5, 3)


# The fast weight programmer (Schlag et al. eqs. 1–2).


def test_programmer_by_hand():
    draw = Draw(11)
    x, slow_a, slow_b = draw.normal(6, 4), draw.normal(3, 4), draw.normal(4, 4)
    W, expected = torch.zeros(3, 4).double(), []
    for token in x:
        W = torch.tanh(W + torch.outer(slow_a @ token, slow_b @ token))
        expected.append(W @ token)
    out, memory = FastWeightProgrammer().run(x, slow_a, slow_b)
    assert_close(out, torch.stack(expected))
    assert_close(memory, W)


@pytest.mark.parametrize("batch", BATCHES)
def test_programmer_batches_and_continues(batch):
    draw = Draw(12)
    x, slow_a, slow_b = draw.normal(*batch, 6, 4), draw.normal(3, 4), draw.normal(4, 4)
    programmer = FastWeightProgrammer()
    out, memory = programmer.run(x, slow_a, slow_b)
    first, middle = programmer.run(x[..., :2, :], slow_a, slow_b)
    second, end = programmer.run(x[..., 2:, :], slow_a, slow_b, middle)
    assert_close(torch.cat([first, second], dim=-2), out)
    assert_close(end, memory)


def test_programmer_steps_do_not_compose_linearly():
    """Its step is not affine in the memory: that is why it has no `Write`."""
    draw = Draw(13)
    V, W, a, b = draw.normal(3, 4), draw.normal(3, 4), draw.normal(3), draw.normal(4)
    step = FastWeightProgrammer().step
    middle = step((V + W) / 2, a, b)
    assert float((middle - (step(V, a, b) + step(W, a, b)) / 2).abs().max()) > 1e-2


def test_programmer_dtypes_gradients_and_bad_input():
    draw = Draw(14)
    x, slow_a, slow_b = (draw.normal(*s).requires_grad_() for s in ((3, 4), (2, 4), (4, 4)))
    assert torch.autograd.gradcheck(FastWeightProgrammer().run, (x, slow_a, slow_b))
    rough = [t.detach().bfloat16() for t in (x, slow_a, slow_b)]
    out, memory = FastWeightProgrammer().run(*rough)
    exact, state = FastWeightProgrammer().run(*(t.double() for t in rough))
    assert out.dtype == memory.dtype == torch.bfloat16
    assert_close(out, exact, torch.finfo(torch.bfloat16).eps)
    assert_close(memory, state, torch.finfo(torch.bfloat16).eps)
    empty, memory = FastWeightProgrammer().run(x[:0], slow_a, slow_b)
    assert empty.shape == (0, 2)
    assert_close(memory, torch.zeros(2, 4).double(), 0.0)
    step, empty = FastWeightProgrammer().step, torch.zeros(2, 4)
    assert_errors(
        (ShapeError, "wrong_width", lambda: FastWeightProgrammer().run(x, slow_a, slow_b[:3])),
        (ShapeError, "wrong_width", lambda: step(empty, torch.zeros(3), torch.zeros(4))),
        (InputError, "not_finite", lambda: step(empty, torch.zeros(2), torch.full((4,), float("nan")))),
    )
