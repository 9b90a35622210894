"""One token for every memory of a batch: one kernel, the state read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["H", "G"])
def _decode(
    q,
    k,
    v,
    state,
    log_decay,
    erase,
    write,
    out,
    H,
    G,
    Dk: tl.constexpr,
    Dv: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
):
    """One program a (block of a state's rows, memory): W [Dv, Dk] ← α W + u kᵀ, u = η v − ε α W k; o = W q."""
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = block * BV + tl.arange(0, BV)
    column = tl.arange(0, BK)
    inside = (row < Dv)[:, None] & (column < Dk)[None, :]
    at = state + place * (Dv * Dk) + row[:, None] * Dk + column[None, :]
    key = (place // H * (H // G) + place % H // G) * Dk + column
    W = tl.load(at, mask=inside, other=0.0)
    b_k = tl.load(k + key, mask=column < Dk, other=0.0).to(tl.float32)
    b_q = tl.load(q + key, mask=column < Dk, other=0.0).to(tl.float32)
    u = tl.load(v + place * Dv + row, mask=row < Dv, other=0.0).to(tl.float32)
    if DECAY:
        W *= tl.exp(tl.load(log_decay + place).to(tl.float32))
    if WRITE:
        u *= tl.load(write + place).to(tl.float32)
    if ERASE:
        u -= tl.load(erase + place).to(tl.float32) * tl.sum(W * b_k[None, :], 1)
    W += u[:, None] * b_k[None, :]
    tl.store(at, W, mask=inside)
    tl.store(out + place * Dv + row, tl.sum(W * b_q[None, :], 1).to(out.dtype.element_ty), mask=row < Dv)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
) -> Tensor:
    """The output [B, H, Dv]; `state` [B, H, Dv, Dk] in float32, contiguous, is changed in place."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    log_decay, erase, write = (x if x is None else x.contiguous() for x in (log_decay, erase, write))
    rows, heads, Dv = v.shape
    Dk = k.shape[2]
    out = torch.empty_like(v)
    wide = max(16, triton.next_power_of_2(Dk))
    tall = min(max(16, triton.next_power_of_2(Dv)), max(4096 // wide, 1))
    with torch.cuda.device_of(v):
        _decode[(triton.cdiv(Dv, tall), rows * heads)](
            q, k, v, state, log_decay, erase, write, out, heads, heads // k.shape[1],
            Dk=Dk, Dv=Dv, BK=wide, BV=tall,
            DECAY=log_decay is not None, ERASE=erase is not None, WRITE=write is not None,
        )  # fmt: skip
    return out
