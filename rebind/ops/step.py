"""One token at a time, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops.inputs import require_coefficients, require_device, require_shared_heads, require_state
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
    normalize: bool = False,
) -> Tensor:
    """Write one token into each memory, in place, and read it: what `scan` does with T = 1, without gradients.

    Args:
        q: Queries [B, H_k, d_k].
        k: Keys [B, H_k, d_k].
        v: Values [B, H, d_v].
        state: The memories [B, H, d_v, d_k] (d_v + 1 rows to normalize), as `scan` returned them; changed in place.
        log_decay: ln α [B, H]. None: α = 1.
        erase: ε [B, H]. None: 0.
        write: η [B, H]. None: 1.
        normalize: As for `scan`.

    Returns:
        The output [B, H, d_v] in v's dtype.
    """
    if not normalize:
        return step_without_grad(q, k, v, state, log_decay=log_decay, erase=erase, write=write)
    wide = working_dtype(v)
    values = torch.cat([v.to(wide), v.new_ones((*v.shape[:-1], 1), dtype=wide)], dim=-1)
    out = step_without_grad(q.to(wide), k.to(wide), values, state, log_decay=log_decay, erase=erase, write=write)
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
) -> Tensor:
    """Do what `step` does without `normalize`, where gradients are turned off already.

    It computes o = W' q = α W q + u (k·q) with u = η v − ε α W k: the old memory is read once, for q and k together.
    """
    _check(q, k, v, state)
    require_coefficients(v, log_decay=log_decay, erase=erase, write=write)
    if state.is_cuda and state.dtype == torch.float32 and state.is_contiguous() and not torch.compiler.is_compiling():
        kernels = load_kernels()
        if not isinstance(kernels, str):
            out: Tensor = kernels.decode(q, k, v, state, log_decay, erase, write)
            return out
    wide = state.dtype
    sharing = v.shape[1] // k.shape[1]
    q, k = (x.to(wide).repeat_interleave(sharing, dim=1) if sharing > 1 else x.to(wide) for x in (q, k))
    if log_decay is not None:
        state.mul_(log_decay.to(wide).exp()[..., None, None])
    u = v.to(wide) if write is None else write.to(wide).unsqueeze(-1) * v
    if erase is None:
        answer = (q.unsqueeze(-2) @ state.mT).squeeze(-2)
    else:  # two rows times a matrix: several times as fast on a CPU as a matrix times two columns
        answer, old = (torch.stack([q, k], dim=-2) @ state.mT).unbind(-2)
        u = u - erase.to(wide).unsqueeze(-1) * old
    state.addcmul_(u.unsqueeze(-1), k.unsqueeze(-2))
    return (answer + u * (q * k).sum(-1, keepdim=True)).to(v.dtype)


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
