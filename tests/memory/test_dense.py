"""The dense memory: reads against their definition, capacity, interference, and exact forgetting.

`test_laws` has the linear limit.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory import Write
from rebind.memory import dense as dense_module
from rebind.memory.closed_form import ridge
from rebind.memory.dense import Dense, Whitening, top_rows
from tests.support import Draw, assert_close, raises


def unit(draw: Draw, *shape: int) -> Tensor:
    return torch.nn.functional.normalize(draw.normal(*shape), dim=-1)


def memory(draw: Draw, n: int, d_k: int, d_v: int, threshold: Tensor | float = 0.7, **options) -> Dense:
    thresholds = torch.as_tensor(threshold, dtype=torch.float64).expand(n)
    return Dense(unit(draw, n, d_k), draw.normal(n, d_v), thresholds, **options)


def by_the_book(dense: Dense, query: Tensor) -> Tensor:
    """One query, one row after another, with the empty slot written out."""
    strengths = [math.exp(dense.beta * float(dense.keys[i] @ query - dense.thresholds[i])) for i in range(len(dense))]
    total = 1 + sum(strengths)
    read = torch.zeros(dense.values.shape[-1], dtype=torch.float64)
    for strength, value in zip(strengths, dense.values, strict=True):
        read = read + strength / total * value
    return read


def test_a_read_is_the_definition():
    draw = Draw(0)
    dense = memory(draw, 7, 5, 3, torch.linspace(0.2, 0.8, 7), beta=9.0)
    queries = unit(draw, 2, 4, 5)
    read = dense.read(queries)
    for at in [(0, 0), (1, 3)]:
        assert_close(read[at], by_the_book(dense, queries[at]), 1e-12)


@pytest.mark.parametrize("beta", [0.5, 200.0])
def test_queries_that_are_near_to_no_row_are_skipped_only_where_they_read_nothing(beta):
    draw = Draw(16)
    dense = memory(draw, 30, 48, 3, beta=beta, top_k=30)
    queries = torch.nn.functional.normalize(torch.cat([dense.keys[:3] + 0.1, draw.normal(20, 48)]), dim=-1)
    skipped = (dense.read(queries) == 0).all(-1)
    assert int(skipped.sum()) == (20 if beta == 200.0 else 0)
    for query, read in zip(queries, dense.read(queries), strict=True):
        assert float((read - by_the_book(dense, query)).norm()) < 1e-13


def test_rows_beyond_the_nearest_are_left_out():
    draw = Draw(1)
    dense = memory(draw, 40, 8, 3, beta=12.0, top_k=4)
    query = unit(draw, 1, 8)
    nearest = (query @ dense.keys.mT).topk(4).indices[0]
    few = Dense(dense.keys[nearest], dense.values[nearest], dense.thresholds[nearest], beta=12.0)
    assert_close(dense.read(query), few.read(query), 1e-12)


@pytest.mark.parametrize(("n", "count"), [(10, 3), (1_000, 3), (5_003, 16), (64 * 65, 16)])
def test_the_largest_scores_are_found_by_groups(n, count):
    scores = Draw(10).normal(2, 3, n)
    values, places = top_rows(scores, count)
    best = scores.topk(count, dim=-1)
    assert torch.equal(values, best.values)
    assert torch.equal(places, best.indices)


def facts(draw: Draw, count: int, d_k: int, largest: int = 20) -> Dense:
    """Return a memory of facts with one to `largest` similar keys each."""
    counts = torch.arange(count) % largest + 1
    owner = torch.arange(count).repeat_interleave(counts)
    keys = unit(draw, count, d_k)[owner] + 0.6 * unit(draw, len(owner), d_k)
    keys, thresholds = torch.nn.functional.normalize(keys, dim=-1), torch.full((len(owner),), 0.75).double()
    return Dense(keys, draw.normal(count, 5), thresholds, owner=owner)


def test_rows_share_a_value():
    draw = Draw(14)
    dense = facts(draw, 8, 32, 3)
    spelled_out = Dense(dense.keys, dense.values[dense.owner], dense.thresholds)
    queries = torch.cat([dense.keys, unit(draw, 10, 32)])
    assert torch.equal(dense.read(queries), spelled_out.read(queries))
    gone = torch.tensor([0, 1, 2, 4])  # the only key of the first fact, both of the second, one of the third
    rest = dense.remove(gone)
    assert len(rest.values) == 6
    assert torch.equal(rest.read(queries), spelled_out.remove(gone).read(queries))


def test_cells_find_the_rows_that_are_near():
    """Keys around each fact, more of them than a cell holds; queries near a key, between two, and near none."""
    draw = Draw(11)
    dense = facts(draw, 2_000, 256)
    near = dense.keys[::37] + 0.4 * unit(draw, len(dense.keys[::37]), 256)
    queries = torch.nn.functional.normalize(torch.cat([near, near + near.flip(0), draw.normal(500, 256)]), dim=-1)
    whole = dense.read(queries)
    assert float((dense.read(queries).norm(dim=-1) > 0.1).double().mean()) > 0.2, "some of them read the memory"
    assert_close(dense.with_cells().read(queries), whole, 1e-5)


def test_cells_are_kept_when_rows_come_and_go():
    draw = Draw(15)
    dense = facts(draw, 40, 64)
    cells = dense.with_cells().cells
    assert int(cells.size.max()) == dense_module.CELL
    assert int(cells.size.sum()) == len(dense)
    ends = torch.nonzero(dense.owner[1:] != dense.owner[:-1]).flatten()[[9, 19]] + 1
    first, last = dense.with_cells().between(0, int(ends[0])), dense.with_cells().between(int(ends[1]), len(dense))
    joined = Dense.concatenate([first, last])
    again = dense.remove(torch.arange(*ends.tolist())).with_cells()
    for name in ("keys", "values", "thresholds", "owner"):
        assert torch.equal(getattr(joined, name), getattr(again, name)), name
    for name in ("centers", "first", "size"):
        assert_close(getattr(joined.cells, name).double(), getattr(again.cells, name).double(), 1e-12)


@pytest.mark.parametrize("by_cells", [False, True])
def test_a_read_in_parts_is_the_whole_read(monkeypatch, by_cells):
    draw = Draw(4)
    dense = memory(draw, 50, 6, 3, threshold=0.5)
    dense = dense.with_cells() if by_cells else dense
    queries = unit(draw, 4, 9, 6)
    whole, weights = dense.read(queries), dense.total_weights(queries[0])
    assert_close(weights, dense.weights(queries[0])[0].sum(-1))
    sizes, split = [], Tensor.split
    monkeypatch.setattr(dense_module, "AT_ONCE", 50 * 7)
    monkeypatch.setattr(Tensor, "split", lambda *args: sizes.append(args[1]) or split(*args))
    assert_close(dense.read(queries), whole)
    assert_close(dense.total_weights(queries[0]), weights)
    assert sizes == [1, 1] if by_cells else [7, 7]


def test_gradients_reach_queries_and_values():
    draw = Draw(13)
    keys, values, queries = unit(draw, 5, 4), draw.normal(5, 3), unit(draw, 6, 4)

    def read(values: Tensor, queries: Tensor) -> Tensor:
        return Dense(keys, values, torch.full((5,), 0.3).double(), beta=3.0).read(queries)

    assert torch.autograd.gradcheck(read, (values.requires_grad_(), queries.requires_grad_()))


def test_a_stored_key_reads_its_value_and_a_strange_one_reads_nothing():
    draw = Draw(2)
    dense = memory(draw, 300, 64, 5)
    assert_close(dense.read(dense.keys), dense.values, 1e-6)
    strange = unit(draw, 100, 64)
    assert float((strange @ dense.keys.mT).max()) < 0.65
    assert float(dense.read(strange).abs().max()) < 0.1


def test_a_linear_memory_is_full_where_a_dense_one_is_not():
    draw = Draw(4)
    n, d_k = 2_000, 64
    dense = memory(draw, n, d_k, 16)
    wrong = (dense.read(dense.keys) - dense.values).norm(dim=-1) / dense.values.norm(dim=-1)
    moment = torch.eye(d_k, dtype=torch.float64)
    linear = Write(dense.keys, dense.values, ridge(dense.keys, moment, 1e-3)).apply(torch.zeros(16, d_k).double())
    missed = (dense.keys @ linear.mT - dense.values).norm(dim=-1) / dense.values.norm(dim=-1)
    assert float(wrong.median()) < 1e-3
    assert float(missed.median()) > 0.9, "thirty times as many pairs as dimensions"


@pytest.mark.parametrize(("d_k", "fits", "crowds"), [(16, 10, 3_000), (24, 50, 20_000)])
def test_capacity_is_exponential_in_the_width(d_k, fits, crowds):
    """The nearest of n random keys overlaps by about √(2 ln n / d_k); below the threshold nothing is read."""
    draw = Draw(5)
    fires = []
    for n in (fits, crowds):
        dense = memory(draw, n, d_k, 1)
        fires.append(float((dense.weights(unit(draw, 300, d_k))[0].sum(-1) > 0.5).double().mean()))
    assert math.sqrt(2 * math.log(fits) / d_k) < 0.6
    assert math.sqrt(2 * math.log(crowds) / d_k) > 0.8
    assert fires[0] < 0.02
    assert fires[1] > 0.3


@pytest.mark.parametrize(("d_k", "beta"), [(64, 10.0), (256, 30.0)])
def test_interference_is_that_of_the_theory(d_k, beta):
    """Overlaps of random unit keys are normal with variance 1/d_k, so n rows leak n·exp(β²/2d_k − βτ) on average."""
    draw, n = Draw(9), 4_000
    keys = unit(draw, n, d_k)
    dense = Dense(keys, torch.ones(n, 1, dtype=torch.float64), torch.full((n,), 0.8).double(), beta=beta, top_k=n)
    total = dense.read(unit(draw, 500, d_k)).squeeze(-1)
    strength = total / (1 - total)  # against the empty slot
    expected = n * math.exp(beta**2 / (2 * d_k) - beta * 0.8)
    assert 0.85 < float(strength.mean()) / expected < 1.15


def test_forgetting_is_exact_and_nothing_else_moves():
    draw = Draw(6)
    dense = memory(draw, 20, 64, 4)
    more = dense.write(unit(draw, 3, 64), draw.normal(3, 4), 0.7)
    assert len(more) == 23
    back = more.remove(torch.tensor([20, 21, 22]))
    queries = unit(draw, 50, 64)
    assert torch.equal(back.read(queries), dense.read(queries))
    without = dense.remove(torch.tensor([4]))
    assert torch.equal(without.keys, torch.cat([dense.keys[:4], dense.keys[5:]]))
    assert float(without.read(dense.keys[4]).norm()) < 1e-3 * float(dense.values[4].norm())


def test_an_empty_memory_reads_nothing():
    empty = Dense.empty(5, 3)
    assert torch.equal(empty.read(torch.randn(2, 5)), torch.zeros(2, 3))
    assert len(empty.write(torch.randn(2, 5), torch.randn(2, 3), 0.7)) == 2


def test_whitened_states_are_spread_evenly():
    draw = Draw(7)
    mixing = draw.normal(6, 6)
    states = draw.normal(5_000, 6) @ mixing + 10.0
    mean, centered = states.mean(0), states - states.mean(0)
    covariance = centered.mT @ centered / len(states)
    whitening = Whitening.fit(mean, covariance, shrinkage=0.0)
    white = (states - mean) @ whitening.factor
    assert_close(white.mT @ white / len(states), torch.eye(6, dtype=torch.float64), 1e-9)
    assert_close(whitening(states).norm(dim=-1), torch.ones(5_000, dtype=torch.float64), 1e-12)
    shrunk = Whitening.fit(mean, covariance, shrinkage=0.5)
    variances = ((states - mean) @ shrunk.factor).var(0)
    assert float(variances.max()) < 1.0, "shrinkage makes small directions count less"
    assert whitening(states.bfloat16()).dtype == torch.float32


def test_wrong_shapes_are_refused():
    draw = Draw(8)
    with raises(InputError, "rows_differ"):
        Dense(unit(draw, 3, 4), draw.normal(2, 5), torch.ones(3))
    dense = memory(draw, 3, 4, 5)
    with pytest.raises(ShapeError):
        dense.read(unit(draw, 2, 6))
    with pytest.raises(InputError):
        dense.write(torch.full((1, 4), torch.nan), draw.normal(1, 5), 0.7)
    with raises(InputError, "no_variance"):
        Whitening.fit(torch.zeros(3), torch.zeros(3, 3))
