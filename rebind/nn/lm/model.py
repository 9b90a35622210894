"""Language models of fast-weight layers, for transformers: `generate`, `Trainer`, `from_pretrained`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import known
from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.hopfield import HopfieldLayer
from rebind.nn.layers.ttt import TTTLayer
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.config import RebindConfig
from rebind.nn.lm.kinds import build
from rebind.nn.parts.convolution import ShortConvolution
from rebind.nn.parts.gates import Decay
from rebind.nn.parts.loss import head_loss
from rebind.nn.parts.mlp import MLPS
from rebind.nn.parts.norm import RMSNorm, entering
from rebind.nn.parts.products import is_plain
from rebind.nn.parts.state import State
from rebind.ops.entropy import IGNORED


class RebindBlock(GradientCheckpointingLayer):
    """x + layer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: RebindConfig, kind: str) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = build(kind, config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLPS[config.mlp](config.hidden_size, config.intermediate_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, State]:
        x, normed = entering(self.mixer_norm, x)
        read, state = self.mixer.go_on(normed, state, mask)
        x, normed = entering(self.mlp_norm, x, self.dropout(read))
        return x + self.dropout(self.mlp(normed)), state


class RebindPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """How weights are initialised, and what transformers needs to know."""

    config_class = RebindConfig
    config: RebindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RebindBlock"]  # noqa: RUF012
    _is_stateful = True  # a rewritten memory cannot be rolled back: no assisted generation

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Decay | ShortConvolution | TTTLayer | HopfieldLayer):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[no-untyped-call]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own


class RebindModel(RebindPreTrainedModel):  # type: ignore[no-untyped-call]
    """Embedding, blocks and a last norm."""

    def __init__(self, config: RebindConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(RebindBlock(config, kind) for kind in config.kinds)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()  # type: ignore[no-untyped-call]

    def state_size(self, context: int = 0) -> int:
        """Numbers in one sequence's memories after `context` tokens, which only softmax attention asks for."""
        return sum(mixer.state_size * (context if mixer.grows else 1) for mixer in self._mixers)

    @property
    def grows(self) -> bool:
        """Whether a memory gets larger with every token."""
        return any(mixer.grows for mixer in self._mixers)

    @property
    def _mixers(self) -> list[SequenceLayer[Any]]:
        return [cast(RebindBlock, block).mixer for block in self.layers]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RebindCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens [B, T]. `attention_mask` [B, T], or over the context too, is 0 for padding, wherever it stands.

        With a cache, or with `use_cache`, what comes back in `past_key_values` continues the sequence; a cache that
        is given is changed.
        """
        x = self._embedded(input_ids, inputs_embeds)
        mask = _padding(attention_mask, x)
        cache = self._cache(past_key_values, use_cache)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = [x]
        x = self.dropout(x)
        for index, block in enumerate(self.layers):
            x, *state = block(x, None if cache is None else cache.states[index], mask)
            hidden.append(x)
            if cache is not None and state:  # none of a block that hands x through, as in `rebind.models.trunk`
                cache.states[index] = state[0]
        if cache is not None:
            cache.seen += x.shape[1]
        x = self.norm(x)
        shown: Any = (*hidden[:-1], x) if wanted else None
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache, hidden_states=shown)

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            both = "neither" if input_ids is None else "both"
            raise InputError(
                f"got {both} of input_ids and inputs_embeds, expected one: pass the tokens or their vectors"
            )
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if x.ndim != 3:
            raise ShapeError(f"input_ids is {list(x.shape[:-1])}, expected [B, T]: add the batch with unsqueeze(0)")
        return x

    def _cache(self, given: RebindCache | None, use_cache: bool | None) -> RebindCache | None:
        if given is None:
            wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
            return RebindCache(len(self.layers)) if wanted else None
        if not isinstance(given, RebindCache) or len(given) != len(self.layers):
            raise InputError(
                f"past_key_values is {given!r}, expected a RebindCache of {len(self.layers)} layers: pass what this "
                f"model returned, or None to begin"
            )
        return given


class RebindForCausalLM(RebindPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RebindConfig) -> None:
        super().__init__(config)
        self.model = RebindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def state_size(self, context: int = 0) -> int:
        """Numbers in one sequence's memories after `context` tokens, which only softmax attention asks for."""
        return self.model.state_size(context)

    @property
    def grows(self) -> bool:
        """Whether a memory gets larger with every token."""
        return self.model.grows

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RebindCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        return_logits: bool = True,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, T, vocab], and with `labels` (−100 where nothing is asked) the next token's mean cross-entropy.

        `shift_labels` are labels that say each token's next one already. `logits_to_keep` asks for the last so many
        tokens' logits alone, or those at these positions; 0 for all. Without `return_logits` a loss is all there is: it
        is computed piece by piece, and logits of a large vocabulary, most of a training step's memory, are never held.
        """
        ran = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_hidden_states)
        hidden, loss, logits = ran.last_hidden_state, cast(Any, None), None
        shift_labels = kwargs.get("shift_labels")  # no parameter: Trainer would ask every batch for it, as for `labels`
        if shift_labels is None and labels is not None:
            shift_labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if return_logits or shift_labels is None or not is_plain(self.lm_head):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        if shift_labels is not None:
            loss = self._loss(hidden, logits, shift_labels, num_items_in_batch)
        out = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=ran.past_key_values, hidden_states=ran.hidden_states
        )
        return out if return_dict is None or return_dict else out.to_tuple()

    def _loss(self, hidden: Tensor, logits: Tensor | None, targets: Tensor, count: int | Tensor | None) -> Tensor:
        """The sum of the next tokens' cross-entropies over their number, or over `count`."""
        if logits is None:
            total = head_loss(hidden, self.lm_head.weight, targets)
        else:
            flat = logits.to(working_dtype(logits)).flatten(0, 1)
            total = functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / ((targets != IGNORED).sum() if count is None else count)


def _padding(attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask of these tokens [B, T], true for real ones; None where all are known to be."""
    if attention_mask is None:
        return None
    batch, length = x.shape[:2]
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ShapeError(
            f"attention_mask is {list(attention_mask.shape)}, expected [{batch}, {length}] or wider on the left, for "
            f"the context: pass the tokenizer's"
        )
    mask = attention_mask[:, attention_mask.shape[1] - length :].to(torch.bool)
    return None if known(mask.all()) else mask


AutoConfig.register("rebind", RebindConfig, exist_ok=True)
AutoModel.register(RebindConfig, RebindModel, exist_ok=True)
AutoModelForCausalLM.register(RebindConfig, RebindForCausalLM, exist_ok=True)
