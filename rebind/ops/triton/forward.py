"""The states of a sequence, one chunk after another, and the outputs with them.

    U  = T (diag(η) V − diag(ε γ) K S)
    O  = diag(γ) Q S + P U
    S' = γ_C S + Kᵀ diag(γ_C/γ) U

With a decay per channel, q, k and the probe are the scaled rows of `channels`, and the numbers per token fall away:
U = T (diag(η) V − p_read S), O = q_read S + P U, S' = diag(totals) S + k_endᵀ U.

A program holds some columns of one head's state in registers and walks along its sequence or one segment of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rebind.ops.triton.places import load_rows, load_tile, sequence_at, store_rows, store_tile


@triton.jit
def load_numbers(table, place, row: tl.constexpr, C: tl.constexpr):
    """Load a row of a chunk's table: γ, γ_C/γ, ε γ, ε, η."""
    return tl.load(table + place * (5 * C) + row * C + tl.arange(0, C))


@triton.jit(do_not_specialize=["T", "NT", "H", "G", "segment"])
def walk_forward(
    q,
    k,
    v,
    probe,
    totals,
    write,
    inverses,
    products,
    table,
    state,
    out,
    written,
    states,
    final,
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
    WRITE: tl.constexpr,
    INITIAL: tl.constexpr,
    OUTPUT: tl.constexpr,
    KEEP: tl.constexpr,
    MAP: tl.constexpr,
    PACKED: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (block of columns, sequence and head, segment of `segment` chunks).

    KEEP stores U, where it is not V, and each chunk's first state, for the backward pass. MAP computes, instead of the
    outputs, what a segment does to any state, S' = M S + N: the first columns start from zero and give N, D_K further
    ones start from the identity, write nothing, and give M. `state` and `final` are [N, segments, H, columns, D_K].
    """
    block, sequence_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, head = sequence_head // H, sequence_head % H
    begin, length, first_chunk = sequence_at(n, boundaries, first, T, NT, PACKED)
    dtype = k.dtype.element_ty
    count = tl.cdiv(length, C)
    low = part * segment
    high = tl.minimum(low + segment, count)
    COLUMNS: tl.constexpr = D_V + D_K if MAP else D_V
    place = ((n * tl.num_programs(2) + part).to(tl.int64) * H + head) * (COLUMNS * D_K)
    row = tl.arange(0, BK)
    blocks: tl.constexpr = (D_V + BV - 1) // BV
    writes = True
    local = block * BV
    source = local  # the columns of V; M's are others, as many as D_K, and have none
    shift = 0
    if MAP:
        writes = block < blocks
        local = tl.where(writes, block, block - blocks) * BV
        source = tl.where(writes, local, 0)
        shift = tl.where(writes, 0, D_V)
    column = local + tl.arange(0, BV)
    limit = D_V
    if MAP:
        limit = tl.where(writes, D_V, D_K)
    inside = (row < D_K)[:, None] & (column < limit)[None, :]
    where = place + (shift + column)[None, :] * D_K + row[:, None]
    S = tl.zeros([BK, BV], tl.float32)
    if MAP:
        S = tl.where((row[:, None] == column[None, :]) & (block >= blocks), 1.0, 0.0)
    if INITIAL:
        S = tl.load(state + where, mask=inside, other=0.0).to(tl.float32)

    for number in tl.range(low, high, num_stages=STAGES):
        here = (first_chunk + number) * H + head
        b_k = load_rows(k, begin, number * C, length, head // G, H // G, D_K, 0, BK, C)
        b_v = load_rows(v, begin, number * C, length, head, H, D_V, source, BV, C)
        s = S.to(dtype)
        U = b_v.to(tl.float32)
        if WRITE:
            if CHANNELS:
                token = number * C + tl.arange(0, C)
                eta = tl.load(write + (begin + token) * H + head, mask=token < length, other=0.0)
                U *= eta.to(tl.float32)[:, None]
            else:
                U *= load_numbers(table, here, 4, C)[:, None]
        if MAP:
            U = tl.where(writes, U, 0.0)
        if KEEP:
            store_tile(states, s, here, 0, local, D_K, D_V, BK, BV)
        if ERASE:
            if CHANNELS:
                b_probe = load_rows(probe, begin, number * C, length, head // G, H // G, D_K, 0, BK, C)
                U -= tl.dot(b_probe, s, input_precision=PRECISION)
            else:
                U -= load_numbers(table, here, 2, C)[:, None] * tl.dot(b_k, s, input_precision=PRECISION)
        if SOLVE:
            b_t = load_tile(inverses, here, 0, 0, C, C, C, C)
            U = tl.dot(b_t, U.to(dtype), input_precision=PRECISION)
        if OUTPUT:
            b_q = load_rows(q, begin, number * C, length, head // G, H // G, D_K, 0, BK, C)
            b_p = load_tile(products, here, 0, 0, C, C, C, C)
            u = U.to(dtype)
            if KEEP and (ERASE or WRITE):  # else it is V
                store_rows(written, u, begin, number * C, length, head, H, D_V, local, BV, C)
            answer = tl.dot(b_q, s, input_precision=PRECISION)
            if DECAY and not CHANNELS:
                answer *= load_numbers(table, here, 0, C)[:, None]
            answer = tl.dot(b_p, u, acc=answer, input_precision=PRECISION)
            store_rows(out, answer, begin, number * C, length, head, H, D_V, local, BV, C)
        if CHANNELS:
            S *= tl.load(totals + here * D_K + row, mask=row < D_K, other=0.0)[:, None]
        elif DECAY:
            U *= load_numbers(table, here, 1, C)[:, None]
            S *= tl.load(table + here * (5 * C) + C - 1)
        S = tl.dot(tl.trans(b_k), U.to(dtype), acc=S, input_precision=PRECISION)
    tl.store(final + where, S, mask=inside)
