"""The chunk form in plain operations, which autograd, `torch.func` and forward-mode differentiation follow.

It is what runs inside of a transform (`grad`, `vmap`, `jvp`, `jacrev`), for batched gradients, and for gradients of
gradients: slower than a backend with a backward pass of its own, and right to any order. `backend` derives
the form. Here the decays between all pairs of a chunk are computed one by one, which small chunks can afford.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rebind.ops.gradients import gradients_of
from rebind.ops.inputs import Gradients, ScanInputs
from rebind.ops.reference import over_sequences

CHUNK = 16
FLOOR = -1e3  # of ln d: exp of it is 0, and differences stay finite


def chunk_form(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, d_v] and the final state [N, H, d_v, d_k]."""
    size, solves, before = inputs.mini_batch or CHUNK, inputs.mini_batch is None, inputs.probe_before_decay
    return over_sequences(inputs, partial(_sequence, size=size, solves=solves, probe_before_decay=before))


def gradients(inputs: ScanInputs, d_out: Tensor, d_final: Tensor | None) -> Gradients:
    """Return the gradients of the chunk form, by autograd; they can be differentiated again."""
    return tuple(
        gradients_of(lambda *tensors: chunk_form(inputs.with_tensors(tensors)), inputs.tensors, (d_out, d_final))
    )


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
    size: int,
    solves: bool,
    probe_before_decay: bool,
) -> tuple[Tensor, Tensor]:
    """Run one sequence per row: W [B, H, d_v, d_k]; the others [B, T, H, width]."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v, log_decay, erase * probe, write)]
    outs = [heads_first[2][:, :, :0]]
    W = W.clone()  # a sequence of no tokens returns its state, and never the same tensor
    for parts in zip(*(x.split(size, dim=2) for x in heads_first if x.shape[2]), strict=True):
        out, W = _chunk(W, *parts, solves=solves, probe_before_decay=probe_before_decay)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), W


def _chunk(
    W: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    probe: Tensor,
    write: Tensor,
    *,
    solves: bool,
    probe_before_decay: bool,
) -> tuple[Tensor, Tensor]:
    """Run one chunk of tokens [B, H, C, width]; the probes are times ε."""
    wide = q.dtype if q.device.type == "mps" else torch.float64
    c = log_decay.to(wide).clamp_min(FLOOR).cumsum(2)
    allowed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril().unsqueeze(-1)
    distance = (c.unsqueeze(3) - c.unsqueeze(2)).masked_fill(~allowed, 0.0)
    between = (distance.exp() * allowed).to(q.dtype)  # [B, H, C, C, 1 or d_k]
    since, until = c.exp().to(q.dtype), between[:, :, -1]
    probe_since, probe_between = since, between
    if probe_before_decay:  # a probe reads what the token before it left
        probe_since = functional.pad(since[:, :, :-1], (0, 0, 1, 0), value=1.0)
        probe_between = functional.pad(between[:, :, :-1], (0, 0, 0, 0, 1, 0))

    def scores(x: Tensor, between: Tensor) -> Tensor:
        if between.shape[-1] == 1:
            return (x @ k.mT) * between.squeeze(-1)
        return (x.unsqueeze(3) * between * k.unsqueeze(2)).sum(-1)

    U = write * v - (probe * probe_since) @ W.mT
    if solves:
        U = torch.linalg.solve_triangular(scores(probe, probe_between).tril(-1), U, upper=False, unitriangular=True)
    out = (q * since) @ W.mT + scores(q, between) @ U
    return out, W * since[:, :, -1:] + U.mT @ (k * until)
