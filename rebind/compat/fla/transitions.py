"""Rules whose reading and erasing are apart from their keys, and rules with several writes per token.

Comba, RWKV-7 and diagonal-plus-low-rank transitions read the memory before it decays.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rebind.compat.fla.shared import (
    NORM_EPS,
    check_options,
    refuse,
    run_scan,
    scale_queries,
)
from rebind.errors import ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops import MesaState, mesa, rms_norm


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Comba: Gated DeltaNet that reads at `p` [B, T, H, K], before the decay; None reads at the keys."""
    check_options(kwargs)
    p = k if p is None else p
    if use_qk_l2norm_in_kernel:
        p = rms_norm(p, p.shape[-1] ** -0.5, NORM_EPS / p.shape[-1])
    q, k = scale_queries(q, k, scale, use_qk_l2norm_in_kernel)
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return run_scan(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, probe=p, probe_before_decay=True)


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_comba` does, with `p` before `v` as in fla."""
    return chunk_comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Diagonal plus low rank: S ← diag(exp gk) S + b (aᵀ S) + k vᵀ, with all of them [B, T, H, K] but v.

    `lower_bound` only promises fla's kernels a range of `gk`, and changes nothing.
    """
    check_options(kwargs)
    q, k = scale_queries(q, k, scale, norm=False)
    others = (initial_state, output_final_state, cu_seqlens)
    return run_scan(q, k, v, gk, None, *others, probe=a, erase_key=-b, probe_before_decay=True)


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_dplr_delta_rule` does."""
    refuse("reverse", reverse, "a scan from the end")
    return chunk_dplr_delta_rule(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens)


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7: `chunk_dplr_delta_rule` with receptance `r` as queries and the log decay `w`, by default not scaled."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, **kwargs)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do what `chunk_rwkv7` does, by default with the scale K^−½ and the final state, as in fla."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens)


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """DeltaProduct: a decay `g` [B, T, H] or None, then `num_householder` delta writes per token.

    `k`, `v` and `beta` have T · num_householder rows, those of a token one after another.
    """
    check_options(kwargs)
    if k.shape[1] != num_householder * q.shape[1]:
        raise ShapeError(
            f"There are {q.shape[1]} queries and {k.shape[1]} keys",
            expected=f"{num_householder} keys per query",
            code="sequences_do_not_match",
        )
    q, k = scale_queries(q, k, scale, use_qk_l2norm_in_kernel)
    return run_scan(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens)


def chunk_mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    h_kk_init: Tensor | None = None,
    h_kv_init: Tensor | None = None,
    output_final_state: bool = False,
    max_CG_iteration: int = 30,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """MesaNet: every query is answered by ridge regression, with the ridge `lamb` [H, K]. Queries are not scaled.

    The states are Σ β k kᵀ [N, H, K, K] and Σ β k vᵀ [N, H, K, V].
    """
    check_options(kwargs)
    q, k = scale_queries(q, k, 1.0, use_qk_l2norm_in_kernel)
    start = None
    if h_kk_init is not None or h_kv_init is not None:
        wide, sequences = working_dtype(v), len(q) if cu_seqlens is None else len(cu_seqlens) - 1
        shape = sequences, v.shape[2], k.shape[3]
        keys = v.new_zeros(*shape, k.shape[3], dtype=wide) if h_kk_init is None else h_kk_init.to(wide)
        values = v.new_zeros(*shape, v.shape[3], dtype=wide) if h_kv_init is None else h_kv_init.to(wide)
        start = MesaState(keys, values.mT)
    out, final = mesa(
        q, k, v, ridge=lamb, log_decay=g, write=beta, state=start, cu_seqlens=cu_seqlens, iterations=max_CG_iteration
    )
    return out, (final.keys, final.values.mT) if output_final_state else (None, None)
