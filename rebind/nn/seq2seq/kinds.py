"""The kinds of attention that an encoder-decoder can have.

A kind consists of a causal layer over the target and a layer that reads one sequence from another. The encoder uses the
latter too: it writes its own sequence and reads it back with the query of every token.
"""

from __future__ import annotations

from typing import Any

from rebind.memory.checks import unknown_name
from rebind.memory.features import Feature
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.cross import CrossAttention, CrossFastWeight, CrossLayer
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.parts.feature_map import build_feature
from rebind.nn.seq2seq.config import RebindSeq2SeqConfig

# Softmax attention stores every token. The others write W = Σ v φ(k)ᵀ and z = Σ φ(k) and read W φ(q) / z·φ(q)
# (Schlag et al. eq. 17 to 19), with the φ of that name and no norm of the read: they differ from softmax in φ alone.
SEQ2SEQ_KINDS = ("softmax", "linear", "performer", "dpfp")


def build_causal_layer(config: RebindSeq2SeqConfig) -> SequenceLayer[Any]:
    """Return the layer with which the decoder reads its own past."""
    width, heads = config.hidden_size, config.num_attention_heads
    if config.attention == "softmax":
        return Attention(width, heads, rope_theta=None)
    return FastWeight(width, heads, rule="sum", feature=_feature(config), normalizer="attention", norm=False)


def build_cross_layer(config: RebindSeq2SeqConfig) -> CrossLayer[Any]:
    """Return the layer with which the encoder and the decoder read the source."""
    width, heads = config.hidden_size, config.num_attention_heads
    if config.attention == "softmax":
        return CrossAttention(width, heads)
    return CrossFastWeight(width, heads, feature=_feature(config), normalizer="attention")


def _feature(config: RebindSeq2SeqConfig) -> Feature:
    if config.attention not in SEQ2SEQ_KINDS:
        raise unknown_name("attention", config.attention, SEQ2SEQ_KINDS)
    d_k = config.hidden_size // config.num_attention_heads
    return build_feature(config.attention, d_k, dpfp_nu=config.dpfp_nu, favor_features=config.favor_features)
