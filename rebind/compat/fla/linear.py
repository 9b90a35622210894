"""Linear attention, with and without gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.compat.fla.shared import check_options, refuse, run_scan, scale_queries
from rebind.errors import InputError
from rebind.memory.precision import working_dtype

DENOMINATOR_EPS = 1e-10  # added to the denominator of normalized linear attention

State = tuple[Tensor, Tensor] | Tensor | None


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
    check_options(kwargs)
    q, k = scale_queries(q, k, scale, norm=False)
    return run_scan(q, k, v, g, None, initial_state, output_final_state, cu_seqlens, value_first=state_v_first)


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
    refuse("gv", gv is not None, "a decay per value channel")
    refuse("reverse", reverse, "a scan from the end")
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
    refuse("reverse", reverse, "a scan from the end")
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
    refuse("reverse", reverse, "a scan from the end")
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


fused_chunk_linear_attn = chunk_linear_attn
