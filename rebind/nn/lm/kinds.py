"""The kinds of layer that a config can name.

`<φ>-<rule>` are the models of Schlag et al.: the sum is read with a denominator (eq. 19), the delta rule has
sum-normalized φ(k) and φ(q) (section 4.2), and there is neither a convolution nor an output gate. The other kinds are
built as in today's papers. To add a kind, add an entry to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rebind.memory import ttt
from rebind.memory.checks import unknown_name
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.layers.hopfield import HopfieldLayer
from rebind.nn.layers.ttt import TTTLayer
from rebind.nn.lm.config import RebindConfig
from rebind.nn.parts.checks import head_width
from rebind.nn.parts.feature_map import build_feature

LayerBuilder = Callable[[RebindConfig], SequenceLayer[Any]]


def build_layer(kind: str, config: RebindConfig) -> SequenceLayer[Any]:
    """Return a layer of that kind for that config."""
    if kind not in KINDS:
        raise unknown_name("layer kind", kind, KINDS)
    return KINDS[kind](config)


def _fast_weight(rule: str, normalizer: str, *, feature: str = "identity", output_gate: bool = False) -> LayerBuilder:
    """Return the builder of a fast-weight layer with a feature map or, without one, behind a short convolution."""

    def build(config: RebindConfig) -> FastWeight:
        d_k = head_width(config.hidden_size, config.num_attention_heads, config.d_k)
        return FastWeight(
            config.hidden_size,
            config.num_attention_heads,
            rule=rule,
            feature=build_feature(feature, d_k, dpfp_nu=config.dpfp_nu, favor_features=config.favor_features),
            normalizer=normalizer,
            d_k=d_k,
            d_v=config.d_v,
            conv_size=config.conv_size if feature == "identity" else None,
            output_gate=output_gate,
        )

    return build


def _ttt(inner: ttt.InnerModel, rate: float) -> LayerBuilder:
    return lambda config: TTTLayer(
        config.hidden_size, config.num_attention_heads, inner=inner, mini_batch=config.ttt_mini_batch, rate=rate
    )


def _attention(config: RebindConfig) -> Attention:
    return Attention(config.hidden_size, config.num_attention_heads, rope_theta=config.rope_theta)


def _hopfield(config: RebindConfig) -> HopfieldLayer:
    return HopfieldLayer(config.hidden_size, config.num_attention_heads, patterns=config.hopfield_patterns)


KINDS: dict[str, LayerBuilder] = {
    "attention": _attention,  # the transformer
    "linear-sum": _fast_weight("sum", "attention", feature="linear"),  # the Linear Transformer
    "linear-delta": _fast_weight("delta", "sum", feature="linear"),  # the Delta Net of Schlag et al.
    "performer-sum": _fast_weight("sum", "attention", feature="performer"),
    "performer-delta": _fast_weight("delta", "sum", feature="performer"),
    "dpfp-sum": _fast_weight("sum", "attention", feature="dpfp"),
    "dpfp-delta": _fast_weight("delta", "sum", feature="dpfp"),
    "rfa": _fast_weight("rfa", "attention", feature="performer"),
    "mamba2": _fast_weight("mamba2", "none", output_gate=True),
    "delta": _fast_weight("delta", "l2"),  # DeltaNet as it is built today
    "longhorn": _fast_weight("longhorn", "none"),
    "gated_delta": _fast_weight("gated_delta", "l2", output_gate=True),
    "ttt-linear": _ttt(ttt.Linear(), rate=1.0),
    "ttt-mlp": _ttt(ttt.Mlp(), rate=0.1),
    "hopfield": _hopfield,  # mixes no tokens: put it between layers that do
}
