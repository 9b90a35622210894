"""Perplexity on a text: in windows that slide over it, or in one pass that carries the states along."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindForCausalLM

Tokens = np.ndarray[Any, Any] | Tensor  # [n]


@dataclass(frozen=True)
class Perplexity:
    """The mean loss in nats per token over a number of tokens, and its exponential."""

    loss: float
    tokens: int
    perplexity: float

    @classmethod
    def from_total(cls, total: float, tokens: int) -> Perplexity:
        return cls(total / tokens, tokens, math.exp(min(total / tokens, 700.0)))


def sliding_perplexity(
    model: RebindForCausalLM, tokens: Tokens, length: int, *, stride: int = 0, rows: int = 8
) -> Perplexity:
    """Predict every token once, from at least length − stride tokens before it where there are so many.

    Windows of `length` tokens move by `stride`, and each scores the tokens that no window before it has scored.
    Stride 0 means no overlap; stride 1 gives every token the longest context, at `length` times the cost. The model
    reads `rows` windows at once.
    """
    ids = _as_ids(tokens)
    stride = stride or length
    if not 0 < stride <= length:
        raise InputError(f"The stride is {stride}", expected=f"1 to {length}, the length", code="invalid_stride")
    predictions = len(ids) - 1
    width = min(length, predictions)
    ends = [width, *(min(end, predictions) for end in range(width + stride, predictions + stride, stride))]
    total, scored = 0.0, 0
    with _evaluation(model):
        for first in range(0, len(ends), rows):
            group = ends[first : first + rows]
            windows = torch.stack([ids[end - width : end + 1] for end in group]).to(model.device)
            losses = _losses(model(windows[:, :-1], use_cache=False).logits, windows[:, 1:])
            for row, end in zip(losses, group, strict=True):
                total += float(row[width - (end - scored) :].sum())
                scored = end
    return Perplexity.from_total(total, predictions)


def carried_perplexity(model: RebindForCausalLM, tokens: Tokens, length: int) -> Perplexity:
    """Predict every token once, from all tokens before it: in segments of `length` that carry the states along."""
    ids = _as_ids(tokens)
    cache, total = RebindCache(model.config.num_hidden_layers), 0.0
    with _evaluation(model):
        for first in range(0, len(ids) - 1, length):
            segment = ids[None, first : first + length + 1].to(model.device)
            logits = model(segment[:, :-1], past_key_values=cache).logits
            total += float(_losses(logits, segment[:, 1:]).sum())
    return Perplexity.from_total(total, len(ids) - 1)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each token [rows, T], computed in float32 or better."""
    precise = logits.to(working_dtype(logits)).transpose(1, 2)
    return functional.cross_entropy(precise, targets, reduction="none").cpu().double()


def _as_ids(tokens: Tokens) -> Tensor:
    ids = tokens if isinstance(tokens, Tensor) else torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    if ids.ndim != 1 or len(ids) < 2:
        raise InputError(f"Tokens have shape {list(ids.shape)}", expected="[n] with n ≥ 2", code="text_too_short")
    return ids


@contextmanager
def _evaluation(model: RebindForCausalLM) -> Iterator[None]:
    """Run the model without dropout and gradients."""
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
