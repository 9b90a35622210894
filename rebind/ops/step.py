"""One token at a time, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops.dispatch import triton_backend


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
    normalise: bool = False,
) -> Tensor:
    """Write one token into each memory, in place, and read it: what `scan` does with T = 1, without gradients.

    Args:
        q: Queries [B, Hk, Dk].
        k: Keys [B, Hk, Dk].
        v: Values [B, H, Dv].
        state: The memories [B, H, Dv, Dk] (Dv + 1 rows to normalise), as `scan` returned them; changed in place.
        log_decay: ln α [B, H]. None: α = 1.
        erase: ε [B, H]. None: 0.
        write: η [B, H]. None: 1.
        normalise: As for `scan`.

    Returns:
        The output [B, H, Dv] in v's dtype.
    """
    dtype = v.dtype
    if normalise:
        q, k, v = (x.to(working_dtype(v)) for x in (q, k, v))
        v = torch.cat([v, v.new_ones((*v.shape[:-1], 1))], dim=-1)
    out = stepped(q, k, v, state, log_decay=log_decay, erase=erase, write=write)
    return (out[..., :-1] / out[..., -1:]).to(dtype) if normalise else out


def stepped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
) -> Tensor:
    """`step` where gradients are off already."""
    if not _fit(q, k, v, state, (log_decay, erase, write)):
        _check(q, k, v, state, log_decay=log_decay, erase=erase, write=write)
    fits = state.is_cuda and state.dtype == torch.float32 and state.is_contiguous()
    fused = getattr(triton_backend(), "step", None) if fits and not torch.compiler.is_compiling() else None
    return (fused or _step)(q, k, v, state, log_decay, erase, write)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
) -> Tensor:
    """o = W' q = α W q + u (k·q) with u = η v − ε α W k: the old memory is read once, for q and k together."""
    wide = state.dtype
    sharing = v.shape[1] // k.shape[1]
    q, k = (x.to(wide).repeat_interleave(sharing, dim=1) if sharing > 1 else x.to(wide) for x in (q, k))
    if log_decay is not None:
        state.mul_(log_decay.to(wide).exp()[..., None, None])
    u = v.to(wide) if write is None else write.to(wide).unsqueeze(-1) * v
    if erase is None:
        answer = (state @ q.unsqueeze(-1)).squeeze(-1)
    else:
        answer, old = (state @ torch.stack([q, k], dim=-1)).unbind(-1)
        u = u - erase.to(wide).unsqueeze(-1) * old
    state.addcmul_(u.unsqueeze(-1), k.unsqueeze(-2))
    return (answer + u * (q * k).sum(-1, keepdim=True)).to(v.dtype)


def _fit(q: Tensor, k: Tensor, v: Tensor, state: Tensor, coefficients: tuple[Tensor | None, ...]) -> bool:
    """Whether `_check` would find nothing: asked of every token, so in few words."""
    shape, device = v.shape, state.device
    return (
        len(shape) == k.ndim == 3
        and q.shape == k.shape
        and k.shape[0] == shape[0]
        and k.shape[1] > 0
        and shape[1] % k.shape[1] == 0
        and state.shape == (*shape, k.shape[2])
        and state.dtype in (torch.float32, torch.float64)
        and q.device == k.device == v.device == device
        and all(x is None or (x.shape == shape[:2] and x.device == device) for x in coefficients)
    )


def _check(q: Tensor, k: Tensor, v: Tensor, state: Tensor, **coefficients: Tensor | None) -> None:
    if v.ndim != 3 or k.ndim != 3 or q.shape != k.shape or k.shape[0] != v.shape[0]:
        raise ShapeError(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}, expected [B, Hk, Dk] twice and "
            f"[B, H, Dv]: step takes one token; for a sequence use scan"
        )
    if k.shape[1] == 0 or v.shape[1] % k.shape[1]:
        raise ShapeError(
            f"v has {v.shape[1]} heads and k {k.shape[1]}, expected a multiple of k's: each key head serves equally "
            f"many value heads"
        )
    expected = (*v.shape, k.shape[2])
    if tuple(state.shape) != expected:
        raise ShapeError(
            f"state is {list(state.shape)}, expected one [Dv, Dk] matrix a sequence and value head, "
            f"{list(expected)}: pass the state that a scan of these widths returned"
        )
    if state.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"state has dtype {state.dtype}, expected float32 or float64: rounding it at every token would add up; "
            f"keep the state that scan returned"
        )
    for name, x in coefficients.items():
        if x is not None and x.shape != v.shape[:2]:
            raise ShapeError(f"{name} is {list(x.shape)}, expected one number a value head, {list(v.shape[:2])}")
    for name, x in {"q": q, "k": k, "v": v, **coefficients}.items():
        if x is not None and x.device != state.device:
            raise InputError(
                f"{name} is on {x.device} and the state on {state.device}, expected one device: move it with "
                f"{name}.to({str(state.device)!r})"
            )
