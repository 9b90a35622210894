"""Language models of sequence layers as models of transformers, with `generate`, `Trainer` and `from_pretrained`."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import known
from rebind.memory.precision import working_dtype
from rebind.nn.convert.links import copy_to_ours, copy_to_theirs, require_same_layers
from rebind.nn.convert.models import plan_model
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.base import CrossLayer, SequenceLayer, State
from rebind.nn.layers.hopfield import HopfieldLayer
from rebind.nn.layers.mesa import MesaLayer
from rebind.nn.layers.ttt import TTTLayer
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.config import KINDS, RebindConfig
from rebind.nn.parts.checks import boolean_mask, require_tokens
from rebind.nn.parts.dense import MLPS, RMSNorm, add_and_norm, head_loss, is_plain_linear
from rebind.nn.parts.documents import Documents, PackedBatch, find_documents
from rebind.nn.parts.experts import ExpertMlp, SigmoidRouting
from rebind.nn.parts.gates import Decay, ShortConvolution
from rebind.ops.entropy import IGNORED

Mixer = TypeVar("Mixer", bound=nn.Module)


def build_mlp(config: PreTrainedConfig, kind: str) -> nn.Module:
    """Return an MLP of that kind."""
    if kind != "experts":
        return MLPS[kind](config.hidden_size, config.intermediate_size)
    sigmoid = SigmoidRouting(config.router_groups, config.router_groups_per_tok, config.router_scale)
    return ExpertMlp(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        shared=config.shared_expert_intermediate_size,
        shared_gate=config.shared_expert_gate,
        normalize=config.norm_topk_prob,
        routing=sigmoid if config.router == "sigmoid" else None,
    )


class Block(GradientCheckpointingLayer, Generic[Mixer]):
    """The parts of a block: a layer, in a decoder a layer that reads the source, and an MLP, each behind a norm."""

    def __init__(
        self, config: PreTrainedConfig, mixer: Mixer, cross: CrossLayer[Any] | None = None, mlp: str | None = None
    ) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = mixer
        if cross is not None:
            self.cross_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.cross = cross
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = build_mlp(config, config.mlp if mlp is None else mlp)
        self.dropout = nn.Dropout(config.dropout)

    def add_mlp(self, x: Tensor, read: Tensor) -> Tensor:
        """Return y + mlp(norm(y)) for y = x + read."""
        x, normed = add_and_norm(self.mlp_norm, x, self.dropout(read))
        return x + self.dropout(self.mlp(normed))


class RebindBlock(Block[SequenceLayer[Any]]):
    """x + layer(norm(x)), then x + mlp(norm(x)); or x + norm(layer(x)), then x + norm(mlp(x))."""

    def __init__(self, config: RebindConfig, mixer: SequenceLayer[Any], mlp: str) -> None:
        super().__init__(config, mixer, mlp=mlp)
        self.norms_after = config.attention_norm == "after" and isinstance(mixer, Attention)

    def forward(
        self, x: Tensor, state: State | None, mask: Tensor | None, documents: Documents | None = None
    ) -> tuple[Tensor, State]:
        if self.norms_after:
            read, state = self.mixer.advance(x, state, mask, documents)
            x = x + self.dropout(self.mixer_norm(read))
            return x + self.dropout(self.mlp_norm(self.mlp(x))), state
        x, normed = add_and_norm(self.mixer_norm, x)
        read, state = self.mixer.advance(normed, state, mask, documents)
        return self.add_mlp(x, read), state


class RebindPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """How weights are initialized, and what transformers needs to know about every model of rebind."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RebindBlock"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = {"correction"}  # noqa: RUF012 - of a router, whose choices depend on all digits
    _is_stateful = True  # a memory that was rewritten cannot be rolled back, so there is no assisted generation

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Decay | ShortConvolution | MesaLayer | TTTLayer | HopfieldLayer):
            module.reset_parameters()
        elif isinstance(module, ExpertMlp):
            module.reset_parameters(self.config.initializer_range)
        else:
            super()._init_weights(module)  # type: ignore[no-untyped-call]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model creates its own cache


class RebindModel(RebindPreTrainedModel):  # type: ignore[no-untyped-call]
    """An embedding, blocks and a final norm."""

    config_class = RebindConfig
    config: RebindConfig

    def __init__(self, config: RebindConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        pairs = zip(config.kinds, config.mlps, strict=True)
        self.layers = nn.ModuleList(RebindBlock(config, KINDS[kind](config), mlp) for kind, mlp in pairs)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RebindCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        packed: PackedBatch | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens [B, T]. `attention_mask` [B, T], or longer for the context too, is 0 for padding, wherever it is.

        With `use_cache` the returned `past_key_values` continue the sequence. A cache that is passed in is changed.
        Documents packed in a row do not see each other. They are recognized by `position_ids` that start again, and by
        `cu_seqlens`, `cu_seq_lens_q` or `seq_idx` among the `kwargs`. They have no cache.
        """
        if input_ids is not None:
            require_tokens("input_ids", input_ids)
        if (input_ids is None) == (inputs_embeds is None):
            problem = f"There are {'no tokens' if input_ids is None else 'both input_ids and inputs_embeds'}"
            raise InputError(problem, expected="input_ids or inputs_embeds", code="wrong_tokens")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = _real_tokens(attention_mask, x)
        if packed is None:
            packed = find_documents(x, mask, position_ids, kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and packed is None
        cache = RebindCache.resolve(past_key_values, len(self.layers), use_cache=use_cache)
        if packed is not None and cache is not None:
            advice = "Pass the documents as rows with an attention mask to continue them, or {use_cache}"
            settings = {"use_cache": False}
            raise InputError(
                "Packed documents have no cache", advice=advice, settings=settings, code="cache_with_documents"
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        documents = None
        if packed is not None:
            x, mask, documents = packed.flatten(x), None, packed.documents
        hidden_states = [x]
        x = self.dropout(x)
        for index, block in enumerate(self.layers):
            x, *state = block(x, None if cache is None else cache.states[index], mask, documents)
            hidden_states.append(x)
            if cache is not None and state:  # a block that `rebind.models.trunk` skips returns no state
                cache.states[index] = state[0]
        if cache is not None:
            cache.tokens_seen += x.shape[1]
        hidden_states[-1] = self.norm(x)
        if packed is not None:
            hidden_states = [packed.restore(x) for x in hidden_states[0 if output_hidden_states else -1 :]]
        shown: Any = tuple(hidden_states) if output_hidden_states else None
        last: Any = hidden_states[-1]
        return BaseModelOutputWithPast(last_hidden_state=last, past_key_values=cache, hidden_states=shown)


class RebindForCausalLM(RebindPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A language model."""

    config_class = RebindConfig
    config: RebindConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RebindConfig) -> None:
        super().__init__(config)
        self.model = RebindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_transformers(cls, model: PreTrainedModel) -> Self:
        """Return our model with the weights of a causal language model of transformers, and with its logits.

        Args:
            model: Qwen3-Next, Qwen3.5 (the language model), OLMo Hybrid, Kimi Linear, Ling 3.0, or one with the same
                parts.
        """
        config, links = plan_model(model)
        ours = cls(config)
        nn.Module.to(ours, model.device)
        for parameter in ours.parameters():  # the correction of a router, a buffer, stays in float32
            parameter.data = parameter.data.to(model.dtype)
        copy_to_ours(links, model, ours)
        return ours.train(model.training)

    def to_transformers(self, model: PreTrainedModel) -> None:
        """Copy the weights into a model of transformers of the same shape, such as the one this model came from."""
        config, links = plan_model(model)
        with torch.device("meta"):
            require_same_layers(self, type(self)(config))
        copy_to_theirs(links, self, model)

    @property
    def grows(self) -> bool:
        """Whether the state of a layer gets larger with every token."""
        return any(layer.grows for layer in self._sequence_layers)

    def state_size(self, context: int = 0) -> int:
        """Return the numbers stored for one sequence of `context` tokens, which matter for softmax attention alone."""
        return sum(layer.size_after(context) for layer in self._sequence_layers)

    @property
    def _sequence_layers(self) -> list[SequenceLayer[Any]]:
        return [cast(RebindBlock, block).mixer for block in self.model.layers]

    @can_return_tuple  # type: ignore[untyped-decorator]
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
        return_logits: bool = True,
        num_items_in_batch: int | Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, vocab], and with `labels` (−100 is ignored) the mean cross-entropy of the next tokens.

        `shift_labels` are labels that are shifted already. `logits_to_keep` asks for the logits of the last tokens
        alone, or of these positions; 0 means all. With `return_logits=False` only the loss is returned: it is computed
        piece by piece, so that the logits of a large vocabulary never take memory all at once. For packed documents
        (see `RebindModel.forward`), no document predicts the first token of the next.
        """
        shift_labels = kwargs.pop("shift_labels", None)  # not named, since Trainer would require it of every batch
        tokens, packed = input_ids if inputs_embeds is None else inputs_embeds, None
        if tokens is not None and (kwargs or position_ids is not None):
            packed = find_documents(tokens, _real_tokens(attention_mask, tokens), position_ids, kwargs)
        base = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            packed=packed,
        )
        hidden, loss, logits = base.last_hidden_state, cast(Any, None), None
        for name, targets in (("labels", labels), ("shift_labels", shift_labels)):
            if targets is not None and targets.shape != hidden.shape[:2]:
                problem, expected = f"{name} has shape {list(targets.shape)}", f"{list(hidden.shape[:2])}"
                raise ShapeError(problem, expected=expected, code="wrong_labels_shape")
        if shift_labels is None and labels is not None:
            shift_labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            if packed is not None:
                shift_labels = shift_labels.masked_fill(~packed.has_next, IGNORED)
        if return_logits or shift_labels is None or not is_plain_linear(self.lm_head):
            positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, positions])
        if shift_labels is not None:
            loss = self._loss(hidden, logits, shift_labels, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=base.past_key_values, hidden_states=base.hidden_states
        )

    def _loss(self, hidden: Tensor, logits: Tensor | None, targets: Tensor, count: int | Tensor | None) -> Tensor:
        """Return the sum of the cross-entropies over the number of targets, or over `count`."""
        if logits is None:
            total = head_loss(hidden, self.lm_head.weight, targets)
        else:
            flat = logits.to(working_dtype(logits)).flatten(0, 1)
            total = functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / ((targets != IGNORED).sum() if count is None else count)


def _real_tokens(attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the mask of the tokens x [B, T, ...], or None if there is no padding among them."""
    mask = boolean_mask("attention_mask", attention_mask, *x.shape[:2], longer=True)
    if mask is None:
        return None
    mask = mask[:, mask.shape[1] - x.shape[1] :]
    return None if known(mask.all()) else mask


AutoConfig.register("rebind", RebindConfig, exist_ok=True)
AutoModel.register(RebindConfig, RebindModel, exist_ok=True)
AutoModelForCausalLM.register(RebindConfig, RebindForCausalLM, exist_ok=True)
