"""The gradients: states walked backwards, then everything else, many chunks at once.

With the notation of `forward.py`, a bar for a gradient, S the state before a chunk and S' the one after it:

    Ū = Pᵀ Ō + diag(γ_C/γ) K S̄'          R̄ = Tᵀ Ū          V̄ = diag(η) R̄
    S̄ = γ_C S̄' + Qᵀ diag(γ) Ō − Kᵀ diag(ε γ) R̄                    (walked backwards; R̄ and S̄' are stored)

    P̄ = tril(Ō Uᵀ ⊙ Γ)          Ā = −tril(R̄ Uᵀ ⊙ Γ, −1)
    Q̄ = diag(γ) Ō Sᵀ + P̄ K
    X = Ā K − diag(γ) R̄ Sᵀ
    K̄ = diag(ε) X + P̄ᵀ Q + Āᵀ diag(ε) K + diag(γ_C/γ) U S̄'ᵀ
    ε̄_i = k_i · x_i          η̄_i = v_i · r̄_i

The gradient of ln α_t is the sum over all pairs that α_t lies between (see `rebind.ops.chunked.decay`): of tokens
i ≥ t and j < t, the entries of P̄ ⊙ QKᵀ + diag(ε) Ā ⊙ KKᵀ; of i and the chunk's first state, those of q·q̄ and ε k·x
that come from S; of j and its end, k·k̄ from S̄'; and γ_C ⟨S, S̄'⟩.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rebind.ops.triton.forward import load_numbers
from rebind.ops.triton.places import chunk_at, chunks_in_use, load_rows, load_tile, sequence_at, store_rows, store_tile
from rebind.ops.triton.prepare import FLOOR


@triton.jit(do_not_specialize=["T", "NT", "H", "G", "segment"])
def walk_backward(
    q,
    k,
    probe,
    totals,
    inverses,
    products,
    table,
    d_out,
    d_final,
    d_written,
    d_states,
    d_state,
    boundaries,
    first,
    T,
    NT,
    H,
    G,
    segment,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    SOLVE: tl.constexpr,
    FINAL: tl.constexpr,
    STORE: tl.constexpr,
    PACKED: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (block of columns, sequence and head, segment). STORE saves R̄ and S̄' for the other kernels."""
    block, sequence_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, head = sequence_head // H, sequence_head % H
    begin, length, first_chunk = sequence_at(n, boundaries, first, T, NT, PACKED)
    dtype = k.dtype.element_ty
    low = part * segment
    high = tl.minimum(low + segment, tl.cdiv(length, C))
    place = ((n * tl.num_programs(2) + part).to(tl.int64) * H + head) * (D_V * D_K)
    row = tl.arange(0, BK)
    local = block * BV
    column = local + tl.arange(0, BV)
    inside = (row < D_K)[:, None] & (column < D_V)[None, :]
    where = place + column[None, :] * D_K + row[:, None]
    dS = tl.zeros([BK, BV], tl.float32)
    if FINAL:
        dS = tl.load(d_final + where, mask=inside, other=0.0).to(tl.float32)

    for back in tl.range(0, high - low, num_stages=STAGES):
        number = high - 1 - back
        here = (first_chunk + number) * H + head
        b_k = load_rows(k, begin, number * C, length, head // G, H // G, D_K, 0, BK, C)
        b_q = load_rows(q, begin, number * C, length, head // G, H // G, D_K, 0, BK, C)
        b_p = load_tile(products, here, 0, 0, C, C, C, C)
        b_do = load_rows(d_out, begin, number * C, length, head, H, D_V, local, BV, C)
        ds = dS.to(dtype)
        if STORE:
            store_tile(d_states, ds, here, 0, local, D_K, D_V, BK, BV)
        dU = tl.dot(b_k, ds, input_precision=PRECISION)
        if DECAY and not CHANNELS:
            dU *= load_numbers(table, here, 1, C)[:, None]
        dU = tl.dot(tl.trans(b_p), b_do, acc=dU, input_precision=PRECISION)
        if SOLVE:
            b_t = load_tile(inverses, here, 0, 0, C, C, C, C)
            dU = tl.dot(tl.trans(b_t), dU.to(dtype), input_precision=PRECISION)
        if STORE:
            store_rows(d_written, dU, begin, number * C, length, head, H, D_V, local, BV, C)
        if CHANNELS:
            dS *= tl.load(totals + here * D_K + row, mask=row < D_K, other=0.0)[:, None]
        elif DECAY:
            dS *= tl.load(table + here * (5 * C) + C - 1)
            b_do = (b_do * load_numbers(table, here, 0, C)[:, None]).to(dtype)
        dS = tl.dot(tl.trans(b_q), b_do, acc=dS, input_precision=PRECISION)
        if ERASE:
            if CHANNELS:
                b_probe = load_rows(probe, begin, number * C, length, head // G, H // G, D_K, 0, BK, C)
                dS = tl.dot(tl.trans(b_probe), (-dU).to(dtype), acc=dS, input_precision=PRECISION)
            else:
                dU *= -load_numbers(table, here, 2, C)[:, None]
                dS = tl.dot(tl.trans(b_k), dU.to(dtype), acc=dS, input_precision=PRECISION)
    tl.store(d_state + where, dS, mask=inside)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G", "run"])
def row_gradients(
    q,
    k,
    v,
    table,
    sums,
    written,
    states,
    d_out,
    d_written,
    dq,
    dk,
    dv,
    d_erase,
    d_write,
    d_products,
    d_erased,
    d_sums,
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
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    SOLVE: tl.constexpr,
    WRITE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What a token does to those before it: one program per run of chunks of a head. dq and dk are per value head.

    It leaves diag(ε) X in dk, P̄ and diag(ε) Ā for `column_gradients`, and in `d_sums` the part of the decays' gradients
    that the chunk's first state gives.
    """
    group, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    lower = i[:, None] >= i[None, :]
    high = tl.minimum((group + 1) * run, chunks_in_use(first, NT, N, PACKED))
    for chunk in tl.range(group * run, high, num_stages=STAGES):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        here = (row * NT + chunk).to(tl.int64) * H + head
        start = number * C
        token = start + i
        mask = token < length
        flat = (begin + token) * H + head
        gamma = load_numbers(table, here, 0, C)
        eps = load_numbers(table, here, 3, C)
        eta = load_numbers(table, here, 4, C)
        g = tl.load(sums + here * C + i)

        dP = tl.zeros([C, C], tl.float32)
        dA = tl.zeros([C, C], tl.float32)
        d_eta = tl.zeros([C], tl.float32)
        for at in tl.static_range(0, D_V, BV):
            b_do = load_rows(d_out, begin, start, length, head, H, D_V, at, BV, C)
            b_u = load_rows(written, begin, start, length, head, H, D_V, at, BV, C)
            dP = tl.dot(b_do, tl.trans(b_u), acc=dP, input_precision=PRECISION)
            if ERASE or WRITE:
                b_dr = load_rows(d_written, begin, start, length, head, H, D_V, at, BV, C)
            if SOLVE:
                dA = tl.dot(b_dr, tl.trans(b_u), acc=dA, input_precision=PRECISION)
            if WRITE:  # else V̄ is R̄
                b_v = load_rows(v, begin, start, length, head, H, D_V, at, BV, C)
                d_eta += tl.sum(b_v.to(tl.float32) * b_dr.to(tl.float32), 1)
                store_rows(dv, b_dr.to(tl.float32) * eta[:, None], begin, start, length, head, H, D_V, at, BV, C)
        ratio = tl.exp(tl.where(lower, g[:, None] - g[None, :], FLOOR * 4).to(tl.float32))
        p = (dP * ratio).to(dtype)
        a = tl.where(i[:, None] > i[None, :], -dA * ratio, 0.0)
        store_tile(d_products, p, here, 0, 0, C, C, C, C)
        if SOLVE:
            store_tile(d_erased, a * eps[:, None], here, 0, 0, C, C, C, C)

        d_read = tl.zeros([C], tl.float32)
        d_eps = tl.zeros([C], tl.float32)
        for kat in tl.static_range(0, D_K, BK):
            b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            b_dq = tl.zeros([C, BK], tl.float32)
            X = tl.zeros([C, BK], tl.float32)
            for at in tl.static_range(0, D_V, BV):
                if D_V > BV:  # else they are still loaded
                    b_do = load_rows(d_out, begin, start, length, head, H, D_V, at, BV, C)
                    if ERASE:
                        b_dr = load_rows(d_written, begin, start, length, head, H, D_V, at, BV, C)
                b_s = load_tile(states, here, kat, at, D_K, D_V, BK, BV)
                b_dq = tl.dot(b_do, tl.trans(b_s), acc=b_dq, input_precision=PRECISION)
                if ERASE:
                    X = tl.dot(b_dr, tl.trans(b_s), acc=X, input_precision=PRECISION)
            b_dq *= gamma[:, None]
            if DECAY:
                b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                d_read += tl.sum(b_q.to(tl.float32) * b_dq, 1)
            b_dq = tl.dot(p, b_k, acc=b_dq, input_precision=PRECISION)
            store_rows(dq, b_dq, begin, start, length, head, H, D_K, kat, BK, C)
            if ERASE:
                X *= -gamma[:, None]
                if DECAY:
                    d_read += eps * tl.sum(b_k.to(tl.float32) * X, 1)
                if SOLVE:
                    X = tl.dot(a.to(dtype), b_k, acc=X, input_precision=PRECISION)
                d_eps += tl.sum(b_k.to(tl.float32) * X, 1)
                store_rows(dk, eps[:, None] * X, begin, start, length, head, H, D_K, kat, BK, C)
        if WRITE:
            tl.store(d_write + flat, d_eta.to(d_write.dtype.element_ty), mask=mask)
        if ERASE:
            tl.store(d_erase + flat, d_eps.to(d_erase.dtype.element_ty), mask=mask)
        if DECAY:
            tl.store(d_sums + here * C + i, tl.cumsum(d_read, 0, reverse=True))


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "G", "run"])
def column_gradients(
    q,
    k,
    log_decay,
    table,
    written,
    states,
    d_states,
    d_products,
    d_erased,
    d_sums,
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
    run,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    SOLVE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What later tokens do to a key and a decay: one program per run of chunks of a head."""
    group, row_head = tl.program_id(0), tl.program_id(1)
    row, head = row_head // H, row_head % H
    i = tl.arange(0, C)
    high = tl.minimum((group + 1) * run, chunks_in_use(first, NT, N, PACKED))
    for chunk in tl.range(group * run, high, num_stages=STAGES):
        begin, length, number = chunk_at(chunk, row, boundaries, first, owner, T, PACKED)
        here = (row * NT + chunk).to(tl.int64) * H + head
        start = number * C
        tail = load_numbers(table, here, 1, C)
        b_p = load_tile(d_products, here, 0, 0, C, C, C, C)
        if SOLVE:
            b_a = load_tile(d_erased, here, 0, 0, C, C, C, C)
        end_product = 0.0  # γ_C ⟨S, S̄'⟩
        wrote = tl.zeros([C], tl.float32)
        for kat in tl.static_range(0, D_K, BK):
            b_dk = tl.zeros([C, BK], tl.float32)
            retained = tl.zeros([BK], tl.float32)  # ⟨S, S̄'⟩, for each row of the state
            for at in tl.static_range(0, D_V, BV):
                b_u = load_rows(written, begin, start, length, head, H, D_V, at, BV, C)
                b_ds = load_tile(d_states, here, kat, at, D_K, D_V, BK, BV)
                b_dk = tl.dot(b_u, tl.trans(b_ds), acc=b_dk, input_precision=PRECISION)
                if DECAY:
                    b_s = load_tile(states, here, kat, at, D_K, D_V, BK, BV)
                    retained += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
            b_dk *= tail[:, None]
            b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            if DECAY:
                end_product += tl.sum(retained, 0) * tl.load(table + here * (5 * C) + C - 1)
                wrote += tl.sum(b_k.to(tl.float32) * b_dk, 1)
            b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
            b_dk = tl.dot(tl.trans(b_p), b_q, acc=b_dk, input_precision=PRECISION)
            if SOLVE:
                b_dk = tl.dot(tl.trans(b_a), b_k, acc=b_dk, input_precision=PRECISION)
            if ERASE:
                b_dk += load_rows(dk, begin, start, length, head, H, D_K, kat, BK, C).to(tl.float32)
            store_rows(dk, b_dk, begin, start, length, head, H, D_K, kat, BK, C)
        if DECAY:
            token = start + i
            flat = (begin + token) * H + head
            pairs = tl.zeros([C, C], tl.float32)
            for kat in tl.static_range(0, D_K, BK):
                if D_K > BK:  # else they are still loaded
                    b_k = load_rows(k, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                    b_q = load_rows(q, begin, start, length, head // G, H // G, D_K, kat, BK, C)
                pairs += b_p.to(tl.float32) * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
                if SOLVE:
                    pairs += b_a.to(tl.float32) * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
            pairs = tl.where(i[:, None] > i[None, :], pairs, 0.0)
            before = tl.where(i[:, None] < i[None, :], 1.0, 0.0)
            crossing = tl.dot(pairs, before, input_precision=PRECISION)  # over j < t
            d_g = tl.sum(tl.where(i[:, None] >= i[None, :], crossing, 0.0), 0)  # over i ≥ t
            d_g += tl.load(d_sums + here * C + i) + end_product
            d_g += tl.sum(tl.where(i[:, None] < i[None, :], wrote[:, None], 0.0), 0)  # over j < t
            alive = tl.load(log_decay + flat, mask=token < length, other=0.0).to(tl.float32) > FLOOR
            slope = tl.where(alive, d_g, 0.0).to(d_log_decay.dtype.element_ty)
            tl.store(d_log_decay + flat, slope, mask=token < length)
