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

from rebind.compat.fla.delta import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_gdn2,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
)
from rebind.compat.fla.linear import (
    chunk_gla,
    chunk_linear_attn,
    chunk_simple_gla,
    fused_chunk_linear_attn,
    fused_recurrent_gla,
    fused_recurrent_linear_attn,
    fused_recurrent_simple_gla,
)
from rebind.compat.fla.transitions import (
    chunk_comba,
    chunk_dplr_delta_rule,
    chunk_gated_delta_product,
    chunk_mesa_net,
    chunk_rwkv7,
    fused_recurrent_comba,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_rwkv7,
)

__all__ = [
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_mesa_net",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_chunk_linear_attn",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
]
