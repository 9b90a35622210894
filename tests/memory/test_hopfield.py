"""Hopfield networks: energies fall, stored patterns come back, bad input is refused."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError, ShapeError
from rebind.memory.hopfield import Classical, Modern
from tests.support import BATCHES, Draw, assert_close, assert_errors


def flip(patterns, share, seed=0):
    draw = Draw(seed)
    return torch.where(draw.uniform(*patterns.shape) < share, -patterns, patterns)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_classical_completes_patterns_below_capacity(mode):
    patterns = Draw(1).normal(10, 200).sign()  # 0.05·N
    network = Classical.store(patterns)
    recalled = network.recall(flip(patterns, 0.15), mode=mode)
    assert recalled.converged
    assert_close(recalled.state, patterns, 0.0)


def test_classical_fails_far_above_capacity():
    patterns = Draw(2).normal(80, 200).sign()  # 0.4·N
    recalled = Classical.store(patterns).recall(patterns, mode="asynchronous")
    assert float((recalled.state != patterns).double().mean()) > 0.05


@pytest.mark.parametrize("seed", [None, 5])
def test_asynchronous_recall_never_raises_the_energy(seed):
    network = Classical.store(Draw(3).normal(20, 60).sign())
    state = Draw(4).normal(60).sign()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    energies = [float(network.energy(state))]
    for _ in range(5):
        state = network.recall(state, mode="asynchronous", steps=1, generator=generator).state
        energies.append(float(network.energy(state)))
    assert energies == sorted(energies, reverse=True)
    assert energies[-1] < energies[0]


def test_classical_energy_by_hand():
    network = Classical.store(torch.tensor([[1.0, -1.0]]))
    assert_close(network.weights, torch.tensor([[0.0, -0.5], [-0.5, 0.0]]))
    assert float(network.energy(torch.tensor([1.0, -1.0]))) == -0.5
    assert float(network.energy(torch.tensor([1.0, 1.0]))) == 0.5


def test_synchronous_recall_can_cycle_and_says_so():
    """Two units that inhibit each other, started alike, flip together for ever; one at a time they settle."""
    network = Classical.store(torch.tensor([[1.0, -1.0]]))
    start = torch.tensor([1.0, 1.0])
    assert not network.recall(start, steps=11).converged
    assert network.recall(start, mode="asynchronous").converged


def test_the_random_order_is_set_by_its_seed():
    network, start = Classical.store(Draw(5).normal(30, 80).sign()), Draw(6).normal(80).sign()
    ends = [
        network.recall(start, mode="asynchronous", generator=torch.Generator().manual_seed(seed)).state
        for seed in (9, 9, *range(8))
    ]
    assert_close(ends[0], ends[1], 0.0)
    assert len({tuple(end.tolist()) for end in ends}) > 1


@pytest.mark.parametrize("batch", BATCHES)
def test_classical_is_batched(batch):
    patterns = Draw(7).normal(*batch, 3, 40).sign()
    network = Classical.store(patterns)
    assert network.weights.shape == (*batch, 40, 40)
    cue = flip(patterns[..., 0, :], 0.1)
    for mode in ("synchronous", "asynchronous"):
        assert_close(network.recall(cue, mode=mode).state, patterns[..., 0, :], 0.0)
    assert network.energy(cue).shape == batch


@pytest.mark.parametrize("beta", [0.5, 2.0, 20.0])
def test_modern_energy_never_rises_nor_goes_below_zero(beta):
    draw = Draw(8)
    network, state = Modern(draw.normal(30, 8), beta), draw.normal(50, 8)
    energy = network.energy(state)
    for _ in range(5):
        state = network.step(state)
        after = network.energy(state)
        assert (after <= energy + 1e-12).all()
        assert (after >= 0).all()
        energy = after


def test_modern_step_descends_its_energy():
    """ξ − ∇E(ξ) is the step: the update follows from the energy."""
    draw = Draw(9)
    network, state = Modern(draw.normal(6, 4), 1.7), draw.normal(4).requires_grad_()
    (slope,) = torch.autograd.grad(network.energy(state), state)
    assert_close(state - slope, network.step(state))


def test_modern_holds_far_more_patterns_than_units():
    patterns = Draw(10).normal(1000, 32).sign()  # 31·N
    network = Modern(patterns, beta=4.0)
    recalled = network.recall(flip(patterns, 0.05), steps=3)
    right = (recalled.state.sign() == patterns).all(-1).double().mean()
    assert float(right) > 0.95


def test_modern_stops_when_nothing_moves():
    draw = Draw(11)
    recalled = Modern(draw.normal(5, 8), 50.0).recall(draw.normal(8), steps=100, tolerance=1e-12)
    assert recalled.converged
    assert recalled.steps < 100


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    draw = Draw(12)
    patterns, state = draw.normal(60, 80).to(dtype), draw.normal(3, 80).to(dtype)
    exact = Modern(patterns.double(), 1.3)
    rough = Modern(patterns, 1.3)
    assert rough.step(state).dtype == rough.energy(state).dtype == dtype
    once = (1 if dtype.itemsize == 2 else 8) * torch.finfo(dtype).eps
    assert_close(rough.step(state), exact.step(state.double()), once)
    assert_close(rough.energy(state), exact.energy(state.double()), once)
    assert Classical.store(patterns.sign()).weights.dtype == dtype


def test_gradients_and_vmap():
    draw = Draw(13)
    patterns, state = draw.normal(4, 3).requires_grad_(), draw.normal(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda p, s: Modern(p, 1.3).step(s), (patterns, state))
    assert torch.autograd.gradcheck(lambda p, s: Modern(p, 1.3).energy(s), (patterns, state))
    mapped = torch.vmap(lambda s: Modern(patterns, 1.3).step(s))(state)
    assert_close(mapped, Modern(patterns, 1.3).step(state))


def test_bad_input_is_refused():
    network, modern, nan = Classical.store(torch.ones(1, 4)), Modern(torch.ones(2, 4)), torch.full((4,), float("nan"))
    assert_errors(
        (InputError, "patterns_not_binary", lambda: Classical.store(torch.tensor([[1.0, 0.5]]))),
        (ShapeError, "wrong_width", lambda: network.recall(torch.ones(3))),
        (InputError, "unknown_mode", lambda: network.recall(torch.ones(4), mode="both")),
        (InputError, "not_finite", lambda: network.energy(nan)),
        (InputError, "not_floating_point", lambda: network.recall(torch.ones(4, dtype=torch.long))),
        *((InputError, "invalid_beta", lambda b=b: Modern(torch.ones(2, 4), b)) for b in (0.0, -1.0, float("inf"))),
        (InputError, "no_patterns", lambda: Modern(torch.ones(0, 4))),
        (InputError, "not_finite", lambda: Modern(nan.expand(2, 4))),
        (ShapeError, "wrong_width", lambda: modern.step(torch.ones(3))),
        (InputError, "not_finite", lambda: modern.recall(nan)),
        (ShapeError, "not_broadcastable", lambda: Modern(torch.ones(3, 2, 4)).step(torch.ones(2, 4))),
    )


def test_a_unit_without_input_keeps_its_state():
    network = Classical(torch.zeros(3, 3))
    state = torch.tensor([1.0, -1.0, 1.0])
    for mode in ("synchronous", "asynchronous"):
        recalled = network.recall(state, mode=mode)
        assert_close(recalled.state, state, 0.0)
        assert (recalled.steps, recalled.converged) == (1, True)
