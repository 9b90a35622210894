"""Every kind of layer, small, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rebind.memory.features import Dpfp, Favor
from rebind.memory.ttt import Linear, Mlp
from rebind.nn import Attention, FastWeight, HopfieldLayer, SequenceLayer, TTTLayer
from rebind.nn.parts.normalizers import Attention as Divided

DIM, HEADS = 12, 3

LAYERS: dict[str, Callable[[], SequenceLayer]] = {
    "linear transformer": lambda: FastWeight(DIM, HEADS, rule="sum", feature="elu+1", normalise="attention"),
    "dpfp, sum": lambda: FastWeight(DIM, HEADS, rule="sum", feature=Dpfp(4, nu=2), normalise=Divided(eps=1e-6)),
    "performer": lambda: FastWeight(DIM, HEADS, rule="sum", feature=Favor(4, m=8), normalise="attention"),
    "rfa": lambda: FastWeight(DIM, HEADS, rule="rfa", feature=Favor(4, m=8), normalise="attention"),
    "mamba-2": lambda: FastWeight(DIM, HEADS, rule="mamba2", normalise="plain", conv=4, gate=True),
    "delta, dpfp": lambda: FastWeight(DIM, HEADS, rule="delta", feature=Dpfp(4), normalise="sum", norm=False),
    "delta, favor": lambda: FastWeight(DIM, HEADS, rule="delta", feature=Favor(4, m=8), normalise="sum"),
    "delta, l2": lambda: FastWeight(DIM, HEADS, rule="delta", normalise="l2", conv=4),
    "longhorn": lambda: FastWeight(DIM, HEADS, rule="longhorn", normalise="plain", conv=2),
    "gated delta": lambda: FastWeight(DIM, HEADS, rule="gated_delta", normalise="l2", conv=3, gate=True),
    "shared keys": lambda: FastWeight(DIM, 4, rule="gated_delta", key_heads=2, key_dim=5, value_dim=7, conv=1),
    "ttt-linear": lambda: TTTLayer(DIM, HEADS, inner=Linear(), mini_batch=4),
    "ttt-linear, online": lambda: TTTLayer(DIM, HEADS, mini_batch=1),
    "ttt-mlp": lambda: TTTLayer(DIM, HEADS, inner=Mlp(expand=2), mini_batch=3, rate=0.1),
    "attention": lambda: Attention(DIM, HEADS),
    "attention, shared keys": lambda: Attention(DIM, 4, head_dim=6, key_heads=2, rope_theta=None),
    "hopfield": lambda: HopfieldLayer(DIM, HEADS, patterns=5, steps=3),
}


def made(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> SequenceLayer:
    """The layer with seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LAYERS[name]().to(dtype)
