"""Every kind of layer, small, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rebind.memory.features import Dpfp, Favor
from rebind.memory.ttt import Linear, Mlp
from rebind.nn import Attention, FastWeight, HopfieldLayer, LatentAttention, MesaLayer, SequenceLayer, TTTLayer
from rebind.nn.layers.attention import Rotary
from rebind.nn.parts.feature_map import AttentionNormalizer, L2Normalizer
from rebind.nn.parts.gates import OutputGate, SigmoidDecay, SoftplusDecay

DIM, HEADS = 12, 3


def fast_weight(rule: str, **options) -> Callable[[], SequenceLayer]:
    return lambda: FastWeight(DIM, HEADS, rule=rule, **options)


LAYERS: dict[str, Callable[[], SequenceLayer]] = {
    "linear transformer": fast_weight("sum", feature="elu+1", normalizer="attention"),
    "dpfp, sum": fast_weight("sum", feature=Dpfp(4, nu=2), normalizer=AttentionNormalizer(eps=1e-6)),
    "performer": fast_weight("sum", feature=Favor(4, m=8), normalizer="attention"),
    "rfa": fast_weight("rfa", feature=Favor(4, m=8), normalizer="attention"),
    "mamba-2": fast_weight("mamba2", normalizer="none", conv_size=4, output_gate="silu"),
    "delta, dpfp": fast_weight("delta", feature=Dpfp(4), normalizer="sum", norm_eps=None),
    "delta, favor": fast_weight("delta", feature=Favor(4, m=8), normalizer="sum"),
    "delta, l2": fast_weight("delta", normalizer="l2", conv_size=4),
    "longhorn": fast_weight("longhorn", normalizer="none", conv_size=2),
    "gated_delta": fast_weight("gated_delta", normalizer="l2", conv_size=3, output_gate="silu"),
    "shared keys": lambda: FastWeight(DIM, 4, rule="gated_delta", key_heads=2, d_k=5, d_v=7, conv_size=1),
    "gated_delta, published": fast_weight(
        "gated_delta",
        normalizer=L2Normalizer(eps=1e-6, query_scale=0.5),
        conv_size=4,
        conv_bias=True,
        decay=SigmoidDecay(rank=2, lowest=-3.0),
        max_beta=2.0,
        output_gate=OutputGate("sigmoid", rank=5, bias=True),
        norm_eps=1e-5,
    ),
    "gla": fast_weight("gla", normalizer="none", output_gate="silu"),
    "kda": fast_weight("kda", conv_size=4, decay=SoftplusDecay(rank=3), output_gate=OutputGate("sigmoid", rank=4)),
    "kda, bounded": lambda: FastWeight(DIM, 4, rule="kda", key_heads=2, d_k=5, d_v=7, decay="sigmoid"),
    "gdn2": fast_weight("gdn2", conv_size=2),
    "comba": fast_weight("comba"),
    "preconditioned": fast_weight("preconditioned", max_beta=2.0),
    "rwkv7": fast_weight("rwkv7", normalizer="none", decay="sigmoid"),
    "mesa": lambda: MesaLayer(DIM, HEADS, iterations=12, conv_size=2, output_gate="silu"),
    "mesa, shared keys": lambda: MesaLayer(DIM, 4, iterations=15, key_heads=2, d_k=5, d_v=7),
    "ttt-linear": lambda: TTTLayer(DIM, HEADS, inner=Linear(), mini_batch=4),
    "ttt-linear, online": lambda: TTTLayer(DIM, HEADS, mini_batch=1),
    "ttt-mlp": lambda: TTTLayer(DIM, HEADS, inner=Mlp(expand=2), mini_batch=3, rate=0.1),
    "attention": lambda: Attention(DIM, HEADS),
    "attention, shared keys": lambda: Attention(DIM, 4, head_dim=6, key_heads=2, rotary=None),
    "attention, window": lambda: Attention(DIM, HEADS, window=4, qk_norm="head", rotary=Rotary(100.0, 0.5)),
    "attention, gated": lambda: Attention(DIM, HEADS, qk_norm="all", output_gate="sigmoid", window=1000),
    "latent": lambda: LatentAttention(DIM, HEADS, rank=5, shared_dim=2, key_dim=3),
    "latent, gated": lambda: LatentAttention(
        DIM, HEADS, rank=4, shared_dim=3, d_v=7, query_rank=5, rotary=None, head_gate=True
    ),
    "hopfield": lambda: HopfieldLayer(DIM, HEADS, patterns=5, steps=3),
}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> SequenceLayer:
    """Return the layer with seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LAYERS[name]().to(dtype)
