"""Gated DeltaNet, DeltaNet, Kimi Delta Attention and Gated DeltaNet-2."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rebind.compat.fla.shared import beta_gate, check_options, decay_gate, refuse, run_scan, scale_queries, share_keys


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
    check_options(kwargs)
    if use_gate_in_kernel:
        g = decay_gate(g, A_log, dt_bias, None)
    beta = beta_gate(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    q, k = scale_queries(q, k, scale, use_qk_l2norm_in_kernel)
    return run_scan(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, value_first=state_v_first)


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
    refuse("gv", gv is not None, "a decay per value channel")
    if use_gate_in_kernel:
        g = decay_gate(g, A_log, dt_bias, None)
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
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet: `chunk_gated_delta_rule` without a decay; without `beta` it is 1."""
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


fused_recurrent_delta_rule = chunk_delta_rule


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
    refuse("return_intermediate_states", return_intermediate_states, "states inside a sequence")
    if use_gate_in_kernel:
        g = decay_gate(g, A_log, dt_bias, lower_bound)
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


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2: KDA with gates `b` [B, T, HV, K] on what is erased and `w` [B, T, HV, V] on what is written."""
    check_options(kwargs)
    refuse("return_intermediate_states", return_intermediate_states, "states inside a sequence")
    if use_gate_in_kernel:
        g = decay_gate(g, A_log, dt_bias, lower_bound)
    q, k = scale_queries(q, k, scale, use_qk_l2norm_in_kernel)
    q, k = share_keys(v, q, k)
    probe = (b * k).to(k.dtype)
    value = (w * v).to(v.dtype)
    return run_scan(
        q, k, value, g, None, initial_state, output_final_state, cu_seqlens, value_first=state_v_first, probe=probe
    )


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_gdn2` does."""
    return chunk_gdn2(
        q,
        k,
        v,
        g,
        b,
        w,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        cu_seqlens,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        A_log=A_log,
        dt_bias=dt_bias,
        **kwargs,
    )
