"""Tokens decoded as replays of a CUDA graph: launching the kernels of a token takes ten times as long as running them.

    with recorded_decoding(model):
        model.generate(ids, max_new_tokens=500)

Memories of a fixed size are what a graph wants: it reads and writes the same tensors at every token. A recording has
tensors of its own for them. The cache that was played last holds these, and gets copies when another one is played.
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

from rebind.cuda_graphs import or_none, replay_of
from rebind.errors import InputError
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindForCausalLM
from rebind.nn.parts.state import State


@contextmanager
def recorded_decoding(model: RebindForCausalLM) -> Iterator[None]:
    """Within, a token that follows a cache is a replay, recorded once for each batch size. All else runs as before.

    Weights may change in place in the meantime, but not move. What cannot be recorded runs unrecorded, with a warning.
    """
    if model.grows:
        raise InputError(
            "the memory of attention grows with every token, expected layers of fixed memory alone: decode as it is"
        )
    untyped: Any = model  # `forward` is about to be shadowed
    plain, recordings = untyped.forward, dict[Hashable, "_Recording | None"]()
    shadowed = vars(model).get("forward")  # what accelerate or an outer recording put in its place

    @wraps(plain)  # `generate` looks at what forward takes
    def forward(
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RebindCache | None = None,
        *rest: Any,
        **others: Any,
    ) -> Any:
        if not rest and not model.training and _is_next_token(input_ids, attention_mask, past_key_values, others):
            assert input_ids is not None
            assert past_key_values is not None
            kind = input_ids.shape, _kind(past_key_values)
            if kind not in recordings:
                made = partial(_Recording, plain, input_ids, past_key_values)
                recordings[kind] = or_none(made, "a token")
            recording = recordings[kind]
            if recording is not None:
                return recording.play(input_ids, past_key_values)
        return plain(input_ids, attention_mask, past_key_values, *rest, **others)

    untyped.forward = forward
    try:
        yield
    finally:
        if shadowed is None:
            del untyped.forward
        else:
            untyped.forward = shadowed
        for recording in recordings.values():
            if recording is not None:
                recording.leave()


class _Recording:
    """One token of every sequence of a batch: tensors that it is read from and written to, and its replay."""

    @torch.inference_mode(False)  # its tensors are written to outside of it too
    @torch.no_grad()
    def __init__(self, plain: Callable[..., Any], token: Tensor, cache: RebindCache) -> None:
        self.token = token.clone()
        self.states = [state.clone() for state in cache.states if state is not None]
        self.owner: Callable[[], RebindCache | None] = lambda: None  # whose memory `states` are
        own = RebindCache(len(cache))

        def once() -> None:
            own.states = list(self.states)
            self.logits = plain(input_ids=self.token, past_key_values=own, use_cache=True).logits
            _write_back(self.states, own)

        self.replay = replay_of(once, warm=2)

    def play(self, token: Tensor, cache: RebindCache) -> CausalLMOutputWithPast:
        if any(state is not mine for state, mine in zip(cache.states, self.states, strict=True)):
            self.leave()
            _write_back(self.states, cache)
            self.owner = weakref.ref(cache)
        self.token.copy_(token)
        self.replay()
        cache.states = list(self.states)
        cache.seen += 1
        return CausalLMOutputWithPast(logits=self.logits.clone(), past_key_values=cache)

    def leave(self) -> None:
        """The memory of the cache that was played last goes on in tensors of its own."""
        if (owner := self.owner()) is not None:
            mine = {tensor.untyped_storage().data_ptr() for state in self.states for tensor in state.tensors}
            owner.states = [state.clone() if state and _lies_in(state, mine) else state for state in owner.states]
        self.owner = lambda: None


def _write_back(places: list[State], cache: RebindCache) -> None:
    """What is in the cache, into tensors that stay where they are."""
    for place, state in zip(places, cache.states, strict=True):
        for into, value in zip(place.tensors, [] if state is None else state.tensors, strict=True):
            if into.data_ptr() != value.data_ptr():
                into.copy_(value)


def _is_next_token(token: Tensor | None, mask: Tensor | None, cache: Any, others: dict[str, Any]) -> bool:
    """Whether a GPU is asked for the logits of one real token a sequence, after memories, and for nothing else."""
    if token is None or not isinstance(cache, RebindCache) or None in cache.states or torch.is_grad_enabled():
        return False
    asked = {name for name, value in others.items() if value is not None and value is not False}
    alone = others.get("return_dict") is not False and asked <= {"use_cache", "return_dict", "logits_to_keep"}
    single = token.ndim == 2 and token.shape[1] == 1 and _on_gpu(token)
    return alone and single and (mask is None or bool(mask[:, -1].all()))


def _on_gpu(token: Tensor) -> bool:
    return token.is_cuda and not torch.cuda.is_current_stream_capturing()


def _kind(cache: RebindCache) -> Hashable:
    return tuple(
        (tensor.shape, tensor.dtype) for state in cache.states if state is not None for tensor in state.tensors
    )


def _lies_in(state: State, storages: set[int]) -> bool:
    """Whether any tensor of it does: a token that was not replayed leaves some in place and makes others anew."""
    return any(tensor.untyped_storage().data_ptr() in storages for tensor in state.tensors)
