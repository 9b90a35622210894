"""The functions of flash-linear-attention 0.6 on the scan of rebind: same names, layouts, meaning and return values.

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule      # before
    from rebind.compat.fla import chunk_gated_delta_rule             # after

Queries and keys are [B, T, H, K], values [B, T, HV, V] with HV a multiple of H, and states [N, HV, K, V], the transpose
of the memories of `rebind.ops.scan`. Queries are multiplied by `scale`, by default K^−½. These functions run on CPUs
too, take any head size and float64, and have gradients in both their chunk and their recurrent form, which are one
operation here. What only steers fla's kernels (`chunk_size`, `chunk_indices`, `cu_seqlens_cpu`, `disable_recompute`,
`safe_gate`) changes nothing; what would change results and is not supported is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.ops import rms_norm, scan, step

NORM_EPS = 1e-6  # added to the squared norm of queries and keys
DENOMINATOR_EPS = 1e-10  # added to the denominator of normalized linear attention
KERNEL_OPTIONS = {"chunk_size", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "safe_gate"}

State = tuple[Tensor, Tensor] | Tensor | None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet.

    Args:
        q: Queries [B, T, H, K].
        k: Keys [B, T, H, K].
        v: Values [B, T, HV, V].
        g: ln α [B, T, HV]; with `use_gate_in_kernel` the input of −exp(A_log) · softplus(g + dt_bias).
        beta: β [B, T, HV]; with `use_beta_sigmoid_in_kernel` before its sigmoid.
        scale: What queries are multiplied by. None: K^−½.
        initial_state: States to start from [N, HV, K, V], N being B or the number of packed sequences.
        output_final_state: Whether to return the states at the end.
        use_qk_l2norm_in_kernel: Whether queries and keys are divided by their norm.
        use_beta_sigmoid_in_kernel: Whether β is the sigmoid of `beta`.
        allow_neg_eigval: Whether that sigmoid is doubled.
        state_v_first: Whether states are [N, HV, V, K].
        cu_seqlens: Boundaries [N + 1] of sequences laid end to end in a batch of one.
        use_gate_in_kernel: Whether `g` is the input of the decay gate.
        A_log: [HV], for that gate.
        dt_bias: [HV], for that gate.
        **kwargs: Options of fla's kernels.

    Returns:
        The output [B, T, HV, V], and the states at the end [N, HV, K, V] or None.
    """
    _check_options(kwargs)
    if use_gate_in_kernel:
        g = _decay(g, A_log, dt_bias, None)
    beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    q, k = _scale(q, k, scale, use_qk_l2norm_in_kernel)
    return _scan(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, state_v_first)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_gated_delta_rule` does; `gk` [B, T, HV, K] is a further ln α per key channel."""
    _refuse("gv", gv is not None, "a decay per value channel")
    if use_gate_in_kernel:
        g = _decay(g, A_log, dt_bias, None)
    if gk is not None:
        g = gk if g is None else gk + g.unsqueeze(-1)
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        cu_seqlens,
        **kwargs,
    )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet: `chunk_gated_delta_rule` without a decay."""
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        None,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        **kwargs,
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_delta_rule` does; without `beta` it is 1."""
    return chunk_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention: `chunk_gated_delta_rule` with ln α per key channel, `g` [B, T, HV, K].

    With `use_gate_in_kernel`, `g` is the input of −exp(A_log) · softplus(g + dt_bias) or, with a `lower_bound`, of
    lower_bound · σ(exp(A_log) · (g + dt_bias)), for `A_log` [HV] and `dt_bias` [HV · K].
    """
    _refuse("return_intermediate_states", return_intermediate_states, "states inside a sequence")
    if use_gate_in_kernel:
        g = _decay(g, A_log, dt_bias, lower_bound)
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        cu_seqlens,
        **kwargs,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_kda` does."""
    return chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        **kwargs,
    )


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: ln α per key channel, `g` [B, T, HV, K], and no erasing."""
    _check_options(kwargs)
    q, k = _scale(q, k, scale, norm=False)
    return _scan(q, k, v, g, None, initial_state, output_final_state, cu_seqlens, state_v_first)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_gla` does, with `gk` for its `g`."""
    _refuse("gv", gv is not None, "a decay per value channel")
    _refuse("reverse", reverse, "a scan from the end")
    return chunk_gla(q, k, v, gk, scale, initial_state, output_final_state, state_v_first, cu_seqlens, **kwargs)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with ln α per token, `g` [B, T, HV], or a constant one per head, `g_gamma` [HV] (RetNet)."""
    if g_gamma is not None:
        constant = g_gamma.expand(v.shape[:3])
        g = constant if g is None else g + constant
    return chunk_gla(q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, **kwargs)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_simple_gla` does."""
    _refuse("reverse", reverse, "a scan from the end")
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, **kwargs
    )


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Linear attention, divided by Σ q·k unless `normalize=False`.

    With `normalize`, states are pairs: the memory [N, HV, K, V], and Σ k [N, 1, HV, K].
    """
    if not normalize:
        if isinstance(initial_state, tuple):
            expected = "a tensor, since normalize=False has no denominator"
            raise InputError("The initial state is a pair", expected=expected, code="invalid_state")
        return chunk_gla(q, k, v, None, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)
    wide = working_dtype(v)
    values = torch.cat([v.to(wide), v.new_ones((*v.shape[:3], 1), dtype=wide)], dim=-1)
    start = None
    if isinstance(initial_state, tuple):
        start = torch.cat([initial_state[0].to(wide), initial_state[1].squeeze(1).unsqueeze(-1).to(wide)], dim=-1)
    elif initial_state is not None:
        start = functional.pad(initial_state, (0, 1))
    out, final = chunk_gla(
        q.to(wide), k.to(wide), values, None, scale, start, output_final_state, cu_seqlens=cu_seqlens
    )
    read = (out[..., :-1] / (out[..., -1:] + DENOMINATOR_EPS)).to(v.dtype)
    return read, None if final is None else (final[..., :-1], final[..., -1].unsqueeze(1))


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Do what `chunk_linear_attn` does, by default without the division."""
    _refuse("reverse", reverse, "a scan from the end")
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


fused_chunk_linear_attn = chunk_linear_attn


# How arguments become those of the scan


def _check_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in KERNEL_OPTIONS and value is not None and value is not False:
            raise InputError(
                f"The option {name!r} is not supported",
                expected="the arguments that the signature names",
                advice="Remove it",
                code="unknown_argument",
            )


def _refuse(name: str, is_used: bool, what: str) -> None:
    if is_used:
        raise InputError(f"{name} asks for {what}, which rebind does not have", code="unsupported_option")


def _decay(g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lowest: float | None) -> Tensor:
    """Return ln α of the input of a decay gate [B, T, HV] or [B, T, HV, K]."""
    if g is None or (A_log is None and lowest is None):
        problem = "use_gate_in_kernel needs g and A_log"
        raise InputError(problem, expected="g [B, T, HV] or [B, T, HV, K], and A_log [HV]", code="missing_gate")
    shape = g.shape[2:]
    g = g.to(working_dtype(g))
    g = g if dt_bias is None else g + dt_bias.to(g.dtype).reshape(shape)
    rate = 1.0 if A_log is None else A_log.to(g.dtype).exp().reshape(-1, *[1] * (len(shape) - 1))
    return -rate * functional.softplus(g) if lowest is None else lowest * torch.sigmoid(rate * g)


def _beta(beta: Tensor, sigmoid: bool, doubled: bool) -> Tensor:
    if doubled and not sigmoid:
        advice = "Pass beta before its sigmoid, with use_beta_sigmoid_in_kernel=True, or double it yourself"
        raise InputError("allow_neg_eigval needs the sigmoid", advice=advice, code="invalid_gate")
    beta = beta.to(working_dtype(beta))
    beta = torch.sigmoid(beta) if sigmoid else beta
    return beta * 2 if doubled else beta


def _scale(q: Tensor, k: Tensor, scale: float | None, norm: bool) -> tuple[Tensor, Tensor]:
    """Return q times the scale, and k, after their norm."""
    width = k.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if not norm:
        return q if scale == 1 else q * scale, k
    # rms_norm divides by √(mean of squares + ε): its weight and ε make that the norm
    return rms_norm(q, scale * width**-0.5, NORM_EPS / width), rms_norm(k, width**-0.5, NORM_EPS / width)


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    with_state: bool,
    cu_seqlens: Tensor | None,
    value_first: bool,
) -> tuple[Tensor, Tensor | None]:
    wide = working_dtype(v)
    log_decay = None if log_decay is None else log_decay.to(wide)
    beta = None if beta is None else beta.to(wide)
    start = None if state is None else (state if value_first else state.mT).to(wide)
    run: Callable[..., tuple[Tensor, Tensor]] = scan
    if v.shape[1] == 1 and cu_seqlens is None and not _needs_gradients(q, k, v, log_decay, beta, start):
        run = _step
    out, final = run(q, k, v, log_decay=log_decay, erase=beta, write=beta, state=start, cu_seqlens=cu_seqlens)
    return out, None if not with_state else final if value_first else final.mT


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do what `scan` does for one token per sequence, without gradients and faster."""
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], k.shape[3], dtype=working_dtype(v))
    else:  # kernels need a contiguous memory; a CPU is as fast with its transpose
        state = state.clone(memory_format=torch.contiguous_format if state.is_cuda else torch.preserve_format)
    first = [None if x is None else x.squeeze(1) for x in (log_decay, erase, write)]
    out = step(q[:, 0], k[:, 0], v[:, 0], state, log_decay=first[0], erase=first[1], write=first[2])
    return out.unsqueeze(1), state


def _needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
