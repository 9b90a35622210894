"""The kinds of attention that an encoder-decoder can be made of.

A kind answers two questions: what mixes the target's tokens causally, and what reads one sequence from another. The
encoder needs no third: it writes its own sequence and reads it back, every token by its own query. A new kind is one
entry of `SEQ2SEQ_KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rebind.memory.features import Dpfp, EluPlusOne, Favor, Feature
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.base import SequenceLayer, head_width
from rebind.nn.layers.cross import CrossFastWeight
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.seq2seq.attention import CrossAttention

if TYPE_CHECKING:
    from rebind.nn.seq2seq.config import RebindSeq2SeqConfig

Cross = CrossAttention | CrossFastWeight


@dataclass(frozen=True)
class Softmax:
    """The transformer: every token of the other sequence is kept and weighed."""

    def causal(self, config: RebindSeq2SeqConfig) -> SequenceLayer[Any]:
        return Attention(config.hidden_size, config.num_attention_heads, rope_theta=None)

    def cross(self, config: RebindSeq2SeqConfig) -> Cross:
        return CrossAttention(config.hidden_size, config.num_attention_heads)


@dataclass(frozen=True)
class Linear:
    """W = Σ v φ(k)ᵀ and z = Σ φ(k), read as W φ(q) / z·φ(q) (Schlag et al. eq. 17 to 19): a memory of constant size."""

    feature: Callable[[RebindSeq2SeqConfig], Feature]

    def causal(self, config: RebindSeq2SeqConfig) -> SequenceLayer[Any]:
        return FastWeight(rule="sum", **self._options(config))

    def cross(self, config: RebindSeq2SeqConfig) -> Cross:
        return CrossFastWeight(**self._options(config))

    def _options(self, config: RebindSeq2SeqConfig) -> dict[str, Any]:
        """The read goes out as it is, without a norm of its own: φ is then all that differs from softmax."""
        return {
            "dim": config.hidden_size,
            "heads": config.num_attention_heads,
            "feature": self.feature(config),
            "normalise": "attention",
            "norm": False,
        }


def _keys(config: RebindSeq2SeqConfig) -> int:
    return head_width("key_dim", config.hidden_size, config.num_attention_heads, None)


def _favor(config: RebindSeq2SeqConfig) -> Feature:
    with torch.device("cpu"):  # transformers builds models on "meta", where nothing can be drawn
        return Favor(_keys(config), m=config.favor_features)


Kind = Softmax | Linear

SEQ2SEQ_KINDS: dict[str, Kind] = {
    "softmax": Softmax(),
    "linear": Linear(lambda config: EluPlusOne(_keys(config))),
    "performer": Linear(_favor),
    "dpfp": Linear(lambda config: Dpfp(_keys(config), nu=config.dpfp_nu)),
}
