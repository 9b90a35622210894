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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rebind.errors import InputError

Hidden = Tensor  # [rows, tokens, width]


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
        width = max((len(row) for row in rows), default=0)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            if row:
                ids[index, width - len(row) :] = torch.as_tensor(row)
                mask[index, width - len(row) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        return cls(ids.to(device), mask.to(device), positions.to(device))

    @classmethod
    def following(cls, past: Tokens, rows: Sequence[Sequence[int]]) -> Tokens:
        """Return rows that begin together, right after `past`."""
        device = past.ids.device
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.as_tensor(row)
            mask[index, : len(row)] = 1
        positions = past.mask.sum(-1, keepdim=True) + torch.arange(width, device=device)
        return cls(ids.to(device), torch.cat([past.mask, mask.to(device)], dim=-1), positions)

    @classmethod
    def right_padded(cls, rows: Sequence[Sequence[int]], device: torch.device) -> Tokens:
        """Return rows that begin together, with nothing before them."""
        return cls.following(cls.left_padded([()] * len(rows), device), rows)

    def select(self, rows: Tensor) -> Tokens:
        """Return some of the rows."""
        return Tokens(self.ids[rows], self.mask[rows], self.positions[rows])


class Trunk:
    """A causal language model and the list of its blocks, first to last."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.model: Any = model
        self.blocks = list(blocks)
        self._accepts = set(inspect.signature(model.base_model.forward).parameters)  # type: ignore[union-attr]
        self._head_accepts = set(inspect.signature(self.model.forward).parameters)
        self._returns_tuple: bool | None = None  # whether blocks return a tuple, hidden states first; found by a run

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
            self._run_until_stopped(tokens, cache)
        return cache

    @torch.no_grad()
    def after(
        self, layer: int, tokens: Tokens, *, cache: Any = None, resume: tuple[int, Hidden] | None = None
    ) -> Hidden:
        """Return the output of block `layer`; nothing above it is computed. `resume` is as in `logits`."""
        with self._stopping_after(layer) as outputs, self._resuming(resume):
            self._run_until_stopped(tokens, borrow_cache(cache))
        return _states_in(outputs[0])

    @torch.no_grad()
    def inputs(
        self,
        modules: Sequence[nn.Module],
        tokens: Tokens,
        *,
        cache: Any = None,
        resume: tuple[int, Hidden] | None = None,
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
            self._run_until_stopped(tokens, borrow_cache(cache))
        return [inputs[index] for index in range(len(modules))]

    def logits(
        self, tokens: Tokens, where: Tensor, *, cache: Any = None, resume: tuple[int, Hidden] | None = None
    ) -> Tensor:
        """Return the next-token logits [m, vocabulary] at `where` [m, 2] (row, token), in float32 or better.

        `resume=(layer, states)` begins above block `layer`, the output of which is taken to be `states`; gradients
        flow into them.
        """

        def choose(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            states = args[0]
            return (states[where[:, 0].to(states.device), where[:, 1].to(states.device)].unsqueeze(0), *args[1:])

        with self.model.get_output_embeddings().register_forward_pre_hook(choose), self._resuming(resume):
            arguments = self._arguments(tokens, borrow_cache(cache), self._head_accepts)
            logits: Tensor = self.model(**arguments, use_cache=cache is not None).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _run_base(self, tokens: Tokens, cache: Any = None, *, use_cache: bool) -> Any:
        with self._finite_padding(tokens):
            return self.model.base_model(**self._arguments(tokens, cache, self._accepts), use_cache=use_cache)

    def _run_until_stopped(self, tokens: Tokens, cache: Any) -> None:
        try:
            self._run_base(tokens, cache, use_cache=cache is not None)
        except _Stop:
            return

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
    def _resuming(self, resume: tuple[int, Hidden] | None) -> Iterator[None]:
        """Skip the blocks up to a layer and let the last of them return known states."""
        if resume is None:
            yield
            return
        layer, known = resume
        self._require_own_keys_above(layer)
        if self._returns_tuple is None:
            with torch.no_grad(), self._stopping_after(0) as outputs:
                self._run_until_stopped(Tokens.left_padded([(0,)], self.device), None)
            self._returns_tuple = isinstance(outputs[0], tuple)

        def pass_through(*args: Any, **kwargs: Any) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            return (states,) if self._returns_tuple else states

        def return_known(*args: Any, **kwargs: Any) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            return pass_through(known.to(states.device))

        with ExitStack() as replaced:
            for block in self.blocks[:layer]:
                replaced.enter_context(_replaced_forward(block, pass_through))
            replaced.enter_context(_replaced_forward(self.blocks[layer], return_known))
            yield

    def _require_own_keys_above(self, layer: int) -> None:
        """Raise if blocks above use keys and values that a skipped block would compute (as in Gemma 3n)."""
        config = self.model.config.get_text_config()
        own = len(self.blocks) - (getattr(config, "num_kv_shared_layers", 0) or 0)
        kinds = (getattr(config, "layer_types", None) or ["" for _ in self.blocks])[:own]
        lowest = min((max(i for i, kind in enumerate(kinds) if kind == one) for one in set(kinds)), default=own)
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


def _states_in(out: Any) -> Hidden:
    """Return the hidden states in the output of a block."""
    states: Hidden = out[0] if isinstance(out, tuple) else out
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
