"""An encoder-decoder as a model of transformers, with `generate`, `Seq2SeqTrainer` and `from_pretrained`.

    encoder     x + read(write(norm x)), x + mlp(norm x)                    every token reads the whole source
    decoder     y + causal(norm y), y + read(source, norm y), y + mlp(norm y)

All three places have one kind of attention, as in Table 1 of Schlag et al., which asks what a memory of constant size
loses against softmax attention. Positions are sinusoids added to the embeddings, so that no kind has positions of its
own. There is no dropout inside attention, since fast weights have no attention matrix.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.cross import CrossLayer
from rebind.nn.lm.cache import RebindSeq2SeqCache
from rebind.nn.lm.model import Block, RebindPreTrainedModel
from rebind.nn.parts.checks import boolean_mask, require_tokens
from rebind.nn.parts.dense import RMSNorm, add_and_norm
from rebind.nn.parts.state import State
from rebind.nn.seq2seq.config import RebindSeq2SeqConfig, build_causal_layer, build_cross_layer
from rebind.ops.entropy import IGNORED

LONGEST_WAVE = 10_000.0  # over 2π, of the slowest sine of the positions


class PositionedEmbedding(nn.Module):
    """√d · E[token] + the sinusoids of its position."""

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, mask: Tensor | None, past: int = 0) -> Tensor:
        """Return vectors [B, T, d] of tokens [B, T] after `past` others; the mask covers those too."""
        x = self.tokens(ids)
        width = x.shape[-1]
        if mask is None:
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        else:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]  # among the real tokens
        return self.dropout(x * math.sqrt(width) + sinusoids(positions, width, working_dtype(x)).to(x.dtype))


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
        self.layers = nn.ModuleList(
            EncoderBlock(config, build_cross_layer(config)) for _ in range(config.encoder_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Read sources [B, S]. `attention_mask` [B, S] is 0 for padding, wherever it is."""
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
        self.layers = nn.ModuleList(
            DecoderBlock(config, build_causal_layer(config), build_cross_layer(config))
            for _ in range(config.decoder_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        x: Tensor,  # [B, T, d]
        mask: Tensor | None,  # [B, T] true for real tokens
        encoded: tuple[Tensor, Tensor | None],  # [B, S, d] and [B, S]
        cache: RebindSeq2SeqCache | None,
    ) -> list[Tensor]:
        """Return the input of every block, and the output of the final norm."""
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
        if decoder_input_ids is None:
            if labels is None:
                raise InputError(
                    "The model got neither decoder_input_ids nor labels",
                    expected="one of them",
                    advice="Pass the targets as labels to train, or call generate to translate",
                    code="no_target",
                )
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
        loss = None if labels is None else self._loss(logits, labels, kwargs.get("num_items_in_batch"))
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


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return sines and cosines [..., width] of positions [...] at width / 2 frequencies (Vaswani et al. 3.5)."""
    steps = torch.arange(width // 2, device=positions.device, dtype=dtype) / (width // 2)
    angles = positions[..., None].to(dtype) * LONGEST_WAVE**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


AutoConfig.register("rebind-seq2seq", RebindSeq2SeqConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(RebindSeq2SeqConfig, RebindForSeq2SeqLM, exist_ok=True)
