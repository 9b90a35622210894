"""A decay per key channel, and probes that are not keys: everything about a chunk that needs scores.

With G the products of decays since a chunk's start, x_q = q, x_p = ε p, and s_ij = x_i · (G_i/G_j ⊙ k_j),

    P = tril(s of queries)          T = (I + tril(s of probes, −1))⁻¹

    q_read = q ⊙ G        p_read = ε p ⊙ G        k_end = k ⊙ G_C/G        totals = G_C

of which the last four let the walks of `forward` and `backward` run as they do with one decay per token.

G_i/G_j cannot be taken apart into G_i and 1/G_j, which overflows. So scores are computed level by level: a chunk is two
halves, each half two quarters, and so on down to single tokens. At each level, every token of a second half meets those
of the first half beside it, and both factors are taken relative to the middle, the end of the first half:

    G_i/G_j = (G_i/G_middle) (G_middle/G_j)

No exponent is positive, a decay of any size is right, and one product of two tiles gives a level of the whole chunk,
of which a mask leaves the pairs of the level.

The gradients follow the derivation in `rebind.ops.chunked.backend`. That of a decay at t is a sum over the pairs
j < t ≤ i, without differences: at each level those with t in the second half (`channel_rows`, over i ≥ t), and those
with t in the first half (`channel_columns`, over j < t); then the pairs of a token and the first or the last state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rebind.ops.triton.places import chunk_at, chunks_in_use, load_rows, load_tile, store_rows, store_tile
from rebind.ops.triton.prepare import FLOOR, _inverses


@triton.jit
def _erase(erase, begin, start, length, head, H, C: tl.constexpr):
    """Load ε [C] of a chunk."""
    token = start + tl.arange(0, C)
    return tl.load(erase + (begin + token) * H + head, mask=token < length, other=0.0).to(tl.float32)


@triton.jit
def _halves(sums, begin, start, length, head, H, shift, D_K: tl.constexpr, kat, BK: tl.constexpr, C: tl.constexpr):
    """Return what is left from the first of two halves of 2^shift tokens to a token of the second, and from a token of
    the first to its end; 0 for tokens of the other half. `sums` are the running sums of ln d in each chunk."""
    c = load_rows(sums, begin, start, length, head, H, D_K, kat, BK, C)
    i, column = tl.arange(0, C), kat + tl.arange(0, BK)
    ends = ((i >> (shift + 1)) << (shift + 1)) + (1 << shift) - 1  # of the first halves
    at = sums + ((begin + start) * H + head) * D_K + (ends[:, None] * (H * D_K) + column[None, :])
    # Where the sequence ends earlier, there is no second half.
    middle = tl.load(at, mask=(start + ends < length)[:, None] & (column < D_K)[None, :], other=0.0)
    second = ((i >> shift) & 1 == 1)[:, None]
    left = tl.exp(tl.minimum(tl.where(second, c - middle, middle - c), 0.0).to(tl.float32))
    return tl.where(second, left, 0.0), tl.where(second, 0.0, left)


@triton.jit
def _same(shift, C: tl.constexpr):
    """Return which pairs [C, C] are in the same block of 2^shift tokens."""
    i = tl.arange(0, C)
    return (i[:, None] >> shift) == (i[None, :] >> shift)


@triton.jit
def _summed(mask, x, acc, kind: tl.constexpr, PRECISION: tl.constexpr):
    """Add to acc, for each row, the sum of those rows of x that the mask [C, C] chooses."""
    return tl.dot(tl.where(mask, 1.0, 0.0).to(kind), x.to(kind), acc=acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G"])
def prepare_channels(
    q,
    k,
    probe,
    log_decay,
    erase,
    products,
    systems,
    sums,
    q_read,
    p_read,
    k_end,
    totals,
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
    LEVELS: tl.constexpr,
    ERASE: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per chunk and head: P, the system that T inverts, and scaled queries, probes and keys."""
    chunk, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    if chunk < chunks_in_use(first, NT, N, PACKED):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        here = (row * NT + chunk).to(tl.int64) * H + head
        start = number * C
        dtype = k.dtype.element_ty
        i = tl.arange(0, C)
        P = tl.zeros([C, C], tl.float32)
        A = tl.zeros([C, C], tl.float32)
        if ERASE:
            eps = _erase(erase, begin, start, length, head, H, C)
        for kat in tl.range(0, D_K, BK, num_stages=1):
            column = kat + tl.arange(0, BK)
            logs = tl.maximum(load_rows(log_decay, begin, start, length, head, H, D_K, kat, BK, C).to(WIDE), FLOOR)
            c = tl.cumsum(logs, 0)
            last = tl.sum(logs, 0)
            store_rows(sums, c, begin, start, length, head, H, D_K, kat, BK, C)
            tl.debug_barrier()  # other threads read them
            tl.store(totals + here * D_K + column, tl.exp(last.to(tl.float32)), mask=column < D_K)
            since = tl.exp(c.to(tl.float32))
            b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            store_rows(q_read, b_q.to(tl.float32) * since, begin, start, length, head, H, D_K, kat, BK, C)
            left = tl.exp((last[None, :] - c).to(tl.float32))
            store_rows(k_end, b_k.to(tl.float32) * left, begin, start, length, head, H, D_K, kat, BK, C)
            if ERASE:
                b_p = load_rows(probe, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                x_p = eps[:, None] * b_p.to(tl.float32)
                store_rows(p_read, x_p * since, begin, start, length, head, H, D_K, kat, BK, C)
            P += tl.where(i[:, None] == i[None, :], tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)[:, None], 0.0)
            for shift in tl.range(0, LEVELS, num_stages=1):
                later, sooner = _halves(sums, begin, start, length, head, H, shift, D_K, kat, BK, C)
                b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                y = tl.trans((b_k.to(tl.float32) * sooner).to(dtype))
                b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                s_q = tl.dot((b_q.to(tl.float32) * later).to(dtype), y, input_precision=PRECISION)
                P += tl.where(_same(shift + 1, C), s_q, 0.0)
                if ERASE:
                    b_p = load_rows(probe, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                    later *= eps[:, None]
                    s_p = tl.dot((b_p.to(tl.float32) * later).to(dtype), y, input_precision=PRECISION)
                    A += tl.where(_same(shift + 1, C), s_p, 0.0)
        store_tile(products, P, here, 0, 0, C, C, C, C)
        if ERASE:
            store_tile(systems, A, here, 0, 0, C, C, C, C)


@triton.jit(do_not_specialize=["NT", "N", "H"])
def invert(systems, inverses, first, NT, N, H, C: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr):
    """One program per chunk and head: T = (I + A)⁻¹ in two halves, as `prepare` does."""
    chunk, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    HALF: tl.constexpr = C // 2
    LEVELS: tl.constexpr = 5 if HALF == 32 else 4
    if chunk < chunks_in_use(first, NT, N, PACKED):
        place = (row * NT + chunk).to(tl.int64) * H + head
        i = tl.arange(0, HALF)
        square = i[:, None] * C + i[None, :]
        below = i[:, None] > i[None, :]
        A = (systems + place * (C * C)) + square
        A11 = tl.load(A, mask=below, other=0.0)
        A21 = tl.load(A + HALF * C)
        A22 = tl.load(A + HALF * C + HALF, mask=below, other=0.0)
        D1, corner, D2 = _inverses(A11, A21, A22, i, tl.float32, LEVELS, PRECISION)
        to = inverses.dtype.element_ty
        inverse = (inverses + place * (C * C)) + square
        tl.store(inverse, D1.to(to))
        tl.store(inverse + HALF, tl.zeros([HALF, HALF], tl.float32).to(to))
        tl.store(inverse + HALF * C, (-corner).to(to))
        tl.store(inverse + HALF * C + HALF, D2.to(to))


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G"])
def channel_rows(
    q,
    k,
    v,
    probe,
    sums,
    erase,
    write,
    written,
    states,
    d_out,
    d_written,
    dq,
    dp,
    dv,
    d_erase,
    d_write,
    d_products,
    d_systems,
    slopes,
    boundaries,
    first,
    owner,
    T,
    NT,
    N,
    H,
    G,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a token reads of earlier ones, for one chunk of a head: Q̄, P̄, V̄, ε̄, η̄, and part of the decays' gradient."""
    chunk, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    if chunk < chunks_in_use(first, NT, N, PACKED):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        here = (row * NT + chunk).to(tl.int64) * H + head
        start = number * C
        dtype = k.dtype.element_ty
        kind: tl.constexpr = tl.bfloat16 if k.dtype.element_ty == tl.bfloat16 else tl.float32
        i = tl.arange(0, C)
        token = start + i
        flat = (begin + token) * H + head
        d_P = tl.zeros([C, C], tl.float32)
        d_A = tl.zeros([C, C], tl.float32)
        d_eta = tl.zeros([C], tl.float32)
        for part in tl.range(0, D_V, BV, num_stages=1):
            b_do = load_rows(d_out, begin, start, length, head, H, D_V, part, BV, C)
            b_dr = load_rows(d_written, begin, start, length, head, H, D_V, part, BV, C)
            b_u = load_rows(written, begin, start, length, head, H, D_V, part, BV, C)
            d_P = tl.dot(b_do, tl.trans(b_u), acc=d_P, input_precision=PRECISION)
            if ERASE:
                d_A = tl.dot(b_dr, tl.trans(b_u), acc=d_A, input_precision=PRECISION)
            if WRITE:
                b_v = load_rows(v, begin, start, length, head, H, D_V, part, BV, C)
                d_eta += tl.sum(b_v.to(tl.float32) * b_dr.to(tl.float32), 1)
                eta = tl.load(write + flat, mask=token < length, other=0.0).to(tl.float32)
                store_rows(dv, b_dr.to(tl.float32) * eta[:, None], begin, start, length, head, H, D_V, part, BV, C)
        same = tl.sum(tl.where(i[:, None] == i[None, :], d_P, 0.0), 1)
        p = tl.where(i[:, None] >= i[None, :], d_P, 0.0).to(dtype)
        store_tile(d_products, p, here, 0, 0, C, C, C, C)
        if ERASE:
            a = tl.where(i[:, None] > i[None, :], -d_A, 0.0).to(dtype)
            store_tile(d_systems, a, here, 0, 0, C, C, C, C)
            eps = _erase(erase, begin, start, length, head, H, C)
            d_eps = tl.zeros([C], tl.float32)

        for kat in tl.range(0, D_K, BK, num_stages=1):
            c = load_rows(sums, begin, start, length, head, H, D_K, kat, BK, C)
            d_q = tl.zeros([C, BK], tl.float32)
            d_p = tl.zeros([C, BK], tl.float32)
            for part in tl.range(0, D_V, BV, num_stages=1):
                b_do = load_rows(d_out, begin, start, length, head, H, D_V, part, BV, C)
                b_s = load_tile(states, here, kat, part, D_K, D_V, BK, BV)
                d_q = tl.dot(b_do, tl.trans(b_s), acc=d_q, input_precision=PRECISION)
                if ERASE:
                    b_dr = load_rows(d_written, begin, start, length, head, H, D_V, part, BV, C)
                    d_p = tl.dot(b_dr, tl.trans(b_s), acc=d_p, input_precision=PRECISION)
            since = tl.exp(c.to(tl.float32))
            b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            d_q *= since
            z = b_q.to(tl.float32) * d_q
            if ERASE:
                b_p = load_rows(probe, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                d_p *= -since
                z += eps[:, None] * b_p.to(tl.float32) * d_p
            slope = tl.zeros([C, BK], tl.float32)
            d_q += same[:, None] * b_k.to(tl.float32)
            for level in tl.range(0, LEVELS, num_stages=1):
                shift = LEVELS - 1 - level
                pairs = _same(shift + 1, C)
                if DECAY:  # of the level before, whose halves are the blocks of this one: apart from its products
                    slope = _summed(pairs & (i[:, None] <= i[None, :]), z, slope, kind, PRECISION)
                later, sooner = _halves(sums, begin, start, length, head, H, shift, D_K, kat, BK, C)
                b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                y = (b_k.to(tl.float32) * sooner).to(dtype)
                more = tl.dot(tl.where(pairs, p, 0.0).to(dtype), y, input_precision=PRECISION) * later
                d_q += more
                b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                z = b_q.to(tl.float32) * more
                if ERASE:
                    b_p = load_rows(probe, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                    more = tl.dot(tl.where(pairs, a, 0.0).to(dtype), y, input_precision=PRECISION) * later
                    d_p += more
                    z += eps[:, None] * b_p.to(tl.float32) * more
            store_rows(dq, d_q, begin, start, length, head, H, D_K, kat, BK, C)
            if DECAY:
                store_rows(slopes, slope + z, begin, start, length, head, H, D_K, kat, BK, C)
            if ERASE:
                store_rows(dp, eps[:, None] * d_p, begin, start, length, head, H, D_K, kat, BK, C)
                b_p = load_rows(probe, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                d_eps += tl.sum(b_p.to(tl.float32) * d_p, 1)
        if ERASE:
            tl.store(d_erase + flat, d_eps.to(d_erase.dtype.element_ty), mask=token < length)
        if WRITE:
            tl.store(d_write + flat, d_eta.to(d_write.dtype.element_ty), mask=token < length)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G"])
def channel_columns(
    q,
    k,
    probe,
    log_decay,
    sums,
    erase,
    written,
    states,
    d_states,
    d_products,
    d_systems,
    slopes,
    dk,
    d_log_decay,
    boundaries,
    first,
    owner,
    T,
    NT,
    N,
    H,
    G,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What later tokens read of a token, for one chunk of a head: K̄, and the gradient of the decays."""
    chunk, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    if chunk < chunks_in_use(first, NT, N, PACKED):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        here = (row * NT + chunk).to(tl.int64) * H + head
        start = number * C
        dtype = k.dtype.element_ty
        kind: tl.constexpr = tl.bfloat16 if k.dtype.element_ty == tl.bfloat16 else tl.float32
        i = tl.arange(0, C)
        p = load_tile(d_products, here, 0, 0, C, C, C, C)
        same = tl.sum(tl.where(i[:, None] == i[None, :], p, 0.0).to(tl.float32), 1)
        if ERASE:
            a = load_tile(d_systems, here, 0, 0, C, C, C, C)
            eps = _erase(erase, begin, start, length, head, H, C)
        for kat in tl.range(0, D_K, BK, num_stages=1):
            c = load_rows(sums, begin, start, length, head, H, D_K, kat, BK, C)
            column = kat + tl.arange(0, BK)
            end = tl.minimum(start + C, length) - 1
            last = tl.load(sums + ((begin + end) * H + head) * D_K + column, mask=column < D_K, other=0.0)
            d_k = tl.zeros([C, BK], tl.float32)
            end_product = tl.zeros([BK], tl.float32)  # pairs of the first state and the end
            for part in tl.range(0, D_V, BV, num_stages=1):
                b_u = load_rows(written, begin, start, length, head, H, D_V, part, BV, C)
                b_ds = load_tile(d_states, here, kat, part, D_K, D_V, BK, BV)
                d_k = tl.dot(b_u, tl.trans(b_ds), acc=d_k, input_precision=PRECISION)
                if DECAY:
                    b_s = load_tile(states, here, kat, part, D_K, D_V, BK, BV)
                    end_product += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
            d_k *= tl.exp((last[None, :] - c).to(tl.float32))
            b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            slope = tl.zeros([C, BK], tl.float32)
            z = b_k.to(tl.float32) * d_k
            d_k += same[:, None] * b_q.to(tl.float32)
            for level in tl.range(0, LEVELS, num_stages=1):
                shift = LEVELS - 1 - level
                pairs = _same(shift + 1, C)
                if DECAY:  # of the level before
                    slope = _summed(pairs & (i[:, None] > i[None, :]), z, slope, kind, PRECISION)
                later, sooner = _halves(sums, begin, start, length, head, H, shift, D_K, kat, BK, C)
                b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                x = (b_q.to(tl.float32) * later).to(dtype)
                more = tl.dot(tl.trans(tl.where(pairs, p, 0.0).to(dtype)), x, input_precision=PRECISION)
                if ERASE:
                    b_p = load_rows(probe, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                    x = (eps[:, None] * b_p.to(tl.float32) * later).to(dtype)
                    links = tl.trans(tl.where(pairs, a, 0.0).to(dtype))
                    more = tl.dot(links, x, acc=more, input_precision=PRECISION)
                more *= sooner
                d_k += more
                b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                z = b_k.to(tl.float32) * more
            store_rows(dk, d_k, begin, start, length, head, H, D_K, kat, BK, C)
            if DECAY:
                slope += load_rows(slopes, begin, start, length, head, H, D_K, kat, BK, C)
                slope += (end_product * tl.exp(last.to(tl.float32)))[None, :]
                logs = load_rows(log_decay, begin, start, length, head, H, D_K, kat, BK, C)
                slope = tl.where(logs.to(tl.float32) > FLOOR, slope, 0.0)
                store_rows(d_log_decay, slope, begin, start, length, head, H, D_K, kat, BK, C)
