"""Write, LowRank and chain: shapes, dtypes, vmap, hypothesis over the algebra, bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rebind import LowRank, Write, chain
from rebind.errors import InputError, NumericalError, ShapeError
from rebind.memory import NullSpace, equality, null_space, ridge
from tests.support import BATCHES, Draw, assert_close, assert_errors


def doubled(write: Write) -> Write:
    return Write(*(tensor.double() for tensor in write.tensors()), retain=write.retain)


@st.composite
def writes(draw, count: int):
    """`count` writes on memories of one shape, with any number of rows, retains and gains, zeros among them."""
    d_k, d_v = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    source = Draw(draw(st.integers(0, 10**6)))
    made = []
    for _ in range(count):
        retain = draw(st.sampled_from([1.0, 0.0, 0.5, 2.0]) | st.floats(-1, 1))
        write = source.write(draw(st.integers(0, 9)), d_k, d_v, retain=retain)
        if draw(st.booleans()) and write.rows:
            write.gain[draw(st.integers(0, write.rows - 1))] = 0.0
        made.append(write)
    return source.normal(d_v, d_k), made


@given(writes(2))
def test_composition(case):
    W, (first, second) = case
    assert_close((second @ first).apply(W), second.apply(first.apply(W)))


@given(writes(3))
def test_associativity(case):
    W, (a, b, c) = case
    assert_close(((c @ b) @ a).apply(W), (c @ (b @ a)).apply(W))


def test_channels_compose_and_are_undone():
    """A factor per key channel: composition, a chain of many, the change as factors, and the inverse."""
    draw = Draw(21)
    W, many = draw.normal(3, 5), draw.write(2, 5, 3, 7, retain=0.9)
    many = Write(*many.tensors(), 0.9, 0.2 + 0.8 * draw.uniform(7, 5))
    each = [Write(*(x[i] for x in many.tensors()), 0.9, many.channels[i]) for i in range(7)]
    expected, composed = W, Write.identity(5, 3, dtype=W.dtype)
    for write in each:
        expected, composed = write.apply(expected), write @ composed
    retained, (keys, values, gain) = 0.9 * W * many.channels[0], each[0].tensors()
    assert_close(each[0].apply(W), retained + (values - keys @ retained.mT).mT @ gain)
    assert_close(composed.apply(W), expected)
    assert_close(chain(many).apply(W), expected)
    assert_close(composed.inverse().apply(expected), W, 1e-8)
    assert_close(W + each[0].delta(W).dense(), each[0].apply(W))
    forgets = Write(*each[1].tensors(), 1.0, torch.tensor([1.0, 0, 1, 1, 1], dtype=W.dtype))
    assert_errors((NumericalError, "write_forgets_everything", lambda: forgets @ each[0]))


@given(writes(1))
def test_identity_is_neutral(case):
    W, (write,) = case
    nothing = Write.identity(write.d_k, write.d_v, dtype=W.dtype)
    assert_close(nothing.apply(W), W, 0.0)
    assert_close((nothing @ write).apply(W), write.apply(W), 0.0)
    assert_close((write @ nothing).apply(W), write.apply(W), 0.0)


@given(writes(1))
def test_zero_gain_only_retains(case):
    W, (write,) = case
    silent = Write(write.keys, write.values, torch.zeros_like(write.gain), write.retain)
    assert_close(silent.apply(W), write.retain * W)


@given(writes(1))
def test_delta_is_the_change(case):
    W, (write,) = case
    change = write.delta(W)
    assert_close(W + change.dense(), write.apply(W))
    assert change.rank == write.rows + (0 if write.retain == 1.0 else min(W.shape))


@given(writes(1))
def test_compact_is_the_same_map(case):
    W, (write,) = case
    assert_close(write.compact().apply(W), write.apply(W))


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 12), st.integers(0, 3), st.integers(1, 8))
def test_chain_is_the_fold_of_its_writes(seed, count, chunk, rows, d_k):
    draw = Draw(seed)
    batch = draw.write(rows, d_k, 3, count, retain=draw.uniform(count))
    W = expected = draw.normal(3, d_k)
    for i in range(count):
        expected = Write(batch.keys[i], batch.values[i], batch.gain[i], batch.retain[i]).apply(expected)
    assert_close(chain(batch, chunk=chunk).apply(W), expected)


@pytest.mark.parametrize("retain", [1.0, 0.8, 0.0])
def test_chain_with_a_constant_retain(retain):
    draw = Draw(1)
    batch = draw.write(1, 6, 3, 10, retain=retain)
    W = expected = draw.normal(3, 6)
    for i in range(10):
        expected = Write(batch.keys[i], batch.values[i], batch.gain[i], retain).apply(expected)
    for chunk in (1, 3, 4, 64):
        assert_close(chain(batch, chunk=chunk).apply(W), expected)


def test_chain_runs_along_the_last_batch_dimension():
    draw = Draw(13)
    batch = draw.write(1, 5, 3, 2, 3, 7, retain=draw.uniform(2, 3, 7))  # sequences of seven writes
    W = draw.normal(2, 3, 3, 5)
    whole = chain(batch, chunk=2)
    assert whole.batch_shape == (2, 3)
    one = chain(Write(batch.keys[1, 2], batch.values[1, 2], batch.gain[1, 2], batch.retain[1, 2]))
    assert_close(whole.apply(W)[1, 2], one.apply(W[1, 2]))
    assert chain(draw.write(1, 5, 3, 2, 0)).batch_shape == (2,)


def test_chain_of_nothing_changes_nothing():
    draw = Draw(3)
    W = draw.normal(3, 5)
    empty = draw.write(1, 5, 3, 0)
    assert_close(chain(empty).apply(W), W, 0.0)
    fading = Write(empty.keys, empty.values, empty.gain, torch.ones(0, dtype=W.dtype))
    assert_close(chain(fading).apply(W), W, 0.0)


def test_one_write_broadcasts_over_many_memories():
    draw = Draw(4)
    W, write = draw.normal(7, 4, 5), draw.write(2, 5, 4)
    assert_close(write.apply(W), torch.stack([write.apply(w) for w in W]))
    many = draw.write(2, 5, 4, 7, retain=draw.uniform(7))
    one = W[0]
    assert many.apply(one).shape == (7, 4, 5)
    assert_close(many.delta(one).dense() + one, many.apply(one))
    assert_close((many @ write).apply(W), many.apply(write.apply(W)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """Computed in float32 or better: against float64 on the same rounded inputs only the result's rounding remains."""
    draw = Draw(5, dtype)
    W, a, b = draw.normal(4, 200), draw.write(50, 200, 4, retain=0.9), draw.write(50, 200, 4)
    W64, a64, b64 = W.double(), doubled(a), doubled(b)
    once = (2 if dtype.itemsize == 2 else 16) * torch.finfo(dtype).eps
    for got, expected in (
        (a.apply(W), a64.apply(W64)),
        (a.compact().gain, a64.compact().gain),
        ((b @ a).gain, (b64 @ a64).gain),
        ((b @ a).values, (b64 @ a64).values),
        (a.delta(W).left, a64.delta(W64).left),
        (LowRank(a.keys.mT, a.gain).dense(), LowRank(a64.keys.mT, a64.gain).dense()),
        (a.inverse().gain, a64.inverse().gain) if dtype.itemsize > 2 else (W, W64),
    ):
        assert got.dtype == dtype
        assert_close(got, expected, once)
    cut = a.delta(W)
    exact = LowRank(cut.left.double(), cut.right.double()).truncate(4).dense()
    assert_close(cut.truncate(4).dense(), exact, 4 * once)
    gentle = Write(a.keys, a.values, a.gain / 4, a.retain)  # far from erasing anything, so half precision can undo it
    undone = gentle.inverse().apply(gentle.apply(W))
    assert undone.dtype == dtype
    assert_close(undone, W64, 16 * once)


def test_a_write_in_float32_keeps_a_bfloat16_memory_bfloat16():
    draw = Draw(6, torch.float32)
    W, write = draw.normal(4, 5).bfloat16(), draw.write(2, 5, 4)
    assert write.apply(W).dtype == torch.bfloat16
    assert write.delta(W).dense().dtype == torch.float32, "the change itself is not rounded"


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_vmap_is_batching(batch):
    draw = Draw(7)
    W, a, b = draw.normal(*batch, 4, 5), draw.write(2, 5, 4, *batch, retain=draw.uniform(*batch)), draw.write(1, 5, 4)

    def both(memory, keys, values, gain, retain):
        first = Write(keys, values, gain, retain)
        return (b @ first).apply(memory), first.delta(memory).dense(), first.inverse().apply(memory)

    mapped = both
    for _ in batch:
        mapped = torch.vmap(mapped)
    got = mapped(W, a.keys, a.values, a.gain, a.retain)
    expected = (b @ a).apply(W), a.delta(W).dense(), a.inverse().apply(W)
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e)


@pytest.mark.parametrize("batch", BATCHES)
def test_truncation_is_the_best_of_its_rank(batch):
    draw = Draw(8)
    product = LowRank(draw.normal(*batch, 9, 6), draw.normal(*batch, 6, 7))
    u, s, vh = torch.linalg.svd(product.dense(), full_matrices=False)
    for rank in (0, 1, 3, 6, 20):
        best = (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]
        cut = product.truncate(rank)
        assert cut.rank == min(rank, 6)
        assert_close(cut.dense(), best)


def test_truncating_nothing():
    empty = LowRank(torch.zeros(4, 0), torch.zeros(0, 5))
    assert_close(empty.truncate(2).dense(), torch.zeros(4, 5))


def test_bad_writes_are_refused():
    draw = Draw(9)
    k, v, g = draw.normal(2, 5), draw.normal(2, 4), draw.normal(2, 5)
    assert_errors(
        (ShapeError, "wrong_width", lambda: Write(k, v, draw.normal(2, 6))),
        (ShapeError, "row_counts_differ", lambda: Write(k, draw.normal(3, 4), g)),
        (ShapeError, "not_broadcastable", lambda: Write(draw.normal(3, 2, 5), v, draw.normal(2, 2, 5))),
        (ShapeError, "too_few_dimensions", lambda: Write(k[0], v[0], g[0])),
        (InputError, "not_a_tensor", lambda: Write(k.tolist(), v, g)),
        (InputError, "not_floating_point", lambda: Write(k.long(), v, g)),
        (InputError, "not_floating_point", lambda: Write(k.to(torch.complex64), v, g)),
        (InputError, "not_floating_point", lambda: Write(k, v > 0, g)),
        (InputError, "not_finite", lambda: Write(k, v.index_fill(0, torch.tensor(0), float("nan")), g)),
        (InputError, "not_finite", lambda: Write(k, v, g * float("inf"))),
        (InputError, "not_finite", lambda: Write(k, v, g, float("nan"))),
    )


def test_bad_memories_and_compositions_are_refused():
    draw = Draw(10)
    write, several = draw.write(2, 5, 4), draw.write(2, 5, 4, 3)
    assert_errors(
        (ShapeError, "memory_does_not_match", lambda: write.apply(draw.normal(5, 4))),
        (InputError, "not_finite", lambda: write.apply(draw.normal(4, 5) * float("nan"))),
        (InputError, "not_floating_point", lambda: write.apply(torch.zeros(4, 5, dtype=torch.long))),
        (ShapeError, "not_broadcastable", lambda: several.apply(draw.normal(2, 4, 5))),
        (ShapeError, "writes_do_not_match", lambda: write @ draw.write(2, 6, 4)),
        (ShapeError, "not_broadcastable", lambda: several @ draw.write(2, 5, 4, 2)),
        (ShapeError, "single_write", lambda: chain(write)),
        (InputError, "invalid_chunk", lambda: chain(several, chunk=0)),
        (InputError, "negative_rank", lambda: LowRank(draw.normal(4, 2), draw.normal(2, 5)).truncate(-1)),
        (ShapeError, "factors_do_not_match", lambda: LowRank(draw.normal(4, 2), draw.normal(3, 5))),
        (ShapeError, "not_broadcastable", lambda: LowRank(draw.normal(3, 4, 2), draw.normal(2, 2, 5))),
    )
    with pytest.raises(TypeError):
        write @ draw.normal(5, 5)


def test_a_write_leaves_the_memory_it_is_applied_to():
    draw = Draw(10)
    memory, write = draw.normal(4, 5), draw.write(2, 5, 4)
    before = memory.clone()
    write.apply(memory)
    assert torch.equal(memory, before)


def test_a_gain_may_be_the_solution_of_a_closed_form():
    draw = Draw(9)
    keys, values = draw.normal(3, 6), draw.normal(3, 4)
    for solution in (
        ridge(keys, draw.moment(6)),
        equality(keys),
        null_space(keys, NullSpace.smallest(draw.moment(6), 0.5)),
    ):
        assert Write(keys, values, solution).gain is solution.value


def test_half_precision_retains_do_not_drift():
    """200 factors of 0.99: multiplied in bfloat16 they would end 5 % off."""
    alpha = torch.tensor(0.99, dtype=torch.bfloat16)
    k = torch.zeros(1, 3, dtype=torch.bfloat16)
    step = Write(k, k, k, alpha)
    composed = step
    for _ in range(199):
        composed = step @ composed
    assert float(composed.retain) == pytest.approx(float(alpha) ** 200, rel=1e-4)
    assert float(chain(Write(k.expand(200, 1, 3), k, k, alpha.expand(200))).retain) == pytest.approx(
        float(alpha) ** 200, rel=1e-4
    )


def test_gradients():
    draw = Draw(16)
    k, v, g, W = (draw.normal(*s).requires_grad_() for s in ((3, 2), (3, 4), (3, 2), (4, 2)))
    r = (0.5 + draw.uniform()).requires_grad_()
    for result in (
        lambda k, v, g, r, W: Write(k, v, g, r).apply(W),
        lambda k, v, g, r, W: Write(k, v, g, r).delta(W).dense(),
        lambda k, v, g, r, W: Write(k, v, g, r).compact().apply(W),
        lambda k, v, g, r, W: Write(k, v, g, r).inverse().apply(W),
        lambda k, v, g, r, W: (Write(k, v, g, r) @ Write(g, v, k, 0.5)).apply(W),
        lambda k, v, g, r, W: LowRank(W, g.mT).truncate(1).dense(),
    ):
        assert torch.autograd.gradcheck(result, (k, v, g, r, W))


def test_compiled_writes_agree():
    draw = Draw(17)
    W, write = draw.normal(4, 5), draw.write(2, 5, 4)
    compiled = torch.compile(lambda W, k, v, g: Write(k, v, g, 0.9).apply(W), backend="eager", fullgraph=True)
    assert_close(compiled(W, *write.tensors()), Write(*write.tensors(), retain=0.9).apply(W))
