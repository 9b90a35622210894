"""A decay per key channel, and probes that are not keys: everything about a chunk that needs scores.

With G the products of decays since a chunk's start, x_q = q, x_p = ε p, and s_ij = x_i · (G_i/G_j ⊙ k_j),

    P = tril(s of queries)          T = (I + tril(s of probes, −1))⁻¹

    q_read = q ⊙ G        p_read = ε p ⊙ G        k_end = k ⊙ G_C/G        totals = G_C

of which the last four let the walks of `forward` and `backward` run as they do with one decay per token. Chunks are
processed in blocks of 16 tokens, the least that tensor cores take. Between two blocks, both factors are taken relative
to the start of the later one; inside a block, between its halves, quarters and eighths. So no exponent is positive, and
a decay of any size is right.

The gradients follow the derivation in `rebind.ops.chunked.backend`, those of decays that in `rebind.ops.chunked.decay`:
a decay in block b lies between a token of b and earlier ones (`channel_rows`), between a token of b and later ones
(`channel_columns`), or between two that are both outside of b (`outside`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rebind.ops.triton.places import chunk_at, chunks_in_use, load_rows, load_tile, store_rows
from rebind.ops.triton.prepare import FLOOR, _inverses


@triton.jit
def _logs(log_decay, begin, row, length, head, H, D_K: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr):
    """Load ln d [16, BK] of a block."""
    return tl.maximum(load_rows(log_decay, begin, row, length, head, H, D_K, 0, BK, 16).to(WIDE), FLOOR)


@triton.jit
def _erase(erase, begin, row, length, head, H):
    """Load ε [16] of a block."""
    token = row + tl.arange(0, 16)
    return tl.load(erase + (begin + token) * H + head, mask=token < length, other=0.0).to(tl.float32)


@triton.jit
def _halves(c, m: tl.constexpr, BK: tl.constexpr):
    """Return what is left from the first of two halves of m tokens to a token of the second, and from a token of the
    first to its end; 0 for tokens of the other half. `c` [16, BK] are running sums of ln d."""
    parts = tl.reshape(c, [16 // (2 * m), 2 * m, BK])
    middle = tl.sum(tl.where((tl.arange(0, 2 * m) == m - 1)[None, :, None], parts, 0.0), 1)
    distance = tl.reshape(parts - middle[:, None, :], [16, BK]).to(tl.float32)
    second = ((tl.arange(0, 16) // m) % 2 == 1)[:, None]
    left = tl.exp(tl.where(second, distance, -distance))
    return tl.where(second, left, 0.0), tl.where(second, 0.0, left)


@triton.jit
def _pairs(m: tl.constexpr):
    """Return which pairs [16, 16] are in one block of two halves of m."""
    i = tl.arange(0, 16)
    return (i[:, None] // (2 * m)) == (i[None, :] // (2 * m))


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G"])
def prepare_channels(
    q,
    k,
    probe,
    log_decay,
    erase,
    products,
    systems,
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
    ERASE: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per chunk and head: P, the system that T inverts, and scaled queries, probes and keys."""
    chunk, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    if chunk < chunks_in_use(first, NT, N, PACKED):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        place = (row * NT + chunk).to(tl.int64) * H + head
        dtype = k.dtype.element_ty
        i = tl.arange(0, 16)
        column = tl.arange(0, BK)
        square = i[:, None] * C + i[None, :]
        nothing = tl.zeros([16, 16], tl.float32)
        last = tl.zeros([BK], WIDE)
        for b in tl.static_range(0, C // 16):
            last += tl.sum(_logs(log_decay, begin, number * C + b * 16, length, head, H, D_K, BK, WIDE), 0)
        tl.store(totals + place * D_K + column, tl.exp(last.to(tl.float32)), mask=column < D_K)
        base = tl.zeros([BK], WIDE)
        for r in tl.range(0, C // 16, num_stages=1):
            at = number * C + r * 16
            logs = _logs(log_decay, begin, at, length, head, H, D_K, BK, WIDE)
            c = tl.cumsum(logs, 0)
            since = tl.exp(c.to(tl.float32))
            before = tl.exp(base.to(tl.float32))[None, :]
            b_q = load_rows(q, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
            b_k = load_rows(k, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
            x_q = b_q * since
            store_rows(q_read, x_q * before, begin, at, length, head, H, D_K, 0, BK, 16)
            left = tl.exp(((last - base)[None, :] - c).to(tl.float32))
            store_rows(k_end, b_k * left, begin, at, length, head, H, D_K, 0, BK, 16)
            x_q = x_q.to(dtype)
            if ERASE:
                b_p = load_rows(probe, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
                b_p *= _erase(erase, begin, at, length, head, H)[:, None]
                x_p = b_p * since
                store_rows(p_read, x_p * before, begin, at, length, head, H, D_K, 0, BK, 16)
                x_p = x_p.to(dtype)

            corner = (products + place * (C * C)) + r * 16 * C + square
            system = (systems + place * (C * C)) + r * 16 * C + square
            earlier = tl.zeros([BK], WIDE)
            for s in tl.range(0, r, num_stages=STAGES):
                behind = number * C + s * 16
                logs_s = _logs(log_decay, begin, behind, length, head, H, D_K, BK, WIDE)
                rest = tl.exp(((base - earlier)[None, :] - tl.cumsum(logs_s, 0)).to(tl.float32))
                earlier += tl.sum(logs_s, 0)
                b_ks = load_rows(k, begin, behind, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
                y = tl.trans((b_ks * rest).to(dtype))
                P = tl.dot(x_q, y, input_precision=PRECISION)
                tl.store(corner + s * 16, P.to(products.dtype.element_ty))
                if ERASE:
                    tl.store(system + s * 16, tl.dot(x_p, y, input_precision=PRECISION))
            P = tl.where(i[:, None] == i[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
            A = nothing
            for level in tl.static_range(0, 4):
                later, sooner = _halves(c, 8 >> level, BK)
                y = tl.trans((b_k * sooner).to(dtype))
                s_q = tl.dot((b_q * later).to(dtype), y, input_precision=PRECISION)
                P += tl.where(_pairs(8 >> level), s_q, 0.0)
                if ERASE:
                    s_p = tl.dot((b_p * later).to(dtype), y, input_precision=PRECISION)
                    A += tl.where(_pairs(8 >> level), s_p, 0.0)
            tl.store(corner + r * 16, P.to(products.dtype.element_ty))
            if ERASE:
                tl.store(system + r * 16, A)
            for s in tl.range(r + 1, C // 16, num_stages=1):
                tl.store(corner + s * 16, nothing.to(products.dtype.element_ty))
            base += tl.sum(logs, 0)


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
    log_decay,
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
    slopes,
    outside,
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
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What a token reads of earlier ones, for one chunk of a head: Q̄, P̄, V̄, ε̄, η̄, and part of the decays' gradient."""
    chunk, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    if chunk < chunks_in_use(first, NT, N, PACKED):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        here = (row * NT + chunk).to(tl.int64) * H + head
        dtype = k.dtype.element_ty
        i = tl.arange(0, 16)
        block = tl.arange(0, C // 16)
        column = tl.arange(0, BK)
        out = tl.zeros([C // 16, BK], tl.float32)  # of pairs on both sides of a block
        base = tl.zeros([BK], WIDE)
        for r in tl.range(0, C // 16, num_stages=1):
            at = number * C + r * 16
            token = at + i
            flat = (begin + token) * H + head
            logs = _logs(log_decay, begin, at, length, head, H, D_K, BK, WIDE)
            c = tl.cumsum(logs, 0)
            since = tl.exp(c.to(tl.float32))
            b_q = load_rows(q, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
            b_k = load_rows(k, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
            if ERASE:
                b_p = load_rows(probe, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
                eps = _erase(erase, begin, at, length, head, H)
                x_p = eps[:, None] * b_p

            # What the chunk's first state gives, and links inside of the block.
            d_q = tl.zeros([16, BK], tl.float32)
            d_p = tl.zeros([16, BK], tl.float32)
            l_q = tl.zeros([16, 16], tl.float32)
            l_p = tl.zeros([16, 16], tl.float32)
            d_eta = tl.zeros([16], tl.float32)
            for part in tl.static_range(0, D_V, BV):
                b_do = load_rows(d_out, begin, at, length, head, H, D_V, part, BV, 16)
                b_dr = load_rows(d_written, begin, at, length, head, H, D_V, part, BV, 16)
                b_u = load_rows(written, begin, at, length, head, H, D_V, part, BV, 16)
                b_s = load_tile(states, here, 0, part, D_K, D_V, BK, BV)
                d_q = tl.dot(b_do, tl.trans(b_s), acc=d_q, input_precision=PRECISION)
                l_q = tl.dot(b_do, tl.trans(b_u), acc=l_q, input_precision=PRECISION)
                if ERASE:
                    d_p = tl.dot(b_dr, tl.trans(b_s), acc=d_p, input_precision=PRECISION)
                    l_p = tl.dot(b_dr, tl.trans(b_u), acc=l_p, input_precision=PRECISION)
                if WRITE:
                    b_v = load_rows(v, begin, at, length, head, H, D_V, part, BV, 16)
                    d_eta += tl.sum(b_v.to(tl.float32) * b_dr.to(tl.float32), 1)
                    eta = tl.load(write + flat, mask=token < length, other=0.0).to(tl.float32)
                    scaled = b_dr.to(tl.float32) * eta[:, None]
                    store_rows(dv, scaled, begin, at, length, head, H, D_V, part, BV, 16)
            whole = since * tl.exp(base.to(tl.float32))[None, :]
            d_q *= whole
            y = b_q * d_q
            if ERASE:
                d_p *= -whole
                y += x_p * d_p
            out += tl.where((block < r)[:, None], tl.sum(y, 0)[None, :], 0.0)

            # What earlier blocks give.
            earlier = tl.zeros([BK], WIDE)
            for s in tl.range(0, r, num_stages=STAGES):
                behind = number * C + s * 16
                logs_s = _logs(log_decay, begin, behind, length, head, H, D_K, BK, WIDE)
                rest = tl.exp(((base - earlier)[None, :] - tl.cumsum(logs_s, 0)).to(tl.float32))
                earlier += tl.sum(logs_s, 0)
                b_ks = load_rows(k, begin, behind, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
                left = (b_ks * rest).to(dtype)
                m_q = tl.zeros([16, 16], tl.float32)
                m_p = tl.zeros([16, 16], tl.float32)
                for part in tl.static_range(0, D_V, BV):
                    b_do = load_rows(d_out, begin, at, length, head, H, D_V, part, BV, 16)
                    b_us = load_rows(written, begin, behind, length, head, H, D_V, part, BV, 16)
                    m_q = tl.dot(b_do, tl.trans(b_us), acc=m_q, input_precision=PRECISION)
                    if ERASE:
                        b_dr = load_rows(d_written, begin, at, length, head, H, D_V, part, BV, 16)
                        m_p = tl.dot(b_dr, tl.trans(b_us), acc=m_p, input_precision=PRECISION)
                more = tl.dot(m_q.to(dtype), left, input_precision=PRECISION) * since
                d_q += more
                z = b_q * more
                if ERASE:
                    more = -tl.dot(m_p.to(dtype), left, input_precision=PRECISION) * since
                    d_p += more
                    z += x_p * more
                y += z
                out += tl.where(((block > s) & (block < r))[:, None], tl.sum(z, 0)[None, :], 0.0)
            slope = tl.cumsum(y, 0, reverse=True)

            # What the block's own earlier tokens give.
            d_q += tl.sum(tl.where(i[:, None] == i[None, :], l_q, 0.0), 1)[:, None] * b_k
            for level in tl.static_range(0, 4):
                later, sooner = _halves(c, 8 >> level, BK)
                left = (b_k * sooner).to(dtype)
                more = tl.dot(tl.where(_pairs(8 >> level), l_q, 0.0).to(dtype), left, input_precision=PRECISION) * later
                d_q += more
                z = b_q * more
                if ERASE:
                    more = (
                        -tl.dot(tl.where(_pairs(8 >> level), l_p, 0.0).to(dtype), left, input_precision=PRECISION)
                        * later
                    )
                    d_p += more
                    z += x_p * more
                after = ((i[:, None] // (8 >> level)) == (i[None, :] // (8 >> level))) & (i[:, None] <= i[None, :])
                slope = tl.dot(tl.where(after, 1.0, 0.0), z, acc=slope, input_precision=PRECISION)
            store_rows(dq, d_q, begin, at, length, head, H, D_K, 0, BK, 16)
            store_rows(slopes, slope, begin, at, length, head, H, D_K, 0, BK, 16)
            if ERASE:
                store_rows(dp, eps[:, None] * d_p, begin, at, length, head, H, D_K, 0, BK, 16)
                d_eps = tl.sum(b_p * d_p, 1)
                tl.store(d_erase + flat, d_eps.to(d_erase.dtype.element_ty), mask=token < length)
            if WRITE:
                tl.store(d_write + flat, d_eta.to(d_write.dtype.element_ty), mask=token < length)
            base += tl.sum(logs, 0)
        there = outside + here * (C // 16 * D_K) + block[:, None] * D_K + column[None, :]
        tl.store(there, out, mask=(column < D_K)[None, :] & (block >= 0)[:, None])


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G"])
def channel_columns(
    q,
    k,
    probe,
    log_decay,
    erase,
    written,
    states,
    d_states,
    d_out,
    d_written,
    slopes,
    outside,
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
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What later tokens read of a token, for one chunk of a head: K̄, and the gradient of the decays."""
    chunk, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    if chunk < chunks_in_use(first, NT, N, PACKED):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        here = (row * NT + chunk).to(tl.int64) * H + head
        dtype = k.dtype.element_ty
        i = tl.arange(0, 16)
        column = tl.arange(0, BK)
        last = tl.zeros([BK], WIDE)
        for b in tl.static_range(0, C // 16):
            last += tl.sum(_logs(log_decay, begin, number * C + b * 16, length, head, H, D_K, BK, WIDE), 0)
        kept = tl.zeros([BK], tl.float32)  # pairs of the first state and the end, and of earlier blocks and the end
        if DECAY:
            for part in tl.static_range(0, D_V, BV):
                b_s = load_tile(states, here, 0, part, D_K, D_V, BK, BV)
                b_ds = load_tile(d_states, here, 0, part, D_K, D_V, BK, BV)
                kept += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
            kept *= tl.exp(last.to(tl.float32))
        base = tl.zeros([BK], WIDE)
        for s in tl.range(0, C // 16, num_stages=1):
            at = number * C + s * 16
            logs = _logs(log_decay, begin, at, length, head, H, D_K, BK, WIDE)
            c = tl.cumsum(logs, 0)
            b_q = load_rows(q, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
            b_k = load_rows(k, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
            if ERASE:
                x_p = load_rows(probe, begin, at, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
                x_p *= _erase(erase, begin, at, length, head, H)[:, None]

            # What the chunk's end gives, and links inside of the block, transposed: of a later to an earlier token.
            d_k = tl.zeros([16, BK], tl.float32)
            l_q = tl.zeros([16, 16], tl.float32)
            l_p = tl.zeros([16, 16], tl.float32)
            for part in tl.static_range(0, D_V, BV):
                b_u = load_rows(written, begin, at, length, head, H, D_V, part, BV, 16)
                b_do = load_rows(d_out, begin, at, length, head, H, D_V, part, BV, 16)
                b_ds = load_tile(d_states, here, 0, part, D_K, D_V, BK, BV)
                d_k = tl.dot(b_u, tl.trans(b_ds), acc=d_k, input_precision=PRECISION)
                l_q = tl.dot(b_u, tl.trans(b_do), acc=l_q, input_precision=PRECISION)
                if ERASE:
                    b_dr = load_rows(d_written, begin, at, length, head, H, D_V, part, BV, 16)
                    l_p = tl.dot(b_u, tl.trans(b_dr), acc=l_p, input_precision=PRECISION)
            d_k *= tl.exp(((last - base)[None, :] - c).to(tl.float32))
            y = b_k * d_k
            ends = tl.sum(y, 0)

            # What later blocks give.
            between = tl.sum(logs, 0)  # from the start of this block to that of block r
            for r in tl.range(s + 1, C // 16, num_stages=STAGES):
                ahead = number * C + r * 16
                logs_r = _logs(log_decay, begin, ahead, length, head, H, D_K, BK, WIDE)
                since = tl.exp(tl.cumsum(logs_r, 0).to(tl.float32))
                b_qr = load_rows(q, begin, ahead, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
                m_q = tl.zeros([16, 16], tl.float32)
                m_p = tl.zeros([16, 16], tl.float32)
                for part in tl.static_range(0, D_V, BV):
                    b_u = load_rows(written, begin, at, length, head, H, D_V, part, BV, 16)
                    b_do = load_rows(d_out, begin, ahead, length, head, H, D_V, part, BV, 16)
                    m_q = tl.dot(b_u, tl.trans(b_do), acc=m_q, input_precision=PRECISION)
                    if ERASE:
                        b_dr = load_rows(d_written, begin, ahead, length, head, H, D_V, part, BV, 16)
                        m_p = tl.dot(b_u, tl.trans(b_dr), acc=m_p, input_precision=PRECISION)
                more = tl.dot(m_q.to(dtype), (b_qr * since).to(dtype), input_precision=PRECISION)
                if ERASE:
                    b_pr = load_rows(probe, begin, ahead, length, head // G, H // G, D_K, 0, BK, 16).to(tl.float32)
                    b_pr *= _erase(erase, begin, ahead, length, head, H)[:, None]
                    more -= tl.dot(m_p.to(dtype), (b_pr * since).to(dtype), input_precision=PRECISION)
                more *= tl.exp((between[None, :] - c).to(tl.float32))
                d_k += more
                y += b_k * more
                between += tl.sum(logs_r, 0)
            sooner = tl.where(i[:, None] > i[None, :], 1.0, 0.0)  # from j to a decay after it
            slope = tl.dot(sooner, y, input_precision=PRECISION)

            # What the block's own later tokens give.
            d_k += tl.sum(tl.where(i[:, None] == i[None, :], l_q, 0.0), 1)[:, None] * b_q
            for level in tl.static_range(0, 4):
                later, before = _halves(c, 8 >> level, BK)
                x_q = (b_q * later).to(dtype)
                more = tl.dot(tl.where(_pairs(8 >> level), l_q, 0.0).to(dtype), x_q, input_precision=PRECISION)
                if ERASE:
                    x_l = (x_p * later).to(dtype)
                    more -= tl.dot(tl.where(_pairs(8 >> level), l_p, 0.0).to(dtype), x_l, input_precision=PRECISION)
                more *= before
                d_k += more
                crossed = ((i[:, None] // (8 >> level)) == (i[None, :] // (8 >> level))) & (i[:, None] > i[None, :])
                slope = tl.dot(tl.where(crossed, 1.0, 0.0), b_k * more, acc=slope, input_precision=PRECISION)
            store_rows(dk, d_k, begin, at, length, head, H, D_K, 0, BK, 16)
            if DECAY:
                slope += load_rows(slopes, begin, at, length, head, H, D_K, 0, BK, 16)
                beside = tl.load(outside + (here * (C // 16) + s) * D_K + column, mask=column < D_K, other=0.0)
                slope += (beside + kept)[None, :]
                slope = tl.where(logs > FLOOR, slope, 0.0)
                store_rows(d_log_decay, slope, begin, at, length, head, H, D_K, 0, BK, 16)
            kept += ends
            base += tl.sum(logs, 0)
