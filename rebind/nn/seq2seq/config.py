"""The config of an encoder-decoder, and the kinds of attention that it can name.

A kind consists of a causal layer over the target and a layer that reads one sequence from another. The encoder uses the
latter too: it writes its own sequence and reads it back with the query of every token.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.memory.features import Feature
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.cross import CrossAttention, CrossFastWeight, CrossLayer
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.parts.checks import head_width, require_positive
from rebind.nn.parts.dense import MLPS
from rebind.nn.parts.feature_map import build_feature

# Softmax attention stores every token. The others write W = Σ v φ(k)ᵀ and z = Σ φ(k) and read W φ(q) / z·φ(q)
# (Schlag et al. eq. 17 to 19), with the φ of that name and no norm of the read: they differ from softmax in φ alone.
SEQ2SEQ_KINDS = ("softmax", "linear", "performer", "dpfp")


class RebindSeq2SeqConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """An encoder and a decoder with one kind of attention in all three places."""

    model_type = "rebind-seq2seq"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 8_000  # the same tokens for source and target
    attention: str = "dpfp"  # or "softmax", "linear", "performer": see SEQ2SEQ_KINDS
    hidden_size: int = 256  # width of the residual stream, even
    encoder_layers: int = 3
    decoder_layers: int = 3
    num_attention_heads: int = 4  # of every layer
    intermediate_size: int = 1_024  # width of the hidden layer of the MLPs
    mlp: str = "relu"  # or "swiglu"
    dpfp_nu: int = 2  # ν of DPFP: features 2ν times as wide as a head
    favor_features: int = 128  # m of FAVOR+: features 2m wide
    dropout: float = 0.1  # after the embedding, every layer and every MLP
    label_smoothing: float = 0.0  # share of the weight of a target that is spread over all tokens in training
    norm_eps: float = 1e-6
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True  # the output layer shares the embedding, as source and target always do
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 1  # what the decoder reads before the first token of the target

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        require_positive(encoder_layers=self.encoder_layers, decoder_layers=self.decoder_layers)
        head_width(self.hidden_size, self.num_attention_heads)
        if self.mlp not in MLPS:
            raise unknown_name("mlp", self.mlp, MLPS)
        if self.attention not in SEQ2SEQ_KINDS:
            raise unknown_name("attention", self.attention, SEQ2SEQ_KINDS)
        if not 0 <= self.decoder_start_token_id < self.vocab_size:
            raise InputError(
                f"decoder_start_token_id is {self.decoder_start_token_id}",
                expected=f"a token from 0 to {self.vocab_size - 1}, often the bos or pad token",
                code="token_out_of_range",
            )


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
    d_k = config.hidden_size // config.num_attention_heads
    return build_feature(config.attention, d_k, dpfp_nu=config.dpfp_nu, favor_features=config.favor_features)
