"""Caches of prefixes, which many runs continue from.

A run modifies its cache, so every run gets a copy that shares the stored tensors. For a model that cannot continue from
a cache, `Prefixes` takes its place: it holds the tokens, which then run again in front of each row.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rebind.models.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Prefixes:
    """The tokens in front of rows, and their hidden states once a run needs them."""

    tokens: Tokens
    states: dict[int, Tensor] = field(default_factory=dict)  # by layer: after its block, [rows, tokens, width]

    def select(self, rows: Tensor) -> Prefixes:
        states = {layer: states[rows.to(states.device)] for layer, states in self.states.items()}
        return Prefixes(self.tokens.select(rows), states)


def select_cache(cache: Any, rows: Tensor) -> Any:
    """Return the cache of the chosen rows [n]."""
    if cache is None or isinstance(cache, Prefixes):
        return cache and cache.select(rows)
    selected = borrow_cache(cache)
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in selected.layers):
        selected.reorder_cache(rows)  # the only method that handles recurrent states
    else:
        selected.batch_select_indices(rows)  # indexing creates new tensors, so the original is unchanged
    return selected


def borrow_cache(cache: Any) -> Any:
    """Return a copy of a cache that shares its tensors: a run changes the copy and not the original."""
    if cache is None or isinstance(cache, Prefixes):
        return cache
    borrowed = _copy_with_containers(cache)
    borrowed.layers = [_copy_with_containers(layer) for layer in cache.layers]
    for layer in borrowed.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            vars(layer)["update_recurrent_state"] = partial(_replace_recurrent_state, layer)
            vars(layer)["update_conv_state"] = partial(_replace_conv_state, layer)
    return borrowed


def _copy_with_containers(original: Any) -> Any:
    """Copy an object and the lists and dictionaries in it, but not their tensors."""
    copied = copy.copy(original)
    for name, value in list(vars(copied).items()):
        if isinstance(value, (list, dict)):
            setattr(copied, name, copy.copy(value))
    return copied


def _replace_recurrent_state(layer: Any, state: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
    """Store a new state instead of writing into the old one, which other runs share and gradients need."""
    layer.recurrent_states[state_idx] = state
    layer.is_recurrent_states_initialized[state_idx] = True
    return state


def _replace_conv_state(layer: Any, state: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
    if layer.is_conv_states_initialized[state_idx]:
        layer.conv_states[state_idx] = layer.conv_states[state_idx].clone()
    full: Tensor = type(layer).update_conv_state(layer, state, state_idx, **options)
    return full
