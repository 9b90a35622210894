"""An encoder-decoder for translation, for transformers. Importing this module registers it with the Auto classes.

    encoder     x + read(write(norm x)), x + mlp(norm x)                    every token reads the whole source
    decoder     y + causal(norm y), y + read(source, norm y), y + mlp(norm y)

All three places have one kind of attention, as in Table 1 of Schlag et al., which asks what a memory of constant size
loses against softmax attention. Positions are sinusoids added to the embeddings, so that no kind has positions of its
own. There is no dropout inside attention, since fast weights have no attention matrix.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.memory.precision import working_dtype
from rebind.nn.layers.attention import Attention, CrossAttention
from rebind.nn.layers.base import CrossLayer, SequenceLayer, State
from rebind.nn.layers.fast_weight import CrossFastWeight, FastWeight
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.config import SavedConfig
from rebind.nn.lm.model import Block, RebindPreTrainedModel
from rebind.nn.parts.checks import boolean_mask, head_width, require_positive, require_tokens
from rebind.nn.parts.dense import MLPS, RMSNorm, add_and_norm
from rebind.nn.parts.documents import refuse_unknown
from rebind.nn.parts.feature_map import build_feature
from rebind.nn.parts.padding import token_positions
from rebind.ops.entropy import IGNORED

# Softmax attention stores every token. The others write W = Σ v φ(k)ᵀ and z = Σ φ(k) and read W φ(q) / z·φ(q)
# (Schlag et al. eq. 17 to 19), with the φ of that name and no norm of the read: they differ from softmax in φ alone.
SEQ2SEQ_KINDS = ("softmax", "linear", "performer", "dpfp")
LONGEST_WAVE = 10_000.0  # over 2π, of the slowest sine of the positions


class RebindSeq2SeqConfig(SavedConfig):  # type: ignore[no-untyped-call]
    """An encoder and a decoder with one kind of attention in all three places."""

    model_type = "rebind-seq2seq"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "RebindSeq2SeqConfig",
        "AutoModelForSeq2SeqLM": "RebindForSeq2SeqLM",
    }
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
        super().__post_init__(**kwargs)
        require_positive(encoder_layers=self.encoder_layers, decoder_layers=self.decoder_layers)
        head_width(self.hidden_size, self.num_attention_heads)
        if self.mlp not in MLPS:
            raise unknown_name("mlp", self.mlp, MLPS)
        if self.attention not in SEQ2SEQ_KINDS:
            raise unknown_name("attention", self.attention, SEQ2SEQ_KINDS)


def _build_layer(config: RebindSeq2SeqConfig, *, causal: bool) -> Any:
    """Return the layer with which the decoder reads its own past, or the one with which all tokens read the source."""
    width, heads = config.hidden_size, config.num_attention_heads
    if config.attention == "softmax":
        return Attention(width, heads, rotary=None) if causal else CrossAttention(width, heads)
    feature = build_feature(
        config.attention, width // heads, dpfp_nu=config.dpfp_nu, favor_features=config.favor_features
    )
    if causal:
        return FastWeight(width, heads, rule="sum", feature=feature, normalizer="attention", norm_eps=None)
    return CrossFastWeight(width, heads, feature=feature)


class RebindSeq2SeqCache(RebindCache):
    """The state of every layer of a decoder, and then the source as every layer wrote it."""

    def __init__(self, layers: int) -> None:
        super().__init__(2 * layers)

    def __len__(self) -> int:
        return len(self.states) // 2


class PositionedEmbedding(nn.Module):
    """√d · E[token] + the sinusoids of its position."""

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, mask: Tensor | None, past: int = 0) -> Tensor:
        """Return vectors [B, T, d] of tokens [B, T] after `past` others; the mask covers those too."""
        x = self.tokens(ids)
        width, half = x.shape[-1], x.shape[-1] // 2
        positions = token_positions(past, ids.shape[1], mask, ids.device)
        powers = torch.arange(half, device=ids.device, dtype=working_dtype(x)) / half  # Vaswani et al. 3.5
        angles = positions[..., None].to(powers.dtype) * LONGEST_WAVE**-powers
        return self.dropout(x * math.sqrt(width) + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype))


class EncoderBlock(Block[CrossLayer[Any]]):
    """x + read(write(norm(x))), then x + mlp(norm(x))."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x, normed = add_and_norm(self.mixer_norm, x)
        return self.add_mlp(x, self.mixer(normed, self.mixer.write(normed, mask)))


class DecoderBlock(Block[SequenceLayer[Any]]):
    """x + causal(norm(x)), then x + read(source, norm(x)), then x + mlp(norm(x))."""

    def forward(
        self, x: Tensor, state: State | None, mask: Tensor | None, source: State | None, encoded: tuple[Tensor, Any]
    ) -> tuple[Tensor, State, State]:
        """Return the output, the state after it, and the source; `encoded` (vectors, mask) is written if it is None."""
        x, normed = add_and_norm(self.mixer_norm, x)
        read, state = self.mixer.advance(normed, state, mask)
        x, normed = add_and_norm(self.cross_norm, x, self.dropout(read))
        source = self.cross.write(*encoded) if source is None else source
        return self.add_mlp(x, self.cross(normed, source)), cast(State, state), cast(State, source)


class RebindEncoder(nn.Module):
    """An embedding, which the decoder shares, blocks and a final norm."""

    main_input_name = "input_ids"  # `generate` asks for it

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        self.embedding = PositionedEmbedding(config)
        layers = (_build_layer(config, causal=False) for _ in range(config.encoder_layers))
        self.layers = nn.ModuleList(EncoderBlock(config, layer) for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, output_hidden_states: bool = False, **kwargs: Any
    ) -> BaseModelOutput:
        """Read sources [B, S]. `attention_mask` [B, S] is 0 for padding, wherever it is."""
        refuse_unknown(kwargs)
        require_tokens("input_ids", input_ids)
        mask = boolean_mask("attention_mask", attention_mask, *input_ids.shape)
        x = self.embedding(input_ids, mask)
        hidden_states = [x]
        for block in self.layers:
            x = block(x, mask)
            hidden_states.append(x)
        x = self.norm(x)
        shown: Any = (*hidden_states[:-1], x) if output_hidden_states else None
        return BaseModelOutput(last_hidden_state=x, hidden_states=shown)


class RebindDecoder(nn.Module):
    """Blocks and a final norm."""

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        layers = (
            [_build_layer(config, causal=causal) for causal in (True, False)] for _ in range(config.decoder_layers)
        )
        self.layers = nn.ModuleList(DecoderBlock(config, *pair) for pair in layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, x: Tensor, mask: Tensor | None, encoded: tuple[Tensor, Tensor | None], cache: RebindSeq2SeqCache | None
    ) -> list[Tensor]:
        """Return the input of every block, first x [B, T, d], and the output of the final norm."""
        hidden_states = [x]
        for index, block in enumerate(self.layers):
            state, source = (None, None) if cache is None else cache.states[index :: len(cache)]
            x, *states = block(x, state, mask, source, encoded)
            hidden_states.append(x)
            if cache is not None:
                cache.states[index :: len(cache)] = states
        if cache is not None:
            cache.tokens_seen += x.shape[1]
        return [*hidden_states[:-1], self.norm(x)]


class RebindForSeq2SeqLM(RebindPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A model from source tokens to target tokens."""

    config_class = RebindSeq2SeqConfig
    config: RebindSeq2SeqConfig
    _no_split_modules = ["EncoderBlock", "DecoderBlock"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "encoder.embedding.tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder = RebindEncoder(config)
        self.decoder = RebindDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw matrices by Glorot, and embeddings of length 1, which √d brings to the size of the positions."""
        if isinstance(module, nn.Embedding) or module is self.lm_head:
            nn.init.normal_(cast(Tensor, module.weight), std=self.config.hidden_size**-0.5)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embedding.tokens = cast(nn.Embedding, value)

    def state_size(self, source: int = 0, target: int = 0) -> int:
        """Return the numbers that the decoder stores for one sentence; softmax attention depends on the lengths."""
        blocks = [cast(DecoderBlock, block) for block in self.decoder.layers]
        causal = sum(block.mixer.state_size * (target if block.mixer.grows else 1) for block in blocks)
        return causal + sum(block.cross.state_size * (source if block.cross.grows else 1) for block in blocks)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the start token and all labels but the last. Ignored labels become padding."""
        padding = 0 if self.config.pad_token_id is None else self.config.pad_token_id
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, padding)], dim=1)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: RebindSeq2SeqCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Return logits [B, T, vocab], and with `labels` (−100 is ignored) their mean cross-entropy.

        Labels are the targets themselves; the decoder reads them shifted by one, unless `decoder_input_ids` are passed.
        The source is `input_ids` or, encoded already, `encoder_outputs`. `attention_mask` belongs to the source,
        `decoder_attention_mask` to the target and its context; both are 0 for padding. A cache that is passed in is
        changed; once it contains the source, the source is not read again.
        """
        count = kwargs.pop("num_items_in_batch", None)
        refuse_unknown(kwargs)
        if decoder_input_ids is None:
            if labels is None:
                advice = "Pass the targets as labels to train, or call generate to translate"
                raise InputError("There are neither decoder_input_ids nor labels", advice=advice, code="no_target")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        require_tokens("decoder_input_ids", decoder_input_ids)
        batch, length = decoder_input_ids.shape
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, output_hidden_states)
        source = cast(Tensor, encoder_outputs[0])
        encoded = source, boolean_mask("attention_mask", attention_mask, *source.shape[:2])
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        cache = RebindSeq2SeqCache.resolve(past_key_values, len(self.decoder.layers), use_cache=use_cache)
        past = 0 if cache is None else cache.tokens_seen
        mask = boolean_mask("decoder_attention_mask", decoder_attention_mask, batch, past + length)
        x = self.encoder.embedding(decoder_input_ids, mask, past)
        hidden_states = self.decoder(x, None if mask is None else mask[:, past:], encoded, cache)
        logits = self.lm_head(hidden_states[-1])
        loss = None if labels is None else self._loss(logits, labels, count)
        return Seq2SeqLMOutput(
            loss=cast(Any, loss),
            logits=logits,
            past_key_values=cast(Any, cache),
            decoder_hidden_states=cast(Any, tuple(hidden_states)) if output_hidden_states else None,
            encoder_last_hidden_state=cast(Any, source),
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
        )

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """Return the cross-entropy over the labels that are not ignored, with smoothing in training alone."""
        loss = functional.cross_entropy(
            logits.flatten(0, 1).to(working_dtype(logits)),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
            reduction="mean" if count is None else "sum",
        )
        return loss if count is None else loss / count


AutoConfig.register("rebind-seq2seq", RebindSeq2SeqConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(RebindSeq2SeqConfig, RebindForSeq2SeqLM, exist_ok=True)
