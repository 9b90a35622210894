"""Decode tokens as replays of a CUDA graph: launching the kernels of a token takes ten times as long as running them.

    with recorded_decoding(model):
        model.generate(ids, max_new_tokens=500)

A graph reads and writes the same tensors at every token, which suits memories of a fixed size. A recording owns such
tensors. The cache that was replayed last uses them directly, and gets copies when another cache is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from rebind.cuda_graphs import record_graph, record_or_warn
from rebind.errors import InputError
from rebind.nn.layers.base import State
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindForCausalLM


@contextmanager
def recorded_decoding(model: RebindForCausalLM) -> Iterator[None]:
    """Replay a CUDA graph for every token that follows a cache, recorded once per batch size; run all else as usual.

    Weights may change in place meanwhile, but not move. Calls that cannot be recorded run without a graph, with a
    warning.
    """
    if model.grows:
        advice = "Decode this model without recorded_decoding"
        raise InputError("The state of attention grows with every token", advice=advice, code="growing_state")
    untyped: Any = model  # `forward` is replaced below
    original, recordings = untyped.forward, dict[Hashable, "_Recording | None"]()
    is_replaced = "forward" in vars(model)  # by accelerate or by an outer recorded_decoding

    @wraps(original)  # `generate` inspects the parameters of forward
    def forward(
        input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not args and not model.training and _is_next_token(input_ids, attention_mask, past_key_values, kwargs):
            tensors = [tensor for state in past_key_values.states for tensor in state.tensors]
            key = input_ids.shape, *((tensor.shape, tensor.dtype) for tensor in tensors)
            if key not in recordings:
                recordings[key] = record_or_warn(partial(_Recording, original, input_ids, past_key_values), "Decoding")
            recording = recordings[key]
            if recording is not None:
                return recording.play(input_ids, past_key_values)
        return original(input_ids, attention_mask, past_key_values, *args, **kwargs)

    untyped.forward = forward
    try:
        yield
    finally:
        del untyped.forward
        if is_replaced:
            untyped.forward = original
        for recording in recordings.values():
            if recording is not None:
                recording.release()


class _Recording:
    """One token for every sequence of a batch: the tensors that the graph reads and writes, and its replay."""

    @torch.inference_mode(False)  # the tensors are also written outside of it
    @torch.no_grad()
    def __init__(self, forward: Callable[..., Any], token: Tensor, cache: RebindCache) -> None:
        self.token = token.clone()
        self.states = [state.clone() for state in cache.states if state is not None]
        self.user: Callable[[], RebindCache | None] = lambda: None  # the cache that uses `states` at present
        own = RebindCache(len(cache))

        def decode() -> None:
            own.states = list(self.states)
            self.logits = forward(input_ids=self.token, past_key_values=own, use_cache=True).logits
            _copy_states(own, self.states)

        self.replay = record_graph(decode, warm_up=2)

    def play(self, token: Tensor, cache: RebindCache) -> CausalLMOutputWithPast:
        if any(state is not own for state, own in zip(cache.states, self.states, strict=True)):
            self.release()
            _copy_states(cache, self.states)
            self.user = weakref.ref(cache)
        self.token.copy_(token)
        self.replay()
        cache.states = list(self.states)
        cache.tokens_seen += 1
        return CausalLMOutputWithPast(logits=self.logits.clone(), past_key_values=cache)

    def release(self) -> None:
        """Give the cache that was replayed last tensors of its own."""
        if (user := self.user()) is not None:
            user.states = [state and state.clone() for state in user.states]
        self.user = lambda: None


def _copy_states(cache: RebindCache, targets: list[State]) -> None:
    """Copy the states of a cache into tensors that stay where they are."""
    for target, state in zip(targets, cache.states, strict=True):
        for into, tensor in zip(target.tensors, [] if state is None else state.tensors, strict=True):
            if into.data_ptr() != tensor.data_ptr():
                into.copy_(tensor)


def _is_next_token(token: Tensor | None, mask: Tensor | None, cache: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks a GPU for the logits of one real token per sequence after a cache, and for nothing else."""
    if token is None or not isinstance(cache, RebindCache) or None in cache.states or torch.is_grad_enabled():
        return False
    requested = {name for name, value in kwargs.items() if value is not None and value is not False}
    if kwargs.get("return_dict") is False or requested - {"use_cache", "return_dict", "logits_to_keep", "position_ids"}:
        return False
    single = token.ndim == 2 and token.shape[1] == 1 and can_record(token)
    return single and (mask is None or bool(mask[:, -1].all()))


def can_record(token: Tensor) -> bool:
    """Whether a CUDA graph can be recorded or replayed for this token here and now."""
    return token.is_cuda and not torch.cuda.is_current_stream_capturing()
