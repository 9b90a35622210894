"""Sequence layers: causal maps [B, T, dim] → [B, T, dim] with a state to continue from. They need torch alone.

- `base`: the contract of every sequence layer
- `fast_weight`: a memory rewritten at every token, by any rule and with any feature map
- `ttt`: a memory that is a small model, trained at test time
- `attention`: softmax attention, the baseline
- `hopfield`: retrieval from learned patterns
- `cross`: layers that read one sequence from another
"""

from __future__ import annotations

from rebind.nn.layers.attention import Attention
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.cross import CrossAttention, CrossFastWeight, CrossLayer
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.layers.hopfield import HopfieldLayer
from rebind.nn.layers.ttt import TTTLayer

__all__ = [
    "Attention",
    "CrossAttention",
    "CrossFastWeight",
    "CrossLayer",
    "FastWeight",
    "HopfieldLayer",
    "SequenceLayer",
    "TTTLayer",
]
