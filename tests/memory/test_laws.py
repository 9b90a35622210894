"""The laws of the algebra, in float64. docs/algebra.md names each of these tests."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from rebind import Write, chain
from rebind.errors import NumericalError
from rebind.memory import (
    FastWeightProgrammer,
    NullSpace,
    Recursive,
    equality,
    equality_block,
    factor,
    get_rule,
    null_space,
    ridge,
    sum_normalize,
)
from rebind.memory.dense import Dense
from rebind.memory.hopfield import Classical, Modern
from rebind.memory.ttt import Linear, run
from tests.support import BATCHES, SIZES, Draw, assert_close, raises, recurrence

FEASIBLE = [(n, d) for n, d in SIZES if n <= d]


# 1. Writes compose.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_writes_compose(n, d, batch):
    draw = Draw(1)
    W = draw.normal(*batch, 4, d)
    first = draw.write(n, d, 4, *batch, retain=draw.uniform(*batch))
    second = draw.write(3, d, 4, *batch, retain=0.7)
    assert_close((second @ first).apply(W), second.apply(first.apply(W)))


@pytest.mark.parametrize("batch", BATCHES)
def test_composition_is_associative(batch):
    draw = Draw(2)
    a, b, c = (draw.write(n, 5, 4, *batch, retain=draw.uniform(*batch)) for n in (2, 7, 1))
    left, right = (c @ b) @ a, c @ (b @ a)
    for name in ("keys", "values", "gain", "retain"):
        assert_close(getattr(left, name), getattr(right, name))


@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 100])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_deltanet_chunk_is_the_composition_of_its_writes(rule, length, chunk):
    draw = Draw(3)
    keys, values = draw.unit(length, 6), draw.normal(length, 4)
    gates = {"beta": draw.uniform(length)}
    if rule == "gated_delta":
        gates["alpha"] = 0.5 + 0.5 * draw.uniform(length)
    W = expected = draw.normal(4, 6)
    for t in range(length):
        alpha = gates["alpha"][t] if "alpha" in gates else 1.0
        expected = recurrence(expected, keys[t], values[t], alpha, gates["beta"][t], gates["beta"][t])
    composed = chain(get_rule(rule).write(keys, values, **gates), chunk=chunk)
    assert composed.rows <= max(length, 2 * 6)
    assert_close(composed.apply(W), expected)


def test_a_batch_of_edits_is_a_chunk():
    """Blocks of several rows chain like single tokens do: editing in batches is the same algebra."""
    draw = Draw(4)
    batches = draw.write(3, 16, 4, 5)  # five batches of three edits
    W = expected = draw.normal(4, 16)
    for i in range(5):
        expected = Write(batches.keys[i], batches.values[i], batches.gain[i]).apply(expected)
    assert_close(chain(batches).apply(W), expected)


# 2. MEMIT tends to the equality solution, which at n = 1 is ROME.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "d"), FEASIBLE)
def test_ridge_tends_to_equality(n, d, batch):
    draw = Draw(5)
    keys, moment = draw.normal(*batch, n, d), draw.moment(d)
    exact = equality(keys, moment).value
    gaps = [float((ridge(keys, moment, lam).value - exact).abs().amax()) if n else 0.0 for lam in (1e-2, 1e-4, 1e-6)]
    assert gaps[2] <= 1e-3
    assert gaps[1] <= 0.02 * gaps[0] + 1e-14, "the distance shrinks in proportion to λ"
    assert gaps[2] <= 0.02 * gaps[1] + 1e-9


def test_one_row_of_equality_is_rome():
    """ROME eq. 17: Λ = (v − Wk) / ((C⁻¹k)ᵀk), Ŵ = W + Λ(C⁻¹k)ᵀ."""
    draw = Draw(6)
    W, k, v, C = draw.normal(4, 7), draw.normal(7), draw.normal(4), draw.moment(7)
    u = torch.linalg.solve(C, k)
    rome = W + torch.outer((v - W @ k) / (u @ k), u)
    edited = Write(k[None], v[None], equality(k[None], C)).apply(W)
    assert_close(edited, rome)
    assert_close(edited @ k, v)


def test_the_block_system_gives_the_same_lambda():
    """ROME eq. 15, solved as printed for Ŵ and Λ together, against eq. 17."""
    draw = Draw(7)
    W, k, v, C = draw.normal(4, 7), draw.normal(7), draw.normal(4), draw.moment(7)
    u = torch.linalg.solve(C, k)
    block = torch.zeros(8, 8, dtype=W.dtype)
    block[:7, :7], block[:7, 7], block[7, :7] = torch.eye(7, dtype=W.dtype), k, -u
    solved = torch.linalg.solve(block.mT, torch.cat([W, v[:, None]], dim=1).mT).mT
    W_hat, Lambda = solved[:, :7], solved[:, 7]
    assert_close(Lambda, (v - W @ k) / (u @ k))
    assert_close(Write(k[None], v[None], equality_block(k[None], C)).apply(W), W_hat)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "d"), FEASIBLE)
def test_the_block_system_agrees_for_a_batch(n, d, batch):
    draw = Draw(8)
    keys, moment = draw.normal(*batch, n, d), draw.moment(d)
    assert_close(equality_block(keys, moment).value, equality(keys, moment).value, 1e-8)


def test_equality_is_ridge_with_a_ridge_on_its_inner_matrix():
    """EMMET with μ added to K C⁻¹ Kᵀ is MEMIT with λ = μ."""
    draw = Draw(9)
    keys, moment, mu = draw.normal(3, 7), draw.moment(7), 0.3
    solved = torch.linalg.solve(moment, keys.mT).mT  # K C⁻¹
    emmet = torch.linalg.solve(solved @ keys.mT + mu * torch.eye(3, dtype=keys.dtype), solved)
    assert_close(emmet, ridge(keys, moment, mu).value)


# 3. Woodbury and the direct solve agree, and so do the primal and the dual form.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_woodbury_is_the_direct_solve(n, d, batch):
    draw = Draw(10)
    C, keys, right = draw.moment(d, *batch), draw.normal(*batch, n, d), draw.normal(*batch, d, 3)
    updated = factor(C).plus(keys).solve(right)
    direct = factor(C + keys.mT @ keys).solve(right)
    assert_close(updated.value, direct.value)
    assert_close(updated.value, torch.linalg.inv(C + keys.mT @ keys) @ right)
    assert (updated.method, updated.order) == ("woodbury", n)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("known", [True, False], ids=["moment", "identity"])
def test_primal_is_dual(n, d, batch, known):
    draw = Draw(11)
    keys = draw.normal(*batch, n, d)
    moment = draw.moment(d) if known else None
    primal, dual = (ridge(keys, moment, 0.7, form=form) for form in ("primal", "dual"))
    C = 0.7 * (moment if known else torch.eye(d, dtype=keys.dtype))
    assert_close(primal.value, keys @ torch.linalg.inv(C + keys.mT @ keys))
    assert_close(dual.value, primal.value)
    assert (primal.method, dual.method) == ("primal", "dual")
    assert (primal.order, dual.order) == (d, n)


def test_the_ridge_write_minimizes_memits_objective():
    """MEMIT eq. 9, with C₀ in place of the old keys: its gradient vanishes at the write's result."""
    draw = Draw(12)
    W, keys, values, C = draw.normal(4, 6), draw.normal(9, 6), draw.normal(9, 4), draw.moment(6)
    edited = Write(keys, values, ridge(keys, C, 2.5)).apply(W).requires_grad_()
    change = edited - W
    loss = (keys @ edited.mT - values).square().sum() + 2.5 * (change @ C * change).sum()
    (slope,) = torch.autograd.grad(loss, edited)
    assert_close(slope, torch.zeros_like(slope))


def test_the_equality_write_disturbs_old_keys_least():
    """Among all memories that answer exactly, it moves the old answers least: a Lagrange condition."""
    draw = Draw(13)
    W, keys, values, C = draw.normal(4, 6), draw.normal(3, 6), draw.normal(3, 4), draw.moment(6)
    change = Write(keys, values, equality(keys, C)).delta(W).dense()
    assert_close((W + change) @ keys.mT, values.mT)
    allowed = draw.normal(4, 6)
    allowed = allowed - torch.linalg.lstsq(keys.mT, allowed.mT).solution.mT @ keys  # keeps the answers
    cost = lambda move: (move @ C * move).sum()
    for step in (1e-3, -1e-3, 1.0):
        assert cost(change + step * allowed) > cost(change)


# 4. Delta with unit keys is a ridge write.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("lam", [1e-3, 0.5, 3.0])
def test_delta_with_unit_keys_is_ridge(lam, batch):
    draw = Draw(14)
    W, k, v = draw.normal(*batch, 4, 6), draw.unit(*batch, 1, 6), draw.normal(*batch, 1, 4)
    delta = get_rule("delta").write(k[..., 0, :], v[..., 0, :], beta=1 / (1 + lam)).apply(W)
    assert_close(delta, Write(k, v, ridge(k, lam * torch.eye(6, dtype=k.dtype))).apply(W))


@pytest.mark.parametrize("batch", BATCHES)
def test_longhorn_is_ridge_for_keys_of_any_norm(batch):
    """Its step is the one-row ridge write with C = I/β: law 4 without unit keys."""
    draw = Draw(15)
    W, k, v, beta = draw.normal(*batch, 4, 6), 3 * draw.normal(*batch, 1, 6), draw.normal(*batch, 1, 4), 0.8
    longhorn = get_rule("longhorn").write(k[..., 0, :], v[..., 0, :], beta=beta).apply(W)
    assert_close(longhorn, Write(k, v, ridge(k, None, 1 / beta)).apply(W))


def test_many_passes_of_delta_tend_to_equality():
    """β = 1 and unit keys project on one constraint after another (Kaczmarz); the limit is C = I's equality write."""
    draw = Draw(16)
    W, keys, values = draw.normal(4, 8), draw.unit(3, 8), draw.normal(3, 4)
    once = chain(get_rule("delta").write(keys, values))
    expected = Write(keys, values, equality(keys)).apply(W)
    result = W
    for _ in range(400):
        result = once.apply(result)
    assert float((once.apply(W) - expected).abs().max()) > 1e-2
    assert_close(result, expected, 1e-9)


# 5. Sequential ridge writes are one batch exactly when C accumulates.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 0, 9), (40, 3)])
def test_recursive_writes_are_one_batch(sizes, batch):
    draw = Draw(17)
    C, W = draw.moment(6), draw.normal(*batch, 4, 6)
    parts = [(draw.normal(*batch, n, 6), draw.normal(*batch, n, 4)) for n in sizes]
    state, remembered, forgetful = Recursive.start(C, 2.0), W, W
    for keys, values in parts:
        gain, state = state.step(keys)
        remembered = Write(keys, values, gain).apply(remembered)
        forgetful = Write(keys, values, ridge(keys, C, 2.0)).apply(forgetful)
    keys, values = (torch.cat(rows, dim=-2) for rows in zip(*parts, strict=True))
    together = Write(keys, values, ridge(keys, C, 2.0)).apply(W)
    assert_close(remembered, together)
    assert float((forgetful - together).abs().max()) > 1e-3


# 6. Each fast rule is the stationary point of its objective: tests/memory/test_rules.py.


def test_longhorn_needs_the_plus_sign():
    """With the minus sometimes printed, the printed update is not where the objective's gradient vanishes."""
    draw = Draw(18)
    previous, k, v = draw.normal(4, 6), draw.normal(6), draw.normal(4)
    slopes = []
    for sign in (1, -1):
        S = get_rule("longhorn").write(k, v, beta=0.8).apply(previous).requires_grad_()
        loss = (S - previous).square().sum() + sign * 0.8 * (S @ k - v).square().sum()
        slopes.append(float(torch.autograd.grad(loss, S)[0].abs().max()))
    assert slopes[0] < 1e-12 < 0.1 < slopes[1]


# 7. Test-time training of a linear model.


@pytest.mark.parametrize("batch", BATCHES)
def test_batch_gradient_descent_is_linear_attention(batch):
    """TTT, Theorem 1: f(x) = Wx, one batch, η = 1/2, W₀ = 0."""
    draw = Draw(19)
    q, k, v = draw.normal(*batch, 9, 5), draw.normal(*batch, 9, 5), draw.normal(*batch, 9, 4)
    trained = run(Linear(), Linear().initial(5, 4, dtype=q.dtype), q, k, v, rate=0.5, mini_batch=None)
    causal = torch.ones(9, 9, dtype=q.dtype).tril()
    assert_close(trained.out, (q @ k.mT * causal) @ v)
    assert_close(trained.state[0], v.mT @ k)


def test_online_training_is_the_delta_rule():
    """With rate η it is delta with β = 2η."""
    draw = Draw(20)
    W, q, k, v = draw.normal(4, 5), draw.normal(9, 5), draw.unit(9, 5), draw.normal(9, 4)
    rate = 0.5 * draw.uniform(9)
    trained = run(Linear(), (W,), q, k, v, rate=rate, mini_batch=1)
    expected = chain(get_rule("delta").write(k, v, beta=2 * rate)).apply(W)
    assert_close(trained.state[0], expected)


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_a_mini_batch_of_training_is_one_write(size):
    draw = Draw(21)
    W, q, k, v = draw.normal(4, 5), draw.normal(9, 5), draw.normal(9, 5), draw.normal(9, 4)
    expected = W
    for begin in range(0, 9, size):
        here = slice(begin, begin + size)
        expected = Linear().write(k[here], v[here], rate=0.05).apply(expected)
    trained = run(Linear(), (W,), q, k, v, rate=0.05, mini_batch=size)
    assert_close(trained.state[0], expected)


# 8. Schlag et al., appendix B.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_delta_rewrites_one_key_and_the_gate_fades_the_other(beta, batch):
    draw = Draw(22)
    k1, k2 = torch.linalg.qr(draw.normal(*batch, 6, 2))[0].unbind(-1)
    v1, v2, v3 = draw.normal(3, *batch, 4)
    read = lambda W, k: (W @ k.unsqueeze(-1)).squeeze(-1)
    W = v1.unsqueeze(-1) * k1.unsqueeze(-2) + v2.unsqueeze(-1) * k2.unsqueeze(-2)  # eq. 53
    gated = get_rule("rfa").write(k2, v3, beta=beta).apply(W)
    delta = get_rule("delta").write(k2, v3, beta=beta).apply(W)
    mixed = (1 - beta) * v2 + beta * v3
    assert_close(read(gated, k2), mixed)
    assert_close(read(delta, k2), mixed)
    assert_close(read(gated, k1), (1 - beta) * v1)
    assert_close(read(delta, k1), v1)


# 9. Sum normalization.


@pytest.mark.parametrize("batch", BATCHES)
def test_sum_normalized_keys_balance_a_column_update(batch):
    """Schlag et al. eq. 51: column i gains k_i·v and loses Σ_j k_i k_j w_j; with Σk = 1 the weights are equal."""
    draw = Draw(23)
    W, k, v = draw.normal(*batch, 4, 6), sum_normalize(draw.uniform(*batch, 6)), draw.normal(*batch, 4)
    outer = lambda a, b: a.unsqueeze(-1) * b.unsqueeze(-2)
    updated = get_rule("delta").write(k, v).apply(W)
    removed = outer(k, k)  # weight of old column j in new column i
    assert_close(updated, W + outer(v, k) - W @ removed)
    assert_close(removed.sum(-1), k)
    raw = 3 * k
    assert float((outer(raw, raw).sum(-1) - raw).abs().max()) > 0.1


def test_a_constant_memory_is_a_fixed_point_under_sum_normalized_keys():
    """The balance as a consequence: if every column already holds v, writing v changes nothing."""
    draw = Draw(24)
    k, v = sum_normalize(draw.uniform(6)), draw.normal(4)
    W = v[:, None].expand(4, 6)
    assert_close(get_rule("delta").write(k, v, beta=0.4).apply(W), W)


# 10. Hopfield networks.


@pytest.mark.parametrize("batch", [(1,), (3,), (2, 3)])
@pytest.mark.parametrize("count", [1, 4, 6, 9])
@pytest.mark.parametrize("beta", [0.1, 1.0, 8.0])
def test_one_modern_hopfield_step_is_attention(beta, count, batch):
    draw = Draw(25)
    patterns, queries = draw.normal(*batch, count, 6), draw.normal(*batch, 5, 6)
    attended = functional.scaled_dot_product_attention(queries, patterns, patterns, scale=beta)
    assert_close(Modern(patterns.unsqueeze(-3), beta).step(queries), attended)


def test_hebbian_storage_is_the_sum_rule():
    draw = Draw(26)
    patterns = draw.normal(5, 12).sign()
    summed = chain(get_rule("sum").write(patterns / 12, patterns)).apply(torch.zeros(12, 12, dtype=patterns.dtype))
    assert_close(Classical.store(patterns).weights, summed - torch.diag(summed.diagonal()))


# 11. Writes can be undone exactly when they erase nothing.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_a_write_that_erases_nothing_has_an_inverse(n, d, batch):
    draw = Draw(27)
    W = draw.normal(*batch, 4, d)
    write = draw.write(n, d, 4, *batch, retain=0.5 + draw.uniform(*batch))
    assert_close(write.inverse().apply(write.apply(W)), W, 1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(20))
def test_a_full_overwrite_has_none(seed, dtype):
    """Delta at β = 1 with unit keys, and every equality write: GKᵀ = I up to rounding, never beyond it."""
    draw = Draw(seed, dtype)
    keys, values = draw.normal(3, 7), draw.normal(3, 4)
    for write in (
        get_rule("delta").write(draw.unit(6), draw.normal(4), beta=1.0),
        Write(keys, values, equality(keys)),
        Write(keys, values, equality(keys, draw.moment(7))),
    ):
        with raises(NumericalError, "write_erases"):
            write.inverse()
    with raises(NumericalError, "write_forgets_everything"):
        get_rule("mamba2").write(draw.unit(6), draw.normal(4), alpha=0.0).inverse()


# 12. No write needs more rows than the memory has columns.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_a_write_fits_in_as_many_rows_as_keys_are_wide(n, d, batch):
    draw = Draw(29)
    W = draw.normal(*batch, 4, d)
    write = draw.write(n, d, 4, *batch, retain=0.9)
    assert write.compact().rows == min(n, d)
    assert_close(write.compact().apply(W), write.apply(W))


# 13. AlphaEdit is ridge in the coordinates of the null space.


def test_null_space_is_the_published_system():
    """(P(KᵀK + KₚᵀKₚ) + λI) X = P Kᵀ, solved d×d as printed."""
    draw = Draw(30)
    C = draw.spectrum(torch.cat([torch.zeros(5), torch.ones(4)]).double())
    keys, previous = draw.normal(3, 9), draw.normal(2, 9)
    space = NullSpace.below(C)
    P = space.basis @ space.basis.mT
    old = keys.mT @ keys + previous.mT @ previous
    X = torch.linalg.solve(P @ old + 0.7 * torch.eye(9, dtype=P.dtype), P @ keys.mT)
    assert space.size == 5
    assert_close(null_space(keys, space, previous=previous, lam=0.7).value, X.mT)


def test_null_space_leaves_old_keys_alone():
    draw = Draw(31)
    used = draw.orthonormal(4, 9)
    old_keys = draw.normal(30, 4) @ used
    space = NullSpace.below(old_keys.mT @ old_keys)
    W, keys, values = draw.normal(4, 9), draw.normal(3, 9), draw.normal(3, 4)
    edited = Write(keys, values, null_space(keys, space, lam=1e-6)).apply(W)
    assert_close(old_keys @ edited.mT, old_keys @ W.mT)
    assert_close(keys @ edited.mT, values, 1e-4)


def test_null_space_of_everything_is_ridge():
    draw = Draw(32)
    keys = draw.normal(3, 7)
    space = NullSpace.smallest(draw.moment(7), share=1.0)
    assert_close(null_space(keys, space, lam=0.4).value, ridge(keys, None, 0.4).value)


# 14. The fast weight programmer with no squashing is the sum rule.


def test_a_programmer_without_squashing_is_the_sum_rule():
    draw = Draw(33)
    x, slow_a, slow_b = draw.normal(9, 5), draw.normal(4, 5), draw.normal(5, 5)
    out, memory = FastWeightProgrammer(squash=lambda w: w).run(x, slow_a, slow_b)
    written = chain(get_rule("sum").write(x @ slow_b.mT, x @ slow_a.mT))
    assert_close(memory, written.apply(torch.zeros(4, 5, dtype=x.dtype)))
    assert_close(out[-1], memory @ x[-1])


# 15. The linear read is the first-order limit of the dense read.


def test_the_linear_read_is_the_first_order_limit_of_the_dense_read():
    """With rows of weight ε against the empty slot, (read(q) − read(−q)) / 2εβ tends to W q with W = Σ vᵢ kᵢᵀ."""
    draw = Draw(15)
    keys, values, query = draw.unit(6, 4), draw.normal(6, 3), draw.unit(1, 4)
    linear = query @ chain(get_rule("sum").write(keys, values)).apply(torch.zeros(3, 4, dtype=torch.float64)).mT
    errors = []
    for beta in (1e-1, 1e-2, 1e-3):
        empty = beta**2  # ε: the weight of a row against that of the empty slot
        tau = torch.full((6,), -math.log(empty) / beta, dtype=torch.float64)
        dense = Dense(keys, values, tau, beta=beta)
        odd = (dense.read(query) - dense.read(-query)) / (2 * empty * beta)
        errors.append(float((odd - linear).norm() / linear.norm()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4
