"""An encoder-decoder for translation, for transformers: `generate`, `Seq2SeqTrainer`, `from_pretrained`.

    encoder     x + read(write(norm x)), x + mlp(norm x)                    every token reads the whole source
    decoder     y + causal(norm y), y + read(source, norm y), y + mlp(norm y)

One kind of attention (`rebind.nn.seq2seq.kinds`) in all three places, as in Schlag et al.'s Table 1: the question is
what a memory of constant size loses against softmax, which keeps every token. Positions are sinusoidal and added to
the embeddings, so that no kind has any of its own; there is no dropout inside attention, since fast weights have no
attention matrix to drop entries of.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from rebind.errors import InputError, ShapeError
from rebind.memory.precision import working_dtype
from rebind.nn.parts.mlp import MLPS
from rebind.nn.parts.norm import RMSNorm, entering
from rebind.nn.parts.state import State
from rebind.nn.seq2seq.cache import RebindSeq2SeqCache
from rebind.nn.seq2seq.config import RebindSeq2SeqConfig
from rebind.nn.seq2seq.kinds import SEQ2SEQ_KINDS

IGNORED = -100  # a label that asks for nothing
LONGEST_WAVE = 10_000.0  # over 2π: the slowest sine of the positions


class PositionedEmbedding(nn.Module):
    """√d · E[token] + the sinusoids of its position."""

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Tokens [B, T] at positions [B or 1, T]: [B, T, d]."""
        x = self.tokens(ids)
        width = x.shape[-1]
        return self.dropout(x * math.sqrt(width) + sinusoids(positions, width, working_dtype(x)).to(x.dtype))


class EncoderBlock(GradientCheckpointingLayer):
    """x + read(write(norm(x))), then x + mlp(norm(x))."""

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = SEQ2SEQ_KINDS[config.attention].cross(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLPS[config.mlp](config.hidden_size, config.intermediate_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x, normed = entering(self.mixer_norm, x)
        read = self.mixer(normed, self.mixer.write(normed, mask))
        x, normed = entering(self.mlp_norm, x, self.dropout(read))
        return x + self.dropout(self.mlp(normed))


class DecoderBlock(GradientCheckpointingLayer):
    """x + causal(norm(x)), then x + read(source, norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        kind = SEQ2SEQ_KINDS[config.attention]
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = kind.causal(config)
        self.cross_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.cross = kind.cross(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLPS[config.mlp](config.hidden_size, config.intermediate_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, state: State | None, mask: Tensor | None, source: State | None, encoded: tuple[Tensor, Any]
    ) -> tuple[Tensor, State, State]:
        """What comes out, the state after it, and the source: `encoded` (vectors, mask) is written if there is none."""
        x, normed = entering(self.mixer_norm, x)
        read, state = self.mixer.go_on(normed, state, mask)
        x, normed = entering(self.cross_norm, x, self.dropout(read))
        source = self.cross.write(*encoded) if source is None else source
        x, normed = entering(self.mlp_norm, x, self.dropout(self.cross(normed, cast(Any, source))))
        return x + self.dropout(self.mlp(normed)), cast(State, state), source


class RebindEncoder(nn.Module):
    """Embedding, blocks and a last norm. The embedding is the decoder's too."""

    main_input_name = "input_ids"  # which `generate` asks for

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        self.embedding = PositionedEmbedding(config)
        self.layers = nn.ModuleList(EncoderBlock(config) for _ in range(config.encoder_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Read sources [B, S]. `attention_mask` [B, S] is 0 for padding, wherever it stands."""
        _require_tokens("input_ids", input_ids)
        mask = source_mask(attention_mask, input_ids)
        x = self.embedding(input_ids, _positions(mask, 0, input_ids))
        hidden = [x]
        for block in self.layers:
            x = block(x, mask)
            hidden.append(x)
        x = self.norm(x)
        shown: Any = (*hidden[:-1], x) if output_hidden_states else None
        return BaseModelOutput(last_hidden_state=x, hidden_states=shown)


class RebindDecoder(nn.Module):
    """Blocks and a last norm."""

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderBlock(config) for _ in range(config.decoder_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        x: Tensor,  # [B, T, d]
        mask: Tensor | None,  # [B, T] true for real tokens
        encoded: tuple[Tensor, Tensor | None],  # [B, S, d] and [B, S]
        cache: RebindSeq2SeqCache | None,
    ) -> list[Tensor]:
        """What enters every block, and what leaves the last norm."""
        hidden = [x]
        for index, block in enumerate(self.layers):
            state, source = (None, None) if cache is None else (cache.states[index], cache.sources[index])
            x, state, source = block(x, state, mask, source, encoded)
            hidden.append(x)
            if cache is not None:
                cache.states[index], cache.sources[index] = state, source
        if cache is not None:
            cache.seen += x.shape[1]
        return [*hidden[:-1], self.norm(x)]


class RebindForSeq2SeqLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """Source tokens to target tokens."""

    config_class = RebindSeq2SeqConfig
    config: RebindSeq2SeqConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderBlock", "DecoderBlock"]  # noqa: RUF012
    _is_stateful = True  # a rewritten memory cannot be rolled back: no assisted generation
    _tied_weights_keys = {"lm_head.weight": "encoder.embedding.tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RebindSeq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder = RebindEncoder(config)
        self.decoder = RebindDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Matrices by Glorot; embeddings of length 1, which √d brings to the size of the positions."""
        if isinstance(module, nn.Embedding) or module is self.lm_head:
            nn.init.normal_(cast(Tensor, module.weight), std=self.config.hidden_size**-0.5)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embedding.tokens = cast(nn.Embedding, value)

    def state_size(self, source: int = 0, target: int = 0) -> int:
        """Numbers a decoder keeps for one sentence; only softmax attention asks for the lengths."""
        blocks = [cast(DecoderBlock, block) for block in self.decoder.layers]
        grows = blocks[0].mixer.grows
        return sum(
            block.mixer.state_size * (target if grows else 1) + block.cross.state_size * (source if grows else 1)
            for block in blocks
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels moved right by one: the start token, then all but the last. Ignored labels become padding."""
        filler = 0 if self.config.pad_token_id is None else self.config.pad_token_id
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, filler)], dim=1)

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
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput | tuple[Any, ...]:
        """Logits [B, T, vocab], and with `labels` (−100 where nothing is asked) their mean cross-entropy.

        Labels are the targets themselves: what the decoder reads is made of them, unless `decoder_input_ids` says
        otherwise. Sources come as `input_ids` or, read already, as `encoder_outputs`; `attention_mask` is the source's
        and 0 for padding, `decoder_attention_mask` the same for the target, the context included. A cache that is
        given is changed; once it holds the source, the source is not looked at again.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise InputError(
                    "got neither decoder_input_ids nor labels, expected one of them: pass the targets as labels to "
                    "train, or call generate to have them written"
                )
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        _require_tokens("decoder_input_ids", decoder_input_ids)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        read = self._encoded(input_ids, attention_mask, encoder_outputs, wanted)
        source = read.last_hidden_state
        assert source is not None
        encoded = source, source_mask(attention_mask, source)
        cache = self._cache(past_key_values, use_cache, training=labels is not None)
        seen = 0 if cache is None else cache.seen
        mask = _target_mask(decoder_attention_mask, seen, decoder_input_ids)
        x = self.encoder.embedding(decoder_input_ids, _positions(mask, seen, decoder_input_ids))
        hidden = self.decoder(x, None if mask is None else mask[:, seen:], encoded, cache)
        logits = self.lm_head(hidden[-1])
        loss = None if labels is None else self._loss(logits, labels, kwargs.get("num_items_in_batch"))
        out = Seq2SeqLMOutput(
            loss=cast(Any, loss),
            logits=logits,
            past_key_values=cast(Any, cache),
            decoder_hidden_states=cast(Any, tuple(hidden)) if wanted else None,
            encoder_last_hidden_state=source,
            encoder_hidden_states=read.hidden_states,
        )
        return out if return_dict is None or return_dict else out.to_tuple()

    def _encoded(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        given: BaseModelOutput | tuple[Tensor, ...] | None,
        hidden: bool | None,
    ) -> BaseModelOutput:
        if given is not None:
            return BaseModelOutput(last_hidden_state=cast(Any, given[0])) if isinstance(given, tuple) else given
        if input_ids is None:
            raise InputError(
                "got neither input_ids nor encoder_outputs, expected one of them: pass the source's tokens, or what "
                "model.encoder made of them"
            )
        return self.encoder(input_ids, attention_mask, hidden)

    def _cache(
        self, given: RebindSeq2SeqCache | None, use_cache: bool | None, *, training: bool
    ) -> RebindSeq2SeqCache | None:
        layers = len(self.decoder.layers)
        if given is None:
            wanted = self.config.use_cache and not (training or self.training) if use_cache is None else use_cache
            return RebindSeq2SeqCache(layers) if wanted else None
        if not isinstance(given, RebindSeq2SeqCache) or len(given) != layers:
            raise InputError(
                f"past_key_values is {given!r}, expected a RebindSeq2SeqCache of {layers} layers: pass what this "
                f"model returned, or None to begin"
            )
        return given

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """Cross-entropy over the labels that ask for something: smoothed while training, plain otherwise."""
        if labels.shape != logits.shape[:2]:
            raise ShapeError(
                f"labels are {list(labels.shape)}, expected one a target token, {list(logits.shape[:2])}: leave "
                f"decoder_input_ids out to have them made from the labels"
            )
        loss = functional.cross_entropy(
            logits.flatten(0, 1).to(working_dtype(logits)),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
            reduction="mean" if count is None else "sum",
        )
        return loss if count is None else loss / count


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of positions [...] at width / 2 frequencies, [..., width] (Vaswani et al. section 3.5)."""
    steps = torch.arange(width // 2, device=positions.device, dtype=dtype) / (width // 2)
    angles = positions[..., None].to(dtype) * LONGEST_WAVE**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def source_mask(attention_mask: Tensor | None, source: Tensor) -> Tensor | None:
    """The mask of a source [B, S, ...], true for real tokens. It is not looked at: that would wait for the device."""
    if attention_mask is None:
        return None
    if attention_mask.shape != source.shape[:2]:
        raise ShapeError(
            f"attention_mask is {list(attention_mask.shape)}, expected one value a source token, "
            f"{list(source.shape[:2])}: pass the tokenizer's"
        )
    return attention_mask.to(torch.bool)


def _target_mask(attention_mask: Tensor | None, seen: int, ids: Tensor) -> Tensor | None:
    """The mask of the context and these tokens [B, seen + T], true for real ones."""
    if attention_mask is None:
        return None
    expected = (ids.shape[0], seen + ids.shape[1])
    if attention_mask.shape != expected:
        raise ShapeError(
            f"decoder_attention_mask is {list(attention_mask.shape)}, expected one value a token, those that the "
            f"cache has seen included, {list(expected)}: extend it with every token"
        )
    return attention_mask.to(torch.bool)


def _positions(mask: Tensor | None, seen: int, ids: Tensor) -> Tensor:
    """Where these tokens stand among the real ones, [B or 1, T]; `mask` covers what was seen too."""
    if mask is None:
        return torch.arange(seen, seen + ids.shape[1], device=ids.device)[None]
    return (mask.cumsum(1) - 1).clamp(min=0)[:, seen:]


def _require_tokens(name: str, ids: Tensor) -> None:
    if ids.ndim != 2 or 0 in ids.shape:
        raise ShapeError(f"{name} is {list(ids.shape)}, expected [B, T] and at least one token: check the batch")


AutoConfig.register("rebind-seq2seq", RebindSeq2SeqConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(RebindSeq2SeqConfig, RebindForSeq2SeqLM, exist_ok=True)
