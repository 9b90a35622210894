"""Everything about a chunk that does not depend on the state, for all chunks at once.

    P = tril(Q Kᵀ ⊙ Γ)                           what the output takes of the chunk's own writes
    T = Γ ⊙ (I + tril(diag(ε) K Kᵀ, −1))⁻¹       the writes' effect on one another, where something is erased
    g, γ = exp g, γ_C/γ, ε γ, ε, η               one number per token

with g the running sum of log_decay in the chunk and Γ_ij = exp(g_i − g_j), i ≥ j. The inverse is computed in blocks:
that of two neighboring diagonal blocks D₁, D₂ and the block A below the diagonal is [[D₁, 0], [−D₂ A D₁, D₂]], so
every level costs two products and nothing is ever divided or cancelled. Chunks are processed in halves: a quarter of
the products is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rebind.ops.triton.places import chunk_at, chunks_in_use, load_rows

FLOOR: tl.constexpr = tl.constexpr(-200.0)  # exp of it is 0 in float32: as good as −inf, and differences stay finite
NUMBERS = 5  # rows of a chunk's table: γ, γ_C/γ, ε γ, ε, η


@triton.jit
def _numbers(log_decay, erase, write, at, mask, wide: tl.constexpr):
    """Load (ln α, ε, η) of some tokens; those of no write where there is no token."""
    if log_decay is not None:
        ld = tl.maximum(tl.load(log_decay + at, mask=mask, other=0.0).to(wide), FLOOR)
    else:
        ld = tl.where(mask, 0.0, 0.0).to(wide)
    if erase is not None:
        eps = tl.load(erase + at, mask=mask, other=0.0).to(tl.float32)
    else:
        eps = tl.where(mask, 0.0, 0.0)
    if write is not None:
        eta = tl.load(write + at, mask=mask, other=0.0).to(tl.float32)
    else:
        eta = tl.where(mask, 1.0, 0.0)
    return ld, eps, eta


@triton.jit
def _ratios(gi, gj, i, j):
    """Return Γ: exp(g_i − g_j) where i ≥ j, 0 elsewhere."""
    return tl.exp(tl.where(i[:, None] >= j[None, :], gi[:, None] - gj[None, :], FLOOR * 4).to(tl.float32))


@triton.jit
def _at_most_2(eps1, eps2, K11, K22):
    """Return whether no ε is negative and max ε · max ‖k‖² ≤ 2. The largest product of keys is of a key with itself."""
    least = tl.minimum(tl.min(eps1), tl.min(eps2))
    most = tl.maximum(tl.max(eps1), tl.max(eps2)) * tl.maximum(tl.max(K11), tl.max(K22))
    return (least >= 0.0) & (most <= 2.0)


@triton.jit
def _times(x, y, kind: tl.constexpr, PRECISION: tl.constexpr):
    """Return x y, its factors converted to `kind`."""
    return tl.dot(x.to(kind), y.to(kind), input_precision=PRECISION)


@triton.jit
def _inverses(A11, A21, A22, i, kind: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the blocks of (I + A)⁻¹ on the diagonal and, except for its sign, the one below."""
    D1, D2 = _unit_lower_inverses(A11, A22, i, kind, LEVELS, PRECISION)
    return D1, _times(_times(D2, A21, kind, PRECISION), D1, kind, PRECISION), D2


@triton.jit
def _unit_lower_inverses(A, B, i, kind: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + A)⁻¹ and (I + B)⁻¹ of strictly lower triangular A, B of size 2^LEVELS, in blocks of 2, 4, 8, …"""
    row, column = i[:, None], i[None, :]
    below = row > column
    pairs = below & (row >> 1 == column >> 1)
    D = tl.where(row == column, 1.0, tl.where(pairs, -A, 0.0))
    E = tl.where(row == column, 1.0, tl.where(pairs, -B, 0.0))
    for level in tl.static_range(1, LEVELS):
        # Blocks of 2^level are done: what joins two of them is next.
        joins = below & (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        D -= _times(_times(D, tl.where(joins, A, 0.0), kind, PRECISION), D, kind, PRECISION)
        E -= _times(_times(E, tl.where(joins, B, 0.0), kind, PRECISION), E, kind, PRECISION)
    return D, E


@triton.jit
def _store_numbers(table, sums, place, first, g, last, eps, eta, C: tl.constexpr, ROWS: tl.constexpr):
    """Store g in its own precision, and γ, γ_C/γ, ε γ, ε, η as rows of a table."""
    at = first + tl.arange(0, ROWS)
    tl.store((sums + place * C) + at, g)
    gamma = tl.exp(g.to(tl.float32))
    here = (table + place * (5 * C)) + at
    tl.store(here, gamma)
    tl.store(here + C, tl.exp((last - g).to(tl.float32)))
    tl.store(here + 2 * C, eps * gamma)
    tl.store(here + 3 * C, eps)
    tl.store(here + 4 * C, eta)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G", "run"])
def prepare_solve(
    q,
    k,
    log_decay,
    erase,
    write,
    inverses,
    products,
    table,
    sums,
    boundaries,
    first,
    owner,
    T,
    NT,
    N,
    H,
    G,
    run,
    D_K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per run of chunks of a head, for rules that erase."""
    group, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    HALF: tl.constexpr = C // 2
    LEVELS: tl.constexpr = 5 if HALF == 32 else 4
    heads = H // G
    to = inverses.dtype.element_ty
    i = tl.arange(0, HALF)
    below = i[:, None] > i[None, :]
    square = i[:, None] * C + i[None, :]
    zero = tl.zeros([HALF, HALF], tl.float32).to(to)
    high = tl.minimum((group + 1) * run, chunks_in_use(first, NT, N, PACKED))
    for chunk in tl.range(group * run, high, num_stages=STAGES):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        place = (row * NT + chunk).to(tl.int64) * H + head
        k1 = load_rows(k, begin, number * C, length, head // G, heads, D_K, 0, BK, HALF)
        k2 = load_rows(k, begin, number * C + HALF, length, head // G, heads, D_K, 0, BK, HALF)
        q1 = load_rows(q, begin, number * C, length, head // G, heads, D_K, 0, BK, HALF)
        q2 = load_rows(q, begin, number * C + HALF, length, head // G, heads, D_K, 0, BK, HALF)
        t1 = number * C + i
        t2 = t1 + HALF
        ld1, eps1, eta1 = _numbers(log_decay, erase, write, (begin + t1) * H + head, t1 < length, WIDE)
        ld2, eps2, eta2 = _numbers(log_decay, erase, write, (begin + t2) * H + head, t2 < length, WIDE)
        g1 = tl.cumsum(ld1, 0)
        middle = tl.sum(ld1, 0)
        g2 = tl.cumsum(ld2, 0) + middle
        last = middle + tl.sum(ld2, 0)
        _store_numbers(table, sums, place, 0, g1, last, eps1, eta1, C, HALF)
        _store_numbers(table, sums, place, HALF, g2, last, eps2, eta2, C, HALF)
        ratio11 = _ratios(g1, g1, i, i)
        ratio21 = tl.exp((g2[:, None] - g1[None, :]).to(tl.float32))
        ratio22 = _ratios(g2, g2, i, i)

        P = (products + place * (C * C)) + square
        tl.store(P, (tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * ratio11).to(to))
        tl.store(P + HALF, zero)
        tl.store(P + HALF * C, (tl.dot(q2, tl.trans(k1), input_precision=PRECISION) * ratio21).to(to))
        tl.store(P + HALF * C + HALF, (tl.dot(q2, tl.trans(k2), input_precision=PRECISION) * ratio22).to(to))

        K11 = tl.dot(k1, tl.trans(k1), input_precision=PRECISION)
        K22 = tl.dot(k2, tl.trans(k2), input_precision=PRECISION)
        A11, A22 = tl.where(below, eps1[:, None] * K11, 0.0), tl.where(below, eps2[:, None] * K22, 0.0)
        A21 = eps2[:, None] * tl.dot(k2, tl.trans(k1), input_precision=PRECISION)
        # While 0 ≤ ε‖k‖² ≤ 2 no I − ε k kᵀ enlarges anything, and an entry of the inverse, ε_i k_iᵀ (…) k_j, is at most
        # max ε · max ‖k‖². Up to 2 float16 holds it, with as many digits as TF32.
        if HALVES and _at_most_2(eps1, eps2, K11, K22):
            D1, corner, D2 = _inverses(A11, A21, A22, i, tl.float16, LEVELS, PRECISION)
        else:
            D1, corner, D2 = _inverses(A11, A21, A22, i, tl.float32, LEVELS, PRECISION)
        inverse = (inverses + place * (C * C)) + square
        tl.store(inverse, (D1 * ratio11).to(to))
        tl.store(inverse + HALF, zero)
        tl.store(inverse + HALF * C, (-corner * ratio21).to(to))
        tl.store(inverse + HALF * C + HALF, (D2 * ratio22).to(to))


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G"])
def prepare_plain(
    q,
    k,
    log_decay,
    erase,
    write,
    products,
    table,
    sums,
    boundaries,
    first,
    owner,
    T,
    NT,
    N,
    H,
    G,
    D_K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per chunk and head, where there is nothing to solve: no erasing, or one mini-batch per chunk."""
    chunk, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    if chunk < chunks_in_use(first, NT, N, PACKED):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        place = (row * NT + chunk).to(tl.int64) * H + head
        i = tl.arange(0, C)
        t = number * C + i
        ld, eps, eta = _numbers(log_decay, erase, write, (begin + t) * H + head, t < length, WIDE)
        g = tl.cumsum(ld, 0)
        _store_numbers(table, sums, place, 0, g, tl.sum(ld, 0), eps, eta, C, C)
        b_k = load_rows(k, begin, number * C, length, head // G, H // G, D_K, 0, BK, C)
        b_q = load_rows(q, begin, number * C, length, head // G, H // G, D_K, 0, BK, C)
        P = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * _ratios(g, g, i, i)
        tl.store((products + place * (C * C)) + (i[:, None] * C + i[None, :]), P.to(products.dtype.element_ty))
