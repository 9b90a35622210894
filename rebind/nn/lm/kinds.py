"""The kinds of layer that a model can name: each a recipe from a config to a layer.

`<φ>-<rule>` are the models of Schlag et al.: the sum is read with a denominator (eq. 19), the delta rule with
sum-normalised φ(k) and φ(q) (section 4.2), and nothing besides. The others are what their papers build today.
A new kind is one function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rebind.memory import ttt
from rebind.memory.features import Dpfp, EluPlusOne, Favor, Feature
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.base import SequenceLayer, head_width
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.layers.hopfield import HopfieldLayer
from rebind.nn.layers.ttt import TTTLayer

if TYPE_CHECKING:
    from rebind.nn.lm.config import RebindConfig

Layer = SequenceLayer[Any]
Recipe = Callable[["RebindConfig"], Layer]

KINDS: dict[str, Recipe] = {}


def kind(name: str) -> Callable[[Recipe], Recipe]:
    """Register a recipe under a name that `RebindConfig.layer_kinds` can use."""

    def register(recipe: Recipe) -> Recipe:
        KINDS[name] = recipe
        return recipe

    return register


def build(name: str, config: RebindConfig) -> Layer:
    """The layer of that kind for that config."""
    return KINDS[name](config)


@kind("attention")
def attention(config: RebindConfig) -> Layer:
    """Softmax attention: the transformer."""
    return Attention(config.hidden_size, config.num_attention_heads, rope_theta=config.rope_theta)


@kind("linear-sum")
def linear_sum(config: RebindConfig) -> Layer:
    """The Linear Transformer."""
    return _fast(config, rule="sum", feature=_elu(config), normalise="attention")


@kind("linear-delta")
def linear_delta(config: RebindConfig) -> Layer:
    """Schlag et al.'s Delta Net."""
    return _fast(config, rule="delta", feature=_elu(config), normalise="sum")


@kind("performer-sum")
def performer_sum(config: RebindConfig) -> Layer:
    """The Performer."""
    return _fast(config, rule="sum", feature=_favor(config), normalise="attention")


@kind("performer-delta")
def performer_delta(config: RebindConfig) -> Layer:
    """FAVOR+ under the delta rule."""
    return _fast(config, rule="delta", feature=_favor(config), normalise="sum")


@kind("dpfp-sum")
def dpfp_sum(config: RebindConfig) -> Layer:
    """DPFP with the sum."""
    return _fast(config, rule="sum", feature=_dpfp(config), normalise="attention")


@kind("dpfp-delta")
def dpfp_delta(config: RebindConfig) -> Layer:
    """DPFP under the delta rule."""
    return _fast(config, rule="delta", feature=_dpfp(config), normalise="sum")


@kind("rfa")
def rfa(config: RebindConfig) -> Layer:
    """Random feature attention with its gate."""
    return _fast(config, rule="rfa", feature=_favor(config), normalise="attention")


@kind("mamba2")
def mamba2(config: RebindConfig) -> Layer:
    """Mamba-2's recurrence: a decay a token, a convolution, an output gate."""
    return _fast(config, rule="mamba2", normalise="plain", conv=config.conv_size, gate=True)


@kind("delta")
def delta(config: RebindConfig) -> Layer:
    """DeltaNet as it is built today: L2-normalised keys behind a convolution."""
    return _fast(config, rule="delta", normalise="l2", conv=config.conv_size)


@kind("longhorn")
def longhorn(config: RebindConfig) -> Layer:
    """The implicit delta rule, which needs no normalised keys."""
    return _fast(config, rule="longhorn", normalise="plain", conv=config.conv_size)


@kind("gated-delta")
def gated_delta(config: RebindConfig) -> Layer:
    """Gated DeltaNet."""
    return _fast(config, rule="gated_delta", normalise="l2", conv=config.conv_size, gate=True)


@kind("ttt-linear")
def ttt_linear(config: RebindConfig) -> Layer:
    """Test-time training of a linear model."""
    return TTTLayer(config.hidden_size, config.num_attention_heads, mini_batch=config.ttt_mini_batch)


@kind("ttt-mlp")
def ttt_mlp(config: RebindConfig) -> Layer:
    """Test-time training of an MLP."""
    return TTTLayer(
        config.hidden_size, config.num_attention_heads, inner=ttt.Mlp(), mini_batch=config.ttt_mini_batch, rate=0.1
    )


@kind("hopfield")
def hopfield(config: RebindConfig) -> Layer:
    """Retrieval from learned patterns; it mixes no tokens, so put it between layers that do."""
    return HopfieldLayer(config.hidden_size, config.num_attention_heads, patterns=config.hopfield_patterns)


def _fast(config: RebindConfig, **options: Any) -> FastWeight:
    return FastWeight(
        config.hidden_size, config.num_attention_heads, key_dim=config.key_dim, value_dim=config.value_dim, **options
    )


def _keys(config: RebindConfig) -> int:
    return head_width("key_dim", config.hidden_size, config.num_attention_heads, config.key_dim)


def _elu(config: RebindConfig) -> Feature:
    return EluPlusOne(_keys(config))


def _dpfp(config: RebindConfig) -> Feature:
    return Dpfp(_keys(config), nu=config.dpfp_nu)


def _favor(config: RebindConfig) -> Feature:
    with torch.device("cpu"):  # transformers builds models on "meta", where nothing can be drawn
        return Favor(_keys(config), m=config.favor_features)
