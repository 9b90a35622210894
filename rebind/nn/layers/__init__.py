"""Sequence layers: causal maps [B, T, dim] → [B, T, dim] with a state to continue from. They need torch alone.

- `base`: the contracts of layers over one sequence and between two, and their state
- `fast_weight`: a memory rewritten at every token, by any rule and with any feature map
- `mesa`: a memory that answers with the ridge regression of all pairs
- `ttt`: a memory that is a small model, trained at test time
- `attention`: softmax attention, the baseline
- `latent`: softmax attention that stores one narrow vector per token
- `hopfield`: retrieval from learned patterns
"""

from __future__ import annotations

from rebind.nn.layers.attention import Attention, CrossAttention, Rotary
from rebind.nn.layers.base import SequenceLayer, State
from rebind.nn.layers.fast_weight import CrossFastWeight, FastWeight
from rebind.nn.layers.hopfield import HopfieldLayer
from rebind.nn.layers.latent import LatentAttention
from rebind.nn.layers.mesa import MesaLayer
from rebind.nn.layers.ttt import TTTLayer

__all__ = [
    "Attention",
    "CrossAttention",
    "CrossFastWeight",
    "FastWeight",
    "HopfieldLayer",
    "LatentAttention",
    "MesaLayer",
    "Rotary",
    "SequenceLayer",
    "State",
    "TTTLayer",
]
