"""One token at a time, for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops.inputs import (
    require_coefficients,
    require_device,
    require_like_keys,
    require_shared_heads,
    require_state,
)
from rebind.ops.kernels import load_kernels


@torch.no_grad()
def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    probe: Tensor | None = None,
    erase_key: Tensor | None = None,
    probe_before_decay: bool = False,
    normalize: bool = False,
) -> Tensor:
    """Write one token into each memory, in place, and read it: what `scan` does with T = 1, without gradients.

    Args:
        q: Queries [B, H_k, d_k].
        k: Keys [B, H_k, d_k], or [B, n, H_k, d_k] for n writes; what belongs to a write then has n rows too.
        v: Values [B, H, d_v].
        state: The memories [B, H, d_v, d_k] (d_v + 1 rows to normalize), as `scan` returned them; changed in place.
        log_decay: ln α [B, H], or ln d [B, H, d_k]. None: nothing decays.
        erase: ε [B, H]. None: 0, or 1 if there is a probe or an erase key.
        write: η [B, H]. None: 1.
        probe: p [B, H_k, d_k]. None: k.
        erase_key: e [B, H_k, d_k]. None: k.
        probe_before_decay: Whether the probe reads the memory before it decays.
        normalize: As for `scan`.

    Returns:
        The output [B, H, d_v] in v's dtype.
    """
    others: dict[str, Any] = {"log_decay": log_decay, "erase": erase, "write": write}
    others |= {"probe": probe, "erase_key": erase_key, "probe_before_decay": probe_before_decay}
    if not normalize:
        return step_without_grad(q, k, v, state, **others)
    wide = working_dtype(v)
    values = torch.cat([v.to(wide), v.new_ones((*v.shape[:-1], 1), dtype=wide)], dim=-1)
    out = step_without_grad(q.to(wide), k.to(wide), values, state, **others)
    return (out[..., :-1] / out[..., -1:]).to(v.dtype)


def step_without_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    probe: Tensor | None = None,
    erase_key: Tensor | None = None,
    probe_before_decay: bool = False,
) -> Tensor:
    """Do what `step` does without `normalize`, where gradients are turned off already.

    It computes o = W' q = W~ q + η v (k·q) − ε W~ p (e·q): the old memory is read once, for q and p together, unless a
    decay comes between the two.
    """
    if k.ndim == 4 and v.ndim == 4:
        tensors = (q, k, v, state, log_decay, erase, write, probe, erase_key)
        return _several(*tensors, probe_before_decay=probe_before_decay)
    _check(q, k, v, state)
    require_coefficients(v, k.shape[2], log_decay=log_decay, erase=erase, write=write)
    require_like_keys(k, probe=probe, erase_key=erase_key)
    if state.is_cuda and state.dtype == torch.float32 and state.is_contiguous() and not torch.compiler.is_compiling():
        kernels = load_kernels()
        if not isinstance(kernels, str):
            tensors = (q, k, v, state, log_decay, erase, write, probe, erase_key)
            out: Tensor = kernels.decode(*tensors, probe_before_decay=probe_before_decay)
            return out
    wide = state.dtype
    sharing, erases = v.shape[1] // k.shape[1], any(x is not None for x in (erase, probe, erase_key))
    q, k, probe, erase_key = (None if x is None else _heads(x, sharing, wide) for x in (q, k, probe, erase_key))  # type: ignore[assignment]
    probe, old = k if probe is None else probe, None
    if log_decay is not None:
        if erases and probe_before_decay:
            old = _read(state, probe)
        decay = log_decay.to(wide).exp()
        state.mul_(decay.unsqueeze(-2) if decay.ndim == 3 else decay[..., None, None])
    u = v.to(wide) if write is None else write.to(wide).unsqueeze(-1) * v
    if erases and old is None:  # two rows times a matrix: several times as fast on a CPU as a matrix times two columns
        answer, old = (torch.stack([q, probe], dim=-2) @ state.mT).unbind(-2)
    else:
        answer = _read(state, q)
    if old is not None:
        old = old if erase is None else erase.to(wide).unsqueeze(-1) * old
        if erase_key is None:
            u = u - old
        else:
            state.addcmul_(old.unsqueeze(-1), erase_key.unsqueeze(-2), value=-1)
            answer = answer - old * (q * erase_key).sum(-1, keepdim=True)
    state.addcmul_(u.unsqueeze(-1), k.unsqueeze(-2))
    return (answer + u * (q * k).sum(-1, keepdim=True)).to(v.dtype)


def _read(state: Tensor, x: Tensor) -> Tensor:
    """Return W x [B, H, d_v] for one x of each memory."""
    return (x.unsqueeze(-2) @ state.mT).squeeze(-2)


def _several(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    *others: Tensor | None,
    probe_before_decay: bool,
) -> Tensor:
    """Write the rows [B, n, ...] of one token in turn, after one decay; read the memory after the last."""
    out = v[:, 0]
    for row in range(k.shape[1]):
        erase, write, probe, erase_key = (None if x is None else x[:, row] for x in others)
        out = step_without_grad(
            q,
            k[:, row],
            v[:, row],
            state,
            log_decay=log_decay if row == 0 else None,
            erase=erase,
            write=write,
            probe=probe,
            erase_key=erase_key,
            probe_before_decay=probe_before_decay,
        )
    return out


def _heads(x: Tensor, sharing: int, dtype: torch.dtype) -> Tensor:
    """Return a vector of every value head [B, H, d_k] from those of key heads."""
    return x.to(dtype).repeat_interleave(sharing, dim=1) if sharing > 1 else x.to(dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> None:
    if v.ndim != 3 or k.ndim != 3 or q.shape != k.shape or k.shape[0] != v.shape[0]:
        raise ShapeError(
            f"The shape of q is {list(q.shape)}, of k {list(k.shape)} and of v {list(v.shape)}",
            expected="[B, H_k, d_k] for q and k, [B, H, d_v] for v: one token",
            advice="Use `scan` for a sequence",
            code="sequences_do_not_match",
        )
    require_shared_heads(k, v)
    require_state(state, (*v.shape, k.shape[2]), v)
    if state.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"The state has dtype {state.dtype}",
            expected="float32 or float64, since rounding it at every token would add up",
            code="wrong_dtype",
        )
    require_device("q", q, v)
    require_device("k", k, v)
