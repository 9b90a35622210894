"""A trunk that does the work which the search for targets is spared: whole prompts, all blocks, logits everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rebind.models.caches import borrow_cache
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk


@dataclass(eq=False)
class _Prefixes:
    """Stands for a cache: remembers the tokens instead of their keys and values, and is handed on like one."""

    tokens: Tokens
    states: Tensor | None = None  # [rows, prefix + suffix, width]: of the block below δ, found at the first run
    layers: tuple[()] = ()

    def batch_select_indices(self, rows: Tensor) -> None:
        self.tokens = self.tokens.select(rows)
        self.states = None if self.states is None else self.states[rows]


class Plain(Trunk):
    """A trunk that does what need not be done: any of three things, each with the same answers."""

    def __init__(self, trunk: Trunk, *, whole: bool = False, below: bool = False, everywhere: bool = False) -> None:
        super().__init__(trunk.model, trunk.blocks)
        self.whole = whole  # run prompts from their first token, not from the subject's last
        self.below = below  # run the blocks below δ as well
        self.everywhere = everywhere  # logits at every token

    def cache(self, tokens: Tokens, *, last_layer: int | None = None) -> Any:
        if not self.whole or tokens.ids.shape[-1] == 0:
            return super().cache(tokens, last_layer=last_layer)
        return _Prefixes(tokens)

    @torch.no_grad()
    def after(self, layer: int, tokens: Tokens, *, cache: Any = None, resume: Any = None) -> Tensor:
        if not isinstance(cache, _Prefixes):
            return super().after(layer, tokens, cache=cache, resume=resume)
        joined, order = _joined(cache.tokens, tokens)
        cache.states = _reordered(super().after(layer, joined), order.argsort(-1))
        return cache.states[:, -tokens.ids.shape[-1] :]

    def logits(self, tokens: Tokens, where: Tensor, *, cache: Any = None, resume: Any = None) -> Tensor:
        if isinstance(cache, _Prefixes):
            tokens, where, resume = self._from_the_first_token(tokens, where, cache, resume)
            cache = None
        late = nullcontext() if self.below and resume is not None else self._resuming(resume)
        with late, self._answering(resume) if self.below else nullcontext():
            if not self.everywhere:
                return super().logits(tokens, where, cache=cache)
            logits = self.model(**self._arguments(tokens, borrow_cache(cache), self._head_accepts)).logits
            return logits[where[:, 0], where[:, 1]].to(torch.promote_types(logits.dtype, torch.float32))

    def _from_the_first_token(
        self, tokens: Tokens, where: Tensor, cache: _Prefixes, resume: tuple[int, Tensor]
    ) -> tuple[Tokens, Tensor, tuple[int, Tensor]]:
        layer, hidden = resume
        if cache.states is None:
            self.after(layer, tokens, cache=cache)
        assert cache.states is not None
        joined, order = _joined(cache.tokens, tokens)
        before = cache.states[:, : -hidden.shape[1]].to(hidden.dtype)
        states = _reordered(torch.cat([before, hidden], dim=1), order)
        lengths = cache.tokens.mask.sum(-1)
        there = torch.stack([where[:, 0], where[:, 1] + lengths[where[:, 0]]], dim=-1)
        return joined, there, (layer, states)

    @contextmanager
    def _answering(self, resume: tuple[int, Tensor] | None) -> Iterator[None]:
        """Let every block run, and replace what the one at δ says."""
        if resume is None:
            yield
            return
        layer, hidden = resume

        def answer(_: nn.Module, __: Any, out: Any) -> Any:
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        handle = self.blocks[layer].register_forward_hook(answer)
        try:
            yield
        finally:
            handle.remove()


def _joined(past: Tokens, tokens: Tokens) -> tuple[Tokens, Tensor]:
    """Prefixes and suffixes in one, padding behind; and where each token of [padding, prefix, suffix] went."""
    ids = torch.cat([past.ids, tokens.ids], dim=-1)
    padding = past.ids.shape[-1] - past.mask.sum(-1, keepdim=True)
    places = torch.arange(ids.shape[-1], device=ids.device)
    order = (places + padding) % ids.shape[-1]
    mask = tokens.mask.gather(-1, order)
    return Tokens(ids.gather(-1, order), mask, places.expand_as(ids)), order


def _reordered(states: Tensor, order: Tensor) -> Tensor:
    return states.gather(1, order.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
