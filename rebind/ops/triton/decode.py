"""One token for every memory of a batch, in one kernel that reads and writes the state once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.triton.calls import launch


@triton.jit(do_not_specialize=["H", "G"])
def _decode(
    q,
    k,
    v,
    state,
    log_decay,
    erase,
    write,
    probe,
    erase_key,
    out,
    H,
    G,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ERASE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """One program per (block of a state's rows, memory): W [D_V, D_K] ← W~ + η v kᵀ − ε (W~ p) eᵀ, then o = W q.

    With BEFORE, W p in place of W~ p.
    """
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = block * BV + tl.arange(0, BV)
    column = tl.arange(0, BK)
    inside = (row < D_V)[:, None] & (column < D_K)[None, :]
    at = state + place * (D_V * D_K) + row[:, None] * D_K + column[None, :]
    key = (place // H * (H // G) + place % H // G) * D_K + column
    W = tl.load(at, mask=inside, other=0.0)
    b_k = tl.load(k + key, mask=column < D_K, other=0.0).to(tl.float32)
    b_q = tl.load(q + key, mask=column < D_K, other=0.0).to(tl.float32)
    u = tl.load(v + place * D_V + row, mask=row < D_V, other=0.0).to(tl.float32)
    b_p = b_k
    if probe is not None:
        b_p = tl.load(probe + key, mask=column < D_K, other=0.0).to(tl.float32)
    old = tl.sum(W * b_p[None, :], 1) if BEFORE else u
    if CHANNELS:
        logs = tl.load(log_decay + place * D_K + column, mask=column < D_K, other=0.0)
        W *= tl.exp(logs.to(tl.float32))[None, :]
    elif log_decay is not None:
        W *= tl.exp(tl.load(log_decay + place).to(tl.float32))
    if write is not None:
        u *= tl.load(write + place).to(tl.float32)
    if ERASE:
        if not BEFORE:
            old = tl.sum(W * b_p[None, :], 1)
        if erase is not None:
            old *= tl.load(erase + place).to(tl.float32)
        if erase_key is not None:
            W -= old[:, None] * tl.load(erase_key + key, mask=column < D_K, other=0.0).to(tl.float32)[None, :]
        else:
            u -= old
    W += u[:, None] * b_k[None, :]
    tl.store(at, W, mask=inside)
    tl.store(out + place * D_V + row, tl.sum(W * b_q[None, :], 1).to(out.dtype.element_ty), mask=row < D_V)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    probe: Tensor | None = None,
    erase_key: Tensor | None = None,
    *,
    probe_before_decay: bool = False,
) -> Tensor:
    """Return the output [B, H, d_v]; `state` [B, H, d_v, d_k] in float32, contiguous, is changed in place."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    others = [None if x is None else x.contiguous() for x in (log_decay, erase, write, probe, erase_key)]
    (rows, heads, d_v), d_k = v.shape, k.shape[2]
    out = torch.empty_like(v)
    wide = max(16, triton.next_power_of_2(d_k))
    tall = min(max(16, triton.next_power_of_2(d_v)), max(4096 // wide, 1))
    tensors = q, k, v, state, *others, out
    kind = {
        "ERASE": any(x is not None for x in (erase, probe, erase_key)),
        "CHANNELS": log_decay is not None and log_decay.ndim == 3,
        "BEFORE": probe_before_decay,
    }
    grid, sharing = (triton.cdiv(d_v, tall), rows * heads), heads // k.shape[1]
    launch(_decode, grid, tensors, (heads, sharing), warps=4, D_K=d_k, D_V=d_v, BK=wide, BV=tall, **kind)
    return out
