"""The recurrence token by token: the reference that every other backend is tested against.

    W~ = W_{t−1} diag(d_t)        W_t = W~ + (η_t v_t − ε_t W~ p_t) k_tᵀ        o_t = W_t q_t

d is one number α, or one per key channel; p is k unless there is a probe, which may also read W_{t−1}.

It uses plain torch operations only, so that autograd gives gradients of every order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from rebind.ops.inputs import ScanInputs


def recurrence(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, d_v] and the final state [N, H, d_v, d_k]."""
    run = partial(_sequence, mini_batch=inputs.mini_batch or 1, probe_before_decay=inputs.probe_before_decay)
    return over_sequences(inputs, run)


def over_sequences(inputs: ScanInputs, run: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return what `run` makes of every sequence, in the layout of a scan's results.

    `run` takes states [B, H, d_v, d_k] and [B, T, H, width] of q, k, v, ln d, ε, η and p, with defaults filled in.
    """
    dtype = inputs.working_dtype
    q, k, probe = (
        None if x is None else x.to(dtype).repeat_interleave(inputs.sharing, dim=2)
        for x in (inputs.q, inputs.k, inputs.probe)
    )
    v = inputs.v.to(dtype)
    ones = v.new_ones((*v.shape[:3], 1))
    decay, erase, write = (None if x is None else x.to(dtype) for x in (inputs.log_decay, inputs.erase, inputs.write))
    decay = 0 * ones if decay is None else decay if inputs.by_channel else decay.unsqueeze(-1)
    erase = 0 * ones if erase is None else erase.unsqueeze(-1)
    write = ones if write is None else write.unsqueeze(-1)
    state = v.new_zeros(inputs.state_shape) if inputs.state is None else inputs.state
    tensors = (q, k, v, decay, erase, write, k if probe is None else probe)
    if inputs.cu_seqlens is None:
        out, final = run(state, *tensors)
        return out.to(inputs.v.dtype), final
    outs, finals = [v[:, :0]], [state[:0]]
    for n, (begin, end) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
        out, final = run(state[n : n + 1], *(x[:, begin:end] for x in tensors if x is not None))
        outs.append(out)
        finals.append(final)
    return torch.cat(outs, dim=1).to(inputs.v.dtype), torch.cat(finals)


def _sequence(
    W: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    write: Tensor,
    probe: Tensor,
    *,
    mini_batch: int,
    probe_before_decay: bool,
) -> tuple[Tensor, Tensor]:
    """Run one sequence per row: W [B, H, d_v, d_k]; the others [B, T, H, width]."""
    outs = [v[:, :0]]
    W = W.clone()  # a sequence of no tokens returns its state, and never the same tensor
    decay = log_decay.exp()
    for t in range(q.shape[1]):
        before, W = W, decay[:, t].unsqueeze(-2) * W
        if t % mini_batch == 0:
            seen = before if probe_before_decay else W  # what the tokens of this mini-batch read
        error = write[:, t] * v[:, t] - erase[:, t] * (seen @ probe[:, t].unsqueeze(-1)).squeeze(-1)
        W = W + error.unsqueeze(-1) @ k[:, t].unsqueeze(-2)
        outs.append((W @ q[:, t].unsqueeze(-1)).squeeze(-1).unsqueeze(1))
    return torch.cat(outs, dim=1), W
