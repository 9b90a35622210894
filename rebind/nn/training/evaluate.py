"""Perplexity of a text: in windows that slide over it, or in one pass with the memories carried on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindForCausalLM


@dataclass(frozen=True)
class Perplexity:
    """The mean loss, nats a token, over so many tokens."""

    loss: float
    tokens: int
    perplexity: float

    @classmethod
    def of(cls, total: float, tokens: int) -> Perplexity:
        mean = total / tokens
        return cls(mean, tokens, math.exp(min(mean, 700.0)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sliding(
    model: RebindForCausalLM, tokens: np.ndarray[Any, Any] | Tensor, length: int, *, stride: int = 0, rows: int = 8
) -> Perplexity:
    """Every token is predicted once, from at least length − stride tokens before it (where there are so many).

    Windows of `length` move by `stride`, and each scores what no window before it has. stride 0 is stride = length:
    no overlap. Stride 1 gives every token the longest context, at `length` times the price.
    """
    ids = _ids(tokens)
    stride = stride or length
    if not 0 < stride <= length:
        raise InputError(f"stride is {stride}, expected 1 to the window's {length}: length // 2 is usual")
    asked = len(ids) - 1  # predictions
    width = min(length, asked)
    ends = [width, *(min(end, asked) for end in range(width + stride, asked + stride, stride))]  # of the windows
    scored = [0, *ends[:-1]]
    total = 0.0
    with _reading(model) as device:
        for first in range(0, len(ends), rows):
            group = list(zip(ends[first : first + rows], scored[first : first + rows], strict=True))
            whole = torch.stack([ids[end - width : end + 1] for end, _ in group]).to(device)
            loss = _losses(model(whole[:, :-1], use_cache=False).logits, whole[:, 1:])
            for row, (end, before) in zip(loss.cpu().double(), group, strict=True):
                total += float(row[width - (end - before) :].sum())
    return Perplexity.of(total, asked)


def carried(model: RebindForCausalLM, tokens: np.ndarray[Any, Any] | Tensor, length: int) -> Perplexity:
    """Every token is predicted once, from all tokens before it: segments of `length`, the memories carried on."""
    ids = _ids(tokens)
    cache, total = RebindCache(model.config.num_hidden_layers), 0.0
    with _reading(model) as device:
        for first in range(0, len(ids) - 1, length):
            whole = ids[first : first + length + 1].to(device)[None]
            logits = model(whole[:, :-1], past_key_values=cache).logits
            total += float(_losses(logits, whole[:, 1:]).cpu().double().sum())
    return Perplexity.of(total, len(ids) - 1)


def by_position(
    model: RebindForCausalLM, tokens: np.ndarray[Any, Any] | Tensor, length: int, *, rows: int = 8
) -> Tensor:
    """The mean loss [length] of the first, second, … token of windows of `length`, whose memory begins empty.

    The text is cut into whole windows; the model reads `rows` of them together.
    """
    ids = _ids(tokens)
    count = (len(ids) - 1) // length
    if not count:
        raise InputError(
            f"{len(ids)} tokens hold no window of {length} and its next token: give more, or a shorter one"
        )
    inputs, targets = (ids[shift : shift + count * length].view(count, length) for shift in (0, 1))
    with _reading(model) as device:
        total = torch.zeros(length, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        for mine, asked in zip(inputs.split(rows), targets.split(rows), strict=True):
            logits = model(mine.to(device), use_cache=False).logits
            total += _losses(logits, asked.to(device)).to(total).sum(0)
    return total.cpu() / count


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each token [rows, T], in float32 or better."""
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return functional.cross_entropy(wide.transpose(1, 2), targets, reduction="none")


def _ids(tokens: np.ndarray[Any, Any] | Tensor) -> Tensor:
    ids = tokens if isinstance(tokens, Tensor) else torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    if ids.ndim != 1 or len(ids) < 2:
        raise InputError(f"tokens are {list(ids.shape)}, expected [n] with two or more, to predict one: give more text")
    return ids


@contextmanager
def _reading(model: RebindForCausalLM) -> Iterator[torch.device]:
    """The model without dropout or gradients; as it was, afterwards."""
    training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            yield model.device
    finally:
        model.train(training)
