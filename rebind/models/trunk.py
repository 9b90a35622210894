"""Run a causal language model in pieces: stop early, resume late, compute only what is needed.

Editing needs many small results from a model: the input of one matrix at one token, or the logits at two positions
after one hidden state has changed. A full forward pass for each would spend nearly all of its time on repeated work.
`Trunk` runs any Hugging Face causal model block by block without knowing its architecture:

- it *stops early* by raising an exception in a hook, so nothing above is computed;
- it *resumes* above a block: the blocks below pass their input through, and the last of them returns known states;
- it *shares prefixes* through the cache of the model;
- it runs the output head at chosen positions only.

Padding must not reach recurrent states, and not every model can continue from a cache; a short run tests this. If a
model cannot, whole rows run instead: the prefix and the rest of each row together, with all padding behind them.

Some families have several residual streams per token (Gemma 3n, DeepSeek V4). Their hidden state here is the mean of
the streams, and a change of it changes all streams by the same amount.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from rebind.errors import InputError
from rebind.models.caches import Prefixes, borrow_cache, select_cache
from rebind.models.experts import RoutedKeys, is_experts, routed_keys
from rebind.models.load import OWN_MODEL_TYPES
from rebind.models.tokens import Tokens
from rebind.models.weights.placement import device_of, full_input, reshard

Hidden = Tensor  # [rows, tokens, width]
Resume = tuple[int, Hidden]  # a layer and the output to use for its block: the run begins above it
ATTENTION_CACHES = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)  # keys and values only
SKIPPED = "_rebind_skipped"  # set on blocks that do not compute, so that hooks leave their states alone


class _Stop(Exception):  # noqa: N818 - a signal, not an error
    """Raised in a hook once everything that is needed has been computed."""


@dataclass(frozen=True, eq=False)
class _Run:
    """What the model runs on: the tokens behind their cache, or whole rows in which all padding is at the end."""

    tokens: Tokens
    cache: Any = None
    resume: Resume | None = None
    positions: Tensor | None = None  # [rows, tokens]: positions of the tokens in whole rows; None: unchanged

    def restore(self, values: Any) -> Any:
        """Select from values at every token that ran, [rows, ..., width], those at the requested tokens."""
        if self.positions is None:
            return values
        if isinstance(values, RoutedKeys):
            return values.map(self.restore)
        return _take(values, self.positions)

    def translate(self, where: Tensor) -> Tensor:
        """Translate (row, token) pairs [m, 2] of the requested tokens to positions in the rows that run."""
        if self.positions is None:
            return where
        rows, tokens = where.to(self.positions.device).unbind(-1)
        return torch.stack([rows, self.positions[rows, tokens]], dim=-1)


@dataclass(frozen=True)
class _BlockInterface:
    """What a block returns."""

    outputs: int | None  # length of its output tuple; None: it returns hidden states alone
    needs_run: bool  # the next block needs more than hidden states (other streams, other outputs): it cannot be skipped
    stream_axis: int | None  # the dimension of its states that numbers the streams, if there is one


class Trunk:
    """A causal language model and the list of its blocks, first to last."""

    def __init__(self, model: Any, blocks: Sequence[nn.Module]) -> None:
        self.model = model
        self.blocks = list(blocks)
        # Our own models read positions off the mask, and documents off `position_ids`, which no CUDA graph can record.
        unused = {"position_ids"} if self.model.config.model_type in OWN_MODEL_TYPES else set()
        self._accepts = set(inspect.signature(self.model.base_model.forward).parameters) - unused
        self._head_accepts = set(inspect.signature(self.model.forward).parameters) - unused

    @property
    def device(self) -> torch.device:
        return device_of(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        weights = self.blocks[0].parameters()
        return next(weight.dtype for weight in weights if weight.is_floating_point())  # quantized ones are integers

    @property
    def context_length(self) -> int | None:
        """The longest sequence the model takes, where its config says so."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) else None

    def probe(self) -> None:
        """Determine by short runs how the model can be run; otherwise this happens on first use.

        Call it before adding hooks to the model, which would see these runs.
        """
        _ = self.shares_prefixes, self._interface

    @property
    def stream_axis(self) -> int | None:
        """The dimension of a block's states that numbers the streams, or None if there is no such dimension."""
        return self._interface.stream_axis

    @cached_property
    def _interface(self) -> _BlockInterface:
        """What blocks return, observed on a run of the first block."""
        outputs: list[Any] = []
        next_arguments: list[Any] = []

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            next_arguments.extend([*args, *kwargs.values()])
            raise _Stop

        with (
            torch.no_grad(),
            self.blocks[0].register_forward_hook(lambda _, __, out: outputs.append(out)),
            self.blocks[min(1, len(self.blocks) - 1)].register_forward_pre_hook(record, with_kwargs=True),
        ):
            self._run_base(Tokens.left_padded([(0, 1)], self.device))
        (output,) = outputs
        states = _states_in(output)
        has_streams = self._streams(states, torch.Size((1, 2))).shape[-2] > 1
        axis = (2 if states.shape[:2] == (1, 2) else 0) if states.ndim == 4 else None
        if not isinstance(output, (tuple, list)):
            return _BlockInterface(None, has_streams, axis)
        others = [out for out in output[1:] if isinstance(out, Tensor)]
        passes_more = any(out is argument for out in others for argument in next_arguments)
        return _BlockInterface(len(output), has_streams or passes_more, axis)

    @cached_property
    def shares_prefixes(self) -> bool:
        """Whether rows can continue from a cache of left-padded prefixes. Attention can; other layers are tested."""
        if "past_key_values" not in self._accepts:
            return False
        if self.model._supports_default_dynamic_cache():
            layers = DynamicCache(config=self.model.config).layers
            others = [layer for layer in layers if type(layer) not in ATTENTION_CACHES]
            if not all(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in others):
                return False  # `borrow_cache` cannot copy such a layer
            if not others and not self.model._is_stateful:
                return True
        past = Tokens.left_padded([(1,), (1, 2, 3, 4, 5, 6)], self.device)
        tokens, last = Tokens.following(past, [(7, 8, 9), (7,)]), len(self.blocks) - 1
        order = torch.tensor([1, 0], device=self.device)
        with torch.no_grad():
            whole = self._after(last, self._whole_rows(tokens, Prefixes(past), None))
            try:
                cache = select_cache(self._run_base(past, use_cache=True).past_key_values, order)
                cached = self._after(last, _Run(tokens.select(order), cache))[order]
            except Exception:  # models raise many kinds of errors here
                return False
        is_token = tokens.mask[:, past.ids.shape[1] :].bool().to(whole.device)
        tolerance = max(1e-3, 8 * torch.finfo(whole.dtype).eps)
        return bool((cached - whole)[is_token].norm() <= tolerance * whole[is_token].norm())

    def narrowed(self, dtype: torch.dtype) -> Trunk:
        """Return a copy of the model as it is now, in another dtype."""
        names = {module: name for name, module in self.model.named_modules()}
        model = copy.deepcopy(self.model).to(dtype)
        return Trunk(model, [model.get_submodule(names[block]) for block in self.blocks])

    @torch.no_grad()
    def cache(self, tokens: Tokens, *, last_layer: int | None = None) -> Any:
        """Return a cache of these tokens, for all blocks or up to `last_layer`; None if there are no tokens."""
        if tokens.ids.shape[-1] == 0:
            return None
        if not self.shares_prefixes:
            return Prefixes(tokens)
        if last_layer is None or not self.model._supports_default_dynamic_cache():  # or a cache of its own kind
            return self._run_base(tokens, use_cache=True).past_key_values
        cache = DynamicCache(config=self.model.config)
        with self._stopping_after(last_layer):
            self._run_base(tokens, cache)
        return cache

    @torch.no_grad()
    def after(self, layer: int, tokens: Tokens, *, cache: Any = None, resume: Resume | None = None) -> Hidden:
        """Return the output of block `layer`; nothing above it is computed."""
        return self._after(layer, self._prepare(tokens, cache, resume))

    def _after(self, layer: int, run: _Run) -> Hidden:
        with self._stopping_after(layer) as outputs, self._resuming(run.resume):
            self._run_base(run.tokens, borrow_cache(run.cache))
        states: Hidden = run.restore(self.states_in(outputs[0], run.tokens))
        return states

    def states_in(self, block_output: Any, tokens: Tokens) -> Hidden:
        """Return the hidden states in the output of a block."""
        return _mean_of(self._streams(_states_in(block_output), tokens.ids.shape))

    def _streams(self, states: Tensor, shape: torch.Size) -> Tensor:
        """Return the states of a block as [rows, tokens, streams, width]; nearly all families have one stream."""
        width: int = self.model.config.get_text_config().hidden_size
        if states.ndim == 4 and states.shape[:2] != shape:  # [streams, rows, tokens, width]
            states = states.movedim(0, 2)
        if states.numel() % (shape.numel() * width) or (states.ndim == 3 and states.shape[:2] != shape):
            problem = f"Blocks have states of shape {list(states.shape)} for tokens of shape {list(shape)}"
            expected = f"{width} numbers per token"
            raise InputError(problem, expected=expected, advice="Use another family", code="other_tokens")
        return states.reshape(*shape, -1, width)

    @torch.no_grad()
    def inputs(self, modules: Sequence[nn.Module], tokens: Tokens, *, resume: Resume | None = None) -> list[Any]:
        """Return the input of each of the modules, [rows, tokens, width]; the run ends at the last one.

        For a block these are hidden states, and for routed experts they are `RoutedKeys`.
        """
        run = self._prepare(tokens, None, resume)
        shape = run.tokens.ids.shape
        inputs: dict[int, Any] = {}

        def record(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_experts(module):
                inputs[index] = routed_keys(module, args, kwargs).map(lambda values: values.unflatten(0, shape))
            elif module in self.blocks:
                inputs[index] = _mean_of(self._streams(_first_argument(args, kwargs), shape))
            else:
                module_input = _first_argument(args, kwargs).reshape(*shape, -1)  # some families flatten rows
                inputs[index] = full_input(module, module_input)
            if len(inputs) == len(modules):
                raise _Stop

        with ExitStack() as hooks, self._resuming(run.resume):
            for index, module in enumerate(modules):
                hooks.enter_context(module.register_forward_pre_hook(partial(record, index), with_kwargs=True))
            self._run_base(run.tokens)
        return [run.restore(inputs[index]) for index in range(len(modules))]

    def logits(self, tokens: Tokens, where: Tensor, *, cache: Any = None, resume: Resume | None = None) -> Tensor:
        """Return the next-token logits [m, vocabulary] at `where` [m, 2] (row, token), in float32 or better.

        Gradients flow into the states of `resume`.
        """
        run = self._prepare(tokens, cache, resume)
        rows, positions = run.translate(where).unbind(-1)

        def choose(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            states = args[0]
            return (states[rows.to(states.device), positions.to(states.device)].unsqueeze(0), *args[1:])

        with self.model.get_output_embeddings().register_forward_pre_hook(choose), self._resuming(run.resume):
            arguments = self._arguments(run.tokens, borrow_cache(run.cache), self._head_accepts)
            logits: Tensor = self.model(**arguments).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _prepare(self, tokens: Tokens, cache: Any, resume: Resume | None) -> _Run:
        if self.shares_prefixes:
            return _Run(tokens, cache, resume)
        return self._whole_rows(tokens, cache, resume)

    def _whole_rows(self, tokens: Tokens, prefixes: Prefixes | None, resume: Resume | None) -> _Run:
        """Join the prefix and the tokens of each row, with all padding behind them."""
        past = tokens.ids[:, :0] if prefixes is None else prefixes.tokens.ids
        order = tokens.mask.argsort(dim=-1, descending=True, stable=True)
        mask = tokens.mask.gather(1, order)
        whole = Tokens(torch.cat([past, tokens.ids], dim=-1).gather(1, order), mask, (mask.cumsum(-1) - 1).clamp_min(0))
        if resume is not None:
            layer, states = resume
            if prefixes is not None:
                if layer not in prefixes.states:
                    prefixes.states[layer] = self.after(layer, prefixes.tokens)
                states = torch.cat([prefixes.states[layer].to(states), states], dim=1)
            resume = layer, _take(states, order)
        return _Run(whole, None, resume, order.argsort(dim=-1)[:, past.shape[1] :])

    def _run_base(self, tokens: Tokens, cache: Any = None, *, use_cache: bool = False) -> Any:
        """Return the output of the model without its head, or None if a hook stopped the run."""
        arguments = self._arguments(tokens, cache, self._accepts, use_cache=use_cache)
        with self._finite_padding(tokens), suppress(_Stop):
            return self.model.base_model(**arguments)
        reshard(self.blocks)
        return None

    def _arguments(self, tokens: Tokens, cache: Any, accepts: set[str], *, use_cache: bool = False) -> dict[str, Any]:
        optional = {"position_ids": tokens.positions, "use_cache": use_cache or cache is not None}
        arguments = {name: value for name, value in optional.items() if name in accepts}
        if cache is not None:
            arguments["past_key_values"] = cache
        return {"input_ids": tokens.ids, "attention_mask": tokens.mask, **arguments}

    @contextmanager
    def _finite_padding(self, tokens: Tokens) -> Iterator[None]:
        """Keep the states of left padding at zero.

        Padding in front of a row can attend to nothing, and a softmax over nothing is NaN in some families and dtypes.
        The result is not used, but the next block multiplies it by 0, and 0 · NaN is NaN.
        """
        is_token = tokens.mask[:, -tokens.ids.shape[-1] :].bool()

        def clean(_: nn.Module, __: Any, out: Any) -> Any:
            states = _states_in(out)
            streams = self._streams(states, tokens.ids.shape)
            finite = _in_layout(torch.where(is_token.to(states.device)[..., None, None], streams, 0.0), states)
            return (finite, *out[1:]) if isinstance(out, (tuple, list)) else finite

        with ExitStack() as hooks:
            if not is_token[:, 0].all():
                for block in self.blocks:  # before recording hooks, so that they see what the next block gets
                    hooks.enter_context(block.register_forward_hook(clean, prepend=True))
            yield

    @contextmanager
    def _stopping_after(self, layer: int) -> Iterator[list[Any]]:
        """Stop the run after a block, and yield a list that will hold its output."""
        outputs: list[Any] = []

        def record(_: nn.Module, __: Any, out: Any) -> None:
            outputs.append(out)
            raise _Stop

        with self.blocks[layer].register_forward_hook(record):
            yield outputs

    @contextmanager
    def _resuming(self, resume: Resume | None) -> Iterator[None]:
        """Skip the blocks up to a layer and let the last of them return known states."""
        if resume is None:
            yield
            return
        layer, known = resume
        interface = self._interface  # read before blocks are replaced: the first access runs the model

        def replace_states(_: nn.Module, __: Any, out: Any) -> Any:
            states = _states_in(out)
            streams = self._streams(states, known.shape[:2])
            change = known.to(states.device) - _mean_of(streams)
            states = _in_layout(streams + change.unsqueeze(-2), states)
            return states if interface.outputs is None else (states, *out[1:])

        def forward(output: Hidden | None, *args: Any, **kwargs: Any) -> Any:
            states = _first_argument(args, kwargs)
            states = states if output is None else output.to(states.device)
            return states if interface.outputs is None else (states, *([None] * (interface.outputs - 1)))

        key_blocks, lowest_source = self._key_sharing
        if known.requires_grad and key_blocks - 1 <= layer < len(self.blocks) - 1:
            raise InputError(
                f"Blocks from {key_blocks} on use the keys of earlier blocks, so no later token sees a change after "
                f"block {layer}",
                advice=f"Choose {{layers}} below {key_blocks - 1}" if key_blocks > 1 else "Use another family",
                settings={"layers": None},
                code="shared_keys",
            )
        with ExitStack() as replaced:
            if interface.needs_run or (key_blocks < len(self.blocks) and layer >= lowest_source):
                replaced.enter_context(self.blocks[layer].register_forward_hook(replace_states))
            else:
                for block in self.blocks[:layer]:
                    replaced.enter_context(_replaced_forward(block, partial(forward, None)))
                replaced.enter_context(_replaced_forward(self.blocks[layer], partial(forward, known)))
            yield

    @cached_property
    def _key_sharing(self) -> tuple[int, int]:
        """The number of blocks that compute attention keys, and the lowest block whose keys later blocks reuse.

        In Gemma 3n and 4, upper blocks use the keys and values of the last lower block of their kind.
        """
        config = self.model.config.get_text_config()
        count = len(self.blocks) - (getattr(config, "num_kv_shared_layers", 0) or 0)
        kinds = (getattr(config, "layer_types", None) or [""] * len(self.blocks))[:count]
        return count, min((count - 1 - kinds[::-1].index(kind) for kind in set(kinds)), default=count)


@contextmanager
def _replaced_forward(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    instance_forward = block.__dict__.get("forward")  # accelerate replaces the method on the instance
    block.forward = forward
    setattr(block, SKIPPED, True)
    try:
        yield
    finally:
        delattr(block, SKIPPED)
        if instance_forward is None:
            del block.forward
        else:
            block.forward = instance_forward


def _states_in(block_output: Any) -> Tensor:
    states: Tensor = block_output[0] if isinstance(block_output, (tuple, list)) else block_output
    return states


def _first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _mean_of(streams: Tensor) -> Hidden:
    return streams.squeeze(-2) if streams.shape[-2] == 1 else streams.mean(-2)


def _in_layout(streams: Tensor, block_states: Tensor) -> Tensor:
    """Return streams [rows, tokens, streams, width] in the layout of the states of a block."""
    if block_states.ndim == 4 and block_states.shape != streams.shape:
        return streams.movedim(2, 0)
    return streams.reshape(block_states.shape)


def _take(values: Tensor, positions: Tensor) -> Tensor:
    """Return the values at `positions` [rows, n] of each row."""
    rows = torch.arange(len(positions), device=values.device).unsqueeze(-1)
    return values[rows, positions.to(values.device)]
