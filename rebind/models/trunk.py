"""Run a causal language model in pieces: stop early, resume late, compute only what is needed.

Editing asks many small questions of a model: the input of one matrix at one token, or the logits at two positions when
one hidden state is changed. A full forward pass for each would spend nearly all of its time on work that was done
before. `Trunk` runs any Hugging Face causal model block by block without knowing its architecture:

- it *stops early* by raising an exception in a hook, so nothing above is computed;
- it *resumes* above a block: the blocks below pass their input through, and the last of them returns known states;
- it *shares prefixes* through the key/value cache of the model;
- it runs the output head at chosen positions only.
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
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from rebind.errors import InputError

Hidden = Tensor  # [rows, tokens, width]
Resume = tuple[int, Hidden]  # a layer and the output that its block is taken to have: the run begins above it


class _Stop(Exception):  # noqa: N818 - a signal, not an error
    """Raised in a hook once everything that is needed has been computed."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Padded rows of token ids."""

    ids: Tensor  # [rows, tokens]
    mask: Tensor  # [rows, past + tokens]: 1 where there is a token, the mask of the past in front
    positions: Tensor  # [rows, tokens]: the position of each token in its own sequence

    @classmethod
    def left_padded(cls, rows: Sequence[Sequence[int]], device: torch.device) -> Tokens:
        """Return rows that end together, for a cache of prefixes or a key at the last token."""
        ids, mask = _pad(rows, "left", device)
        return cls(ids, mask, (mask.cumsum(-1) - 1).clamp_min(0))

    @classmethod
    def following(cls, past: Tokens, rows: Sequence[Sequence[int]]) -> Tokens:
        """Return rows that begin together, right after `past`."""
        ids, mask = _pad(rows, "right", past.ids.device)
        positions = past.mask.sum(-1, keepdim=True) + torch.arange(ids.shape[-1], device=ids.device)
        return cls(ids, torch.cat([past.mask, mask], dim=-1), positions)

    @classmethod
    def right_padded(cls, rows: Sequence[Sequence[int]], device: torch.device) -> Tokens:
        """Return rows that begin together, with nothing before them."""
        return cls.following(cls.left_padded([()] * len(rows), device), rows)

    def select(self, rows: Tensor) -> Tokens:
        """Return some of the rows."""
        return Tokens(self.ids[rows], self.mask[rows], self.positions[rows])


def _pad(rows: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of different lengths as one tensor, and a mask that is 1 where there is a token."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)


class Trunk:
    """A causal language model and the list of its blocks, first to last."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.model: Any = model
        self.blocks = list(blocks)
        self._accepts = set(inspect.signature(model.base_model.forward).parameters)  # type: ignore[union-attr]
        self._head_accepts = set(inspect.signature(self.model.forward).parameters)

    @property
    def device(self) -> torch.device:
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.blocks[0].parameters()).dtype

    @property
    def context_length(self) -> int | None:
        """The longest sequence the model takes, where its config says so."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) else None

    @cached_property
    def _returns_tuple(self) -> bool:
        """Whether blocks return a tuple with the hidden states first, as a short run shows."""
        with torch.no_grad(), self._stopping_after(0) as outputs:
            self._run_base(Tokens.left_padded([(0,)], self.device))
        return isinstance(outputs[0], tuple)

    def narrowed(self, dtype: torch.dtype) -> Trunk:
        """Return a copy of the model as it is now in a narrower dtype."""
        names = {module: name for name, module in self.model.named_modules()}
        model = copy.deepcopy(self.model).to(dtype)
        return Trunk(model, [model.get_submodule(names[block]) for block in self.blocks])

    @torch.no_grad()
    def cache(self, tokens: Tokens, *, last_layer: int | None = None) -> Any:
        """Return the keys and values of these tokens at every block, or up to one of them; None for no tokens."""
        if tokens.ids.shape[-1] == 0:
            return None
        if last_layer is None or not self.model._supports_default_dynamic_cache():  # or it has its own kind of cache
            return cache_of(self._run_base(tokens, use_cache=True))
        cache = DynamicCache(config=self.model.config)
        with self._stopping_after(last_layer):
            self._run_base(tokens, cache)
        return cache

    @torch.no_grad()
    def after(self, layer: int, tokens: Tokens, *, cache: Any = None, resume: Resume | None = None) -> Hidden:
        """Return the output of block `layer`; nothing above it is computed."""
        with self._stopping_after(layer) as outputs, self._resuming(resume):
            self._run_base(tokens, borrow_cache(cache))
        return _states_in(outputs[0])

    @torch.no_grad()
    def inputs(
        self, modules: Sequence[nn.Module], tokens: Tokens, *, cache: Any = None, resume: Resume | None = None
    ) -> list[Tensor]:
        """Return the input of each of the modules; the run ends at the last one."""
        inputs: dict[int, Tensor] = {}

        def record(index: int, _: nn.Module, args: tuple[Any, ...]) -> None:
            inputs[index] = args[0].reshape(*tokens.ids.shape, -1)  # some families flatten rows and tokens
            if len(inputs) == len(modules):
                raise _Stop

        with ExitStack() as hooks, self._resuming(resume):
            for index, module in enumerate(modules):
                hooks.enter_context(module.register_forward_pre_hook(partial(record, index)))
            self._run_base(tokens, borrow_cache(cache))
        return [inputs[index] for index in range(len(modules))]

    def logits(self, tokens: Tokens, where: Tensor, *, cache: Any = None, resume: Resume | None = None) -> Tensor:
        """Return the next-token logits [m, vocabulary] at `where` [m, 2] (row, token), in float32 or better.

        Gradients flow into the states of `resume`.
        """

        def choose(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            states = args[0]
            return (states[where[:, 0].to(states.device), where[:, 1].to(states.device)].unsqueeze(0), *args[1:])

        with self.model.get_output_embeddings().register_forward_pre_hook(choose), self._resuming(resume):
            arguments = self._arguments(tokens, borrow_cache(cache), self._head_accepts)
            logits: Tensor = self.model(**arguments, use_cache=cache is not None).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _run_base(self, tokens: Tokens, cache: Any = None, *, use_cache: bool = False) -> Any:
        """Return the output of the model without its head, or None where a hook stopped the run."""
        arguments = self._arguments(tokens, cache, self._accepts)
        with self._finite_padding(tokens), suppress(_Stop):
            return self.model.base_model(**arguments, use_cache=use_cache or cache is not None)
        return None

    def _arguments(self, tokens: Tokens, cache: Any, accepts: set[str]) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": tokens.ids, "attention_mask": tokens.mask}
        if "position_ids" in accepts:
            arguments["position_ids"] = tokens.positions
        if cache is not None:
            arguments["past_key_values"] = cache
        return arguments

    @contextmanager
    def _finite_padding(self, tokens: Tokens) -> Iterator[None]:
        """Keep the states of left padding at zero.

        Padding in front of a row can attend to nothing, and a softmax over nothing is NaN in some families and dtypes.
        The result is not used, but the next block multiplies it by 0, and 0 · NaN is NaN.
        """
        is_token = tokens.mask[:, -tokens.ids.shape[-1] :].bool()

        def clean(_: nn.Module, __: Any, out: Any) -> Any:
            states = _states_in(out)
            finite = torch.where(is_token.to(states.device).unsqueeze(-1), states, 0.0)
            return (finite, *out[1:]) if isinstance(out, tuple) else finite

        with ExitStack() as hooks:
            if not is_token[:, 0].all():
                for block in self.blocks:  # before the hooks that record: they see what the next block gets
                    hooks.enter_context(block.register_forward_hook(clean, prepend=True))
            yield

    @contextmanager
    def _stopping_after(self, layer: int) -> Iterator[list[Any]]:
        """Stop after a block; its output is then in the list."""
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
        self._require_own_keys_above(layer)
        returns_tuple = self._returns_tuple  # found out now: the blocks are about to be replaced

        def forward(output: Hidden | None, *args: Any, **kwargs: Any) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            states = states if output is None else output.to(states.device)
            return (states,) if returns_tuple else states

        with ExitStack() as replaced:
            for block in self.blocks[:layer]:
                replaced.enter_context(_replaced_forward(block, partial(forward, None)))
            replaced.enter_context(_replaced_forward(self.blocks[layer], partial(forward, known)))
            yield

    def _require_own_keys_above(self, layer: int) -> None:
        """Raise if blocks above use keys and values that a skipped block would compute (as in Gemma 3n)."""
        config = self.model.config.get_text_config()
        own = len(self.blocks) - (getattr(config, "num_kv_shared_layers", 0) or 0)
        kinds = (getattr(config, "layer_types", None) or [""] * len(self.blocks))[:own]
        lowest = min((own - 1 - kinds[::-1].index(kind) for kind in set(kinds)), default=own)
        if own < len(self.blocks) and layer >= lowest:
            raise InputError(
                f"Blocks from {own} on use the keys of block {lowest}, which no run above block {layer} computes",
                advice=f"Choose {{layers}} below {lowest}",
                settings={"layers": None},
                code="shared_keys",
            )


@contextmanager
def _replaced_forward(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = block.__dict__.get("forward")  # accelerate replaces the method on the instance
    block.forward = forward
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own


def _states_in(block_output: Any) -> Hidden:
    states: Hidden = block_output[0] if isinstance(block_output, tuple) else block_output
    return states


def cache_of(out: Any) -> Any:
    """Return the cache in the output of a model."""
    if getattr(out, "past_key_values", None) is None:
        raise InputError("The model returns no cache of keys and values", advice="Use another family", code="no_cache")
    return out.past_key_values


def select_cache(cache: Any, rows: Tensor) -> Any:
    """Return the cache of some of its rows."""
    selected = borrow_cache(cache)
    if selected is not None:
        selected.batch_select_indices(rows)  # indexing creates new tensors: the original keeps its own
    return selected


def borrow_cache(cache: Any) -> Any:
    """Return a cache that shares the stored tensors but grows on its own: a run does not change the original."""
    if cache is None:
        return None
    borrowed = copy.copy(cache)
    borrowed.layers = [copy.copy(layer) for layer in cache.layers]
    return borrowed
