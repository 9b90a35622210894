"""How arguments of fla become those of the scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError, ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops import rms_norm, scan, step

NORM_EPS = 1e-6  # added to the squared norm of queries and keys
KERNEL_OPTIONS = {  # they steer fla's kernels and change no result
    "chunk_size",
    "chunk_indices",
    "cu_seqlens_cpu",
    "disable_recompute",
    "max_num_seqs",
    "safe_gate",
    "use_graph",
}


def check_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in KERNEL_OPTIONS and value is not None and value is not False:
            raise InputError(
                f"The option {name!r} is not supported",
                expected="the arguments that the signature names",
                advice="Remove it",
                code="unknown_argument",
            )


def refuse(name: str, is_used: bool, what: str) -> None:
    if is_used:
        raise InputError(f"{name} asks for {what}, which rebind does not have", code="unsupported_option")


def decay_gate(g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lowest: float | None) -> Tensor:
    """Return ln α of the input of a decay gate [B, T, HV] or [B, T, HV, K]."""
    if g is None or (A_log is None and lowest is None):
        problem = "use_gate_in_kernel needs g and A_log"
        raise InputError(problem, expected="g [B, T, HV] or [B, T, HV, K], and A_log [HV]", code="missing_gate")
    shape = g.shape[2:]
    g = g.to(working_dtype(g))
    g = g if dt_bias is None else g + dt_bias.to(g.dtype).reshape(shape)
    rate = 1.0 if A_log is None else A_log.to(g.dtype).exp().reshape(-1, *[1] * (len(shape) - 1))
    return -rate * functional.softplus(g) if lowest is None else lowest * torch.sigmoid(rate * g)


def beta_gate(beta: Tensor, sigmoid: bool, doubled: bool) -> Tensor:
    if doubled and not sigmoid:
        advice = "Pass beta before its sigmoid, with use_beta_sigmoid_in_kernel=True, or double it yourself"
        raise InputError("allow_neg_eigval needs the sigmoid", advice=advice, code="invalid_gate")
    beta = beta.to(working_dtype(beta))
    beta = torch.sigmoid(beta) if sigmoid else beta
    return beta * 2 if doubled else beta


def scale_queries(q: Tensor, k: Tensor, scale: float | None, norm: bool) -> tuple[Tensor, Tensor]:
    """Return q times the scale, and k, after their norm."""
    width = k.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if not norm:
        return q if scale == 1 else q * scale, k
    if q.shape[1] == 1 and q.device.type == "cpu" and not needs_gradients(q, k):  # few operations, for one token
        both = torch.stack([q, k]).to(working_dtype(q, k))
        both = both * (both.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
        return (both[0] * scale).to(q.dtype), both[1].to(k.dtype)
    # rms_norm divides by √(mean of squares + ε): its weight and ε make that the norm
    return rms_norm(q, scale * width**-0.5, NORM_EPS / width), rms_norm(k, width**-0.5, NORM_EPS / width)


def share_keys(v: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return what belongs to key heads, [B, T, H, K] each, once for every head of v [B, T, HV, V]."""
    sharing = v.shape[2] // max(tensors[0].shape[2], 1)
    return [x if sharing <= 1 else x.repeat_interleave(sharing, dim=2) for x in tensors]


def run_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    with_state: bool,
    cu_seqlens: Tensor | None,
    *,
    value_first: bool = False,
    probe: Tensor | None = None,
    erase_key: Tensor | None = None,
    probe_before_decay: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run `scan`, or `step` for one token, with a state [N, HV, K, V], or [N, HV, V, K] with `value_first`."""
    _check_shapes(q, k, v, log_decay, beta, state, cu_seqlens, value_first)
    wide = working_dtype(v)
    log_decay = None if log_decay is None else log_decay.to(wide)
    beta = None if beta is None else beta.to(wide)
    start = None if state is None else (state if value_first else state.mT).to(wide)
    run: Callable[..., tuple[Tensor, Tensor]] = scan
    others = {"log_decay": log_decay, "erase": beta, "write": beta, "probe": probe, "erase_key": erase_key}
    if v.shape[1] == 1 and cu_seqlens is None and not needs_gradients(q, k, v, start, *others.values()):
        run = _step
    out, final = run(q, k, v, **others, probe_before_decay=probe_before_decay, state=start, cu_seqlens=cu_seqlens)
    return out, None if not with_state else final if value_first else final.mT


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    value_first: bool,
) -> None:
    """Check, by fla's names and in its layout, what `scan` would refuse in terms of its own."""
    if v.ndim != 4 or q.ndim != 4 or k.shape[:2] != v.shape[:2]:
        return  # which `scan` refuses
    tokens, widths = (*q.shape[:2], v.shape[2]), [k.shape[-1], v.shape[-1]]
    sequences = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    layout, names = (widths[::-1], "V, K") if value_first else (widths, "K, V")
    arguments: list[tuple[str, Tensor | None, list[tuple[int, ...]], str]] = [
        ("The log decay", log_decay, [tokens, (*tokens, widths[0])], "[B, T, HV] or, per channel, [B, T, HV, K]"),
        ("beta", beta, [tuple(v.shape[:3])], "[B, T, HV]"),
        ("The initial state", state, [(sequences, v.shape[2], *layout)], f"[N, HV, {names}]"),
    ]
    for name, tensor, shapes, meaning in arguments:
        if tensor is not None and tensor.shape not in shapes:
            expected = f"{meaning}: {' or '.join(str(list(shape)) for shape in shapes)}"
            raise ShapeError(f"{name} has shape {list(tensor.shape)}", expected=expected, code="wrong_shape")


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: Tensor | None,
    cu_seqlens: None,
    probe_before_decay: bool,
    **others: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do what `scan` does for one token per sequence, without gradients and faster."""
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], k.shape[3], dtype=working_dtype(v))
    else:  # kernels need a contiguous memory; a CPU is as fast with its transpose
        state = state.clone(memory_format=torch.contiguous_format if state.is_cuda else torch.preserve_format)
    token: dict[str, Any] = {name: None if x is None else x.squeeze(1) for name, x in others.items()}
    out = step(q[:, 0], k[:, 0], v[:, 0], state, **token, probe_before_decay=probe_before_decay)
    return out.unsqueeze(1), state


def needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
