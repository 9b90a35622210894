"""Tokens that write several times, as rows of one longer scan with one write each.

A token with n keys and values (DeltaProduct) becomes n rows: the first decays, the last is read. A token that erases
along another key than it writes at (RWKV-7) becomes two,

    W₁ = W~ − ε (W~ p) eᵀ          W' = W₁ + η v uᵀ

of which the first writes no value and the second erases nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.ops.inputs import ScanInputs, require_like_keys


def as_rows(inputs: ScanInputs, erase_key: Tensor | None) -> tuple[ScanInputs, int]:
    """Return the scan over rows, and the number of rows per token: token t is read at row (t + 1) · number − 1."""
    q, k, v, log_decay, erase, write, probe, _ = inputs.tensors
    number = rows_per_token(q, k)
    if number == 1 and erase_key is None:
        return inputs, 1
    if inputs.mini_batch is not None:
        raise InputError(
            "A mini-batch was requested for tokens of several writes",
            expected="one write per token, or no mini-batch",
            code="mini_batch_conflict",
        )
    assert q is not None
    assert k is not None
    assert v is not None
    if log_decay is not None and log_decay.shape[1] == q.shape[1]:
        log_decay = _place(log_decay, number, first=True)
    if erase_key is not None:
        require_like_keys(k, erase_key=erase_key)
        ones = v.new_ones(v.shape[:3], dtype=inputs.working_dtype)
        erase, write = (ones if x is None else x for x in (erase, write))
        probe = _place(k if probe is None else probe, 2, first=True)
        k = torch.stack([erase_key.to(k.dtype), k], dim=2).flatten(1, 2)
        v, write = _place(v, 2), _place(write, 2)
        erase = _place(erase, 2, first=True)
        log_decay = None if log_decay is None else _place(log_decay, 2, first=True)
        number *= 2
    cu_seqlens = None if inputs.cu_seqlens is None else inputs.cu_seqlens * number
    tensors = [_place(q, number), k, v, log_decay, erase, write, probe, inputs.state]
    return replace(inputs.with_tensors(tensors), cu_seqlens=cu_seqlens), number


def rows_per_token(q: Tensor | None, k: Tensor | None) -> int:
    """Return how many keys a token has; 1 for tensors that do not fit together, which checks refuse later."""
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or min(q.ndim, k.ndim) < 2 or not q.shape[1]:
        return 1
    return 1 if k.shape[1] % q.shape[1] else max(k.shape[1] // q.shape[1], 1)


def _place(x: Tensor, number: int, *, first: bool = False) -> Tensor:
    """Return x [B, T, ...] as the first or the last of `number` rows per token, with zeros in the others."""
    if number == 1:
        return x
    zeros = (0, number - 1) if first else (number - 1, 0)
    return functional.pad(x.unsqueeze(2), (0, 0) * (x.ndim - 2) + zeros).flatten(1, 2)
