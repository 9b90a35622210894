"""Run a causal language model in pieces: stop early, start late, keep only what is needed.

Editing asks many small questions of a model: the input of one matrix at one token, the logits of two
positions when one hidden state is changed. A full forward pass for each would spend nearly all of its
time on work whose result is known. `Trunk` runs any Hugging Face causal model block by block without
knowing its architecture:

- it *stops* by raising out of a hook, so nothing above is computed;
- it *starts late* by letting the blocks below hand their input through and the last of them return the
  hidden states it is given;
- it *shares prefixes* through the model's own key/value cache;
- it asks the output head about chosen positions only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rebind.errors import InputError

Hidden = Tensor  # [rows, tokens, width]


class _Stop(Exception):  # noqa: N818 - a signal, not an error
    """Raised out of a hook once everything asked for has been seen."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Padded rows of token ids."""

    ids: Tensor  # [rows, tokens]
    mask: Tensor  # [rows, past + tokens]: 1 where there is a token, the past's mask in front
    positions: Tensor  # [rows, tokens]: each token's place in its own sequence

    @classmethod
    def left_padded(cls, rows: Sequence[Sequence[int]], device: torch.device) -> Tokens:
        """Rows that end together: what a cache of prefixes, or a key at the last token, wants."""
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
        """Rows that begin together, right after `past`."""
        device = past.ids.device
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.as_tensor(row)
            mask[index, : len(row)] = 1
        start = past.mask.sum(-1, keepdim=True)
        positions = start + torch.arange(width, device=device)
        return cls(ids.to(device), torch.cat([past.mask, mask.to(device)], dim=-1), positions)

    def select(self, rows: Tensor) -> Tokens:
        return Tokens(self.ids[rows], self.mask[rows], self.positions[rows])


class Trunk:
    """A causal language model and the list of its blocks, first to last."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.model: Any = model
        self.blocks = list(blocks)
        self._accepts = set(inspect.signature(model.base_model.forward).parameters)  # type: ignore[union-attr]
        self._head_accepts = set(inspect.signature(self.model.forward).parameters)
        self._in_tuple: bool | None = None  # whether blocks answer with a tuple, hidden states first; learnt by a run

    @property
    def device(self) -> torch.device:
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.blocks[0].parameters()).dtype

    def narrowed(self, dtype: torch.dtype) -> Trunk:
        """The same model as it stands, copied to a narrower dtype."""
        names = {module: name for name, module in self.model.named_modules()}
        model = copy.deepcopy(self.model).to(dtype)
        return Trunk(model, [model.get_submodule(names[block]) for block in self.blocks])

    @property
    def context(self) -> int | None:
        """The longest sequence the model takes, where its config says so."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) else None

    @torch.no_grad()
    def cache(self, tokens: Tokens, *, until: int | None = None) -> Any:
        """The keys and values of these tokens at every block, or at those until one; None for no tokens."""
        if tokens.ids.shape[-1] == 0:
            return None
        if until is None or not self.model._supports_default_dynamic_cache():  # or it has a cache of its own kind
            return cache_of(self._base(tokens, use_cache=True))
        cache = DynamicCache(config=self.model.config)
        with self._watching(self.blocks[until], lambda *_: None):
            self._until_stopped(tokens, cache, borrow=False)
        return cache

    @torch.no_grad()
    def after(
        self, layer: int, tokens: Tokens, *, cache: Any = None, start: tuple[int, Hidden] | None = None
    ) -> Hidden:
        """The output of block `layer`, nothing above it computed. `start` is as in `logits`."""
        seen: list[Hidden] = []
        with self._watching(self.blocks[layer], lambda _, out: seen.append(out)), self._starting(start):
            self._until_stopped(tokens, cache)
        return seen[0]

    @torch.no_grad()
    def inputs(
        self,
        modules: Sequence[nn.Module],
        tokens: Tokens,
        *,
        cache: Any = None,
        start: tuple[int, Hidden] | None = None,
    ) -> list[Tensor]:
        """What enters each of the modules, the last of them the one where the run ends."""
        seen: dict[int, Tensor] = {}

        def watch(index: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                seen[index] = args[0].reshape(*tokens.ids.shape, -1)  # some families flatten rows and tokens into one
                if len(seen) == len(modules):
                    raise _Stop

            return hook

        handles = [module.register_forward_pre_hook(watch(index)) for index, module in enumerate(modules)]
        try:
            with self._starting(start):
                self._until_stopped(tokens, cache)
        finally:
            for handle in handles:
                handle.remove()
        return [seen[index] for index in range(len(modules))]

    def logits(
        self, tokens: Tokens, where: Tensor, *, cache: Any = None, start: tuple[int, Hidden] | None = None
    ) -> Tensor:
        """Next-token logits at positions `where` [m, 2] (row, token), [m, vocabulary], in float32 or better.

        `start=(layer, hidden)` begins above block `layer`, whose output is taken to be `hidden`; gradients
        flow into it.
        """
        head = self.model.get_output_embeddings()

        def choose(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            states = args[0]
            return (states[where[:, 0].to(states.device), where[:, 1].to(states.device)].unsqueeze(0), *args[1:])

        handle = head.register_forward_pre_hook(choose)
        try:
            with self._starting(start):
                held = None if cache is None else _borrowed(cache)
                out = self.model(**self._arguments(tokens, held, self._head_accepts), use_cache=cache is not None)
        finally:
            handle.remove()
        logits: Tensor = out.logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _base(self, tokens: Tokens, cache: Any = None, *, use_cache: bool, borrow: bool = True) -> Any:
        held = _borrowed(cache) if borrow and cache is not None else cache
        with self._finite_padding(tokens):
            return self.model.base_model(**self._arguments(tokens, held, self._accepts), use_cache=use_cache)

    def _until_stopped(self, tokens: Tokens, cache: Any, *, borrow: bool = True) -> None:
        try:
            self._base(tokens, cache, use_cache=cache is not None, borrow=borrow)
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

        Padding in front of a row may look at nothing, and a softmax over nothing is NaN in some families and
        dtypes. Nobody reads it, but the next block weighs it by 0, and 0 · NaN is NaN.
        """
        here = tokens.mask[:, -tokens.ids.shape[-1] :].bool()
        if here[:, 0].all():
            yield
            return

        def clean(_: nn.Module, __: Any, out: Any) -> Any:
            states = out[0] if isinstance(out, tuple) else out
            kept = torch.where(here.to(states.device).unsqueeze(-1), states, 0.0)
            return (kept, *out[1:]) if isinstance(out, tuple) else kept

        # In front of the hooks that watch: they see what the next block does.
        handles = [block.register_forward_hook(clean, prepend=True) for block in self.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _watching(self, block: nn.Module, see: Callable[[nn.Module, Hidden], Any]) -> Iterator[None]:
        """Show a block's hidden states and stop there."""

        def hook(module: nn.Module, _: Any, out: Any) -> None:
            see(module, out[0] if isinstance(out, tuple) else out)
            raise _Stop

        handle = block.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _starting(self, start: tuple[int, Hidden] | None) -> Iterator[None]:
        """Let blocks up to `layer` cost nothing and the last of them answer `hidden`."""
        if start is None:
            yield
            return
        layer, hidden = start
        self._require_keys_above(layer)
        if self._in_tuple is None:
            self._in_tuple = self._learn_in_tuple()

        def through(*args: Any, **kwargs: Any) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            return (states,) if self._in_tuple else states

        def answer(*args: Any, **kwargs: Any) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            return through(hidden.to(states.device))

        replaced = self.blocks[: layer + 1]
        own = [block.__dict__.get("forward") for block in replaced]
        try:
            for block in replaced:
                block.forward = through
            self.blocks[layer].forward = answer
            yield
        finally:
            for block, forward in zip(replaced, own, strict=True):
                if forward is None:
                    block.__dict__.pop("forward", None)
                else:
                    block.forward = forward

    def _require_keys_above(self, layer: int) -> None:
        """Refuse to hand through a block whose keys and values blocks above it read as their own."""
        config = self.model.config.get_text_config()
        own = len(self.blocks) - (getattr(config, "num_kv_shared_layers", 0) or 0)
        kinds = (getattr(config, "layer_types", None) or ["" for _ in self.blocks])[:own]
        lowest = min((max(i for i, kind in enumerate(kinds) if kind == one) for one in set(kinds)), default=own)
        if own < len(self.blocks) and layer >= lowest:
            raise InputError(
                f"blocks from {own} on read keys that block {lowest} makes, and a run that begins above block {layer} "
                f"does not make them: choose layers below {lowest}"
            )

    @torch.no_grad()
    def _learn_in_tuple(self) -> bool:
        """What shape blocks answer in, from a run of one token."""
        answers: list[Any] = []

        def see(_: nn.Module, __: Any, out: Any) -> None:
            answers.append(out)
            raise _Stop

        handle = self.blocks[0].register_forward_hook(see)
        try:
            self._until_stopped(Tokens.left_padded([(0,)], self.device), None)
        finally:
            handle.remove()
        return isinstance(answers[0], tuple)


def cache_of(out: Any) -> Any:
    """The cache that a run left."""
    if getattr(out, "past_key_values", None) is None:
        raise InputError(
            "the model leaves no cache of keys and values, expected one to go on from: choose a model of another family"
        )
    return out.past_key_values


def select_cache(cache: Any, rows: Tensor) -> Any:
    """The cache of some of its rows."""
    if cache is None:
        return None
    chosen = _borrowed(cache)
    chosen.batch_select_indices(rows)  # indexing makes new tensors: the original keeps its own
    return chosen


def _borrowed(cache: Any) -> Any:
    """A cache that shares the stored tensors but grows on its own: a run appends to it, not to the original."""
    borrowed = copy.copy(cache)
    borrowed.layers = [copy.copy(layer) for layer in cache.layers]
    return borrowed
