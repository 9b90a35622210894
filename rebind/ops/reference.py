"""The recurrence token by token: the reference that every other backend is tested against.

    W~ = W_{t−1} diag(d_t)        W_t = W~ + (η_t v_t − ε_t W~ p_t) k_tᵀ        o_t = W_t q_t

d is one number α, or one per key channel; p is k unless there is a probe.

It uses plain torch operations only, so that autograd gives gradients of every order.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rebind.ops.inputs import Gradients, ScanInputs


def recurrence(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, d_v] and the final state [N, H, d_v, d_k]."""
    dtype = inputs.working_dtype
    q, k = (x.to(dtype).repeat_interleave(inputs.sharing, dim=2) for x in (inputs.q, inputs.k))
    v = inputs.v.to(dtype)
    ones = v.new_ones(v.shape[:3])
    decay = ones if inputs.log_decay is None else inputs.log_decay.to(dtype).exp()
    decay = decay if inputs.by_channel else decay.unsqueeze(-1)
    erase = 0 * ones if inputs.erase is None else inputs.erase.to(dtype)
    write = ones if inputs.write is None else inputs.write.to(dtype)
    state = v.new_zeros(inputs.state_shape) if inputs.state is None else inputs.state
    probe = k if inputs.probe is None else inputs.probe.to(dtype).repeat_interleave(inputs.sharing, dim=2)
    tensors = (q, k, v, decay, erase, write, probe)
    if inputs.cu_seqlens is None:
        out, final = _sequence(state, *tensors, mini_batch=inputs.mini_batch or 1)
        return out.to(inputs.v.dtype), final
    bounds = inputs.cu_seqlens.tolist()
    outs, finals = [v[:, :0]], [state[:0]]
    for n, (begin, end) in enumerate(pairwise(bounds)):
        here = (x[:, begin:end] for x in tensors)
        out, final = _sequence(state[n : n + 1], *here, mini_batch=inputs.mini_batch or 1)
        outs.append(out)
        finals.append(final)
    return torch.cat(outs, dim=1).to(inputs.v.dtype), torch.cat(finals)


def _sequence(
    W: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    erase: Tensor,
    write: Tensor,
    probe: Tensor,
    *,
    mini_batch: int,
) -> tuple[Tensor, Tensor]:
    """Run one sequence per row: W [B, H, d_v, d_k]; q, k, v, decay, probe [B, T, H, width]; ε and η [B, T, H]."""
    outs = [v[:, :0]]
    W = W.clone()  # a sequence of no tokens returns its state, and never the same tensor
    for t in range(q.shape[1]):
        key, query = k[:, t, :, :, None], q[:, t, :, :, None]
        W = decay[:, t, :, None, :] * W
        if t % mini_batch == 0:
            seen = W  # what the tokens of this mini-batch read
        error = write[:, t, :, None] * v[:, t] - erase[:, t, :, None] * (seen @ probe[:, t, :, :, None]).squeeze(-1)
        W = W + error.unsqueeze(-1) @ key.mT
        outs.append((W @ query).squeeze(-1).unsqueeze(1))
    return torch.cat(outs, dim=1), W


def gradients(inputs: ScanInputs, d_out: Tensor, d_final: Tensor | None) -> Gradients:
    """Return the gradients of the recurrence, by autograd; they can be differentiated again."""
    leaves = [x if x is None or x.requires_grad else x.detach().requires_grad_() for x in inputs.tensors]
    with torch.enable_grad():
        results, slopes = list(recurrence(inputs.with_tensors(leaves))), [d_out, d_final]
        if d_final is None or not results[1].requires_grad:  # no token wrote, and there was no state
            del results[1], slopes[1]
        wanted = [x for x in leaves if x is not None]
        grads = torch.autograd.grad(
            results, wanted, slopes, create_graph=True, allow_unused=True, materialize_grads=True
        )
    computed = iter(grads)
    return tuple(None if x is None else next(computed) for x in leaves)
