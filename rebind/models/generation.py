"""Generate text: continuations of many prompts in batches, or free samples used as contexts or as a corpus."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from rebind.models.batching import run_in_batches, tokens_per_batch
from rebind.models.prompts import EncodedPrompt
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk


@torch.no_grad()
def continue_prompts(
    trunk: Trunk,
    prompts: Sequence[EncodedPrompt],
    tokens: int,
    *,
    top_k: int | None = None,
    seed: int = 0,
    end_tokens: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """Return the tokens that follow each prompt, chosen greedily or sampled from the `top_k` most likely.

    A continuation stops before the first of `end_tokens` and at the context length, but has at least one token.
    """
    distinct = list({prompt.ids: None for prompt in prompts})
    limit = trunk.context_length
    lengths = [tokens if limit is None else max(1, min(tokens, limit - len(ids))) for ids in distinct]
    sizes = [(1, len(ids) + length) for ids, length in zip(distinct, lengths, strict=True)]
    by_size = sorted(range(len(distinct)), key=lambda index: sizes[index])
    continuations: dict[tuple[int, ...], list[int]] = {}
    for length in sorted(set(lengths), reverse=True):  # a long prompt must not shorten the other continuations
        order = [index for index in by_size if lengths[index] == length]
        run = partial(_continue_batch, trunk, distinct, length, top_k, seed)
        for batch, rows in run_in_batches(sizes, order, tokens_per_batch(trunk), run):
            for index, row in zip(batch, rows.tolist(), strict=True):
                continuations[distinct[index]] = list(takewhile(lambda token: token not in end_tokens, row))
    return [continuations[prompt.ids] for prompt in prompts]


def _continue_batch(
    trunk: Trunk, prompts: Sequence[tuple[int, ...]], tokens: int, top_k: int | None, seed: int, batch: Sequence[int]
) -> Tensor:
    """Return the tokens [rows, tokens] that follow these prompts."""
    rows = [prompts[index] for index in batch]
    device = trunk.device
    noise = None if top_k is None else _noise(rows, tokens, top_k, seed).to(device)
    if not trunk.shares_prefixes:
        return _continue_whole_rows(trunk, rows, tokens, noise)
    prefixes = Tokens.left_padded([row[:-1] for row in rows], device)
    cache, mask = trunk.cache(prefixes), prefixes.mask
    positions = prefixes.mask.sum(-1, keepdim=True)
    ids = torch.tensor([[row[-1]] for row in rows], device=device)
    accepts = inspect.signature(trunk.model.forward).parameters
    new = []
    for step in range(tokens):
        mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
        optional = {"position_ids": positions} if "position_ids" in accepts else {}
        out = trunk.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **optional)
        cache, positions = out.past_key_values, positions + 1
        ids = _choose(out.logits[:, -1].to(device, torch.float32), None if noise is None else noise[:, step])
        new.append(ids)
    return torch.cat(new, dim=-1)


def _continue_whole_rows(trunk: Trunk, rows: Sequence[tuple[int, ...]], tokens: int, noise: Tensor | None) -> Tensor:
    """Return the tokens [rows, tokens] that follow, without a cache: every step runs all tokens so far."""
    texts = [list(row) for row in rows]
    for step in range(tokens):
        last = torch.tensor([(row, len(text) - 1) for row, text in enumerate(texts)], device=trunk.device)
        logits = trunk.logits(Tokens.right_padded(texts, trunk.device), last).to(trunk.device)
        for text, token in zip(texts, _choose(logits, None if noise is None else noise[:, step]), strict=True):
            text.append(int(token))
    return torch.tensor([text[-tokens:] for text in texts])


def _noise(rows: Sequence[Sequence[int]], tokens: int, top_k: int, seed: int) -> Tensor:
    """Return the noise [rows, tokens, top_k] that decides each draw; it depends on the prompt, not on the batch."""
    noise = []
    for ids in rows:
        digest = hashlib.sha256(f"{seed} {list(ids)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        noise.append(torch.empty(tokens, top_k).exponential_(generator=generator).log())
    return torch.stack(noise)


def _choose(logits: Tensor, noise: Tensor | None) -> Tensor:
    """Return the next token [rows, 1]: the most likely, or one sampled with noise [rows, top_k] (Gumbel's trick)."""
    if noise is None:
        return logits.argmax(-1, keepdim=True)
    best = logits.topk(min(noise.shape[-1], logits.shape[-1]), dim=-1)
    return best.indices.gather(-1, (best.values - noise[:, : best.values.shape[-1]]).argmax(-1, keepdim=True))


@torch.no_grad()
def sample(
    model: Any, start: Sequence[int], first: Tensor, length: int, *, seed: int, top_k: int | None = None
) -> Tensor:
    """Continue each row of `first` [rows, tokens] to `length` tokens by sampling: [rows, length].

    `start` is put before every row and is not returned. The same seed on the same device gives the same text.
    """
    device = first.device
    generator = torch.Generator(device).manual_seed(seed)
    prefix = torch.tensor(list(start), dtype=torch.long, device=device).expand(len(first), -1)
    ids, rows, cache = torch.cat([prefix, first], dim=-1), first, None
    # Only the logits of the last token are needed, and some models can compute them alone.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    takes_cache = "past_key_values" in inspect.signature(model.base_model.forward).parameters
    while rows.shape[-1] < length:
        cache_arguments = {"past_key_values": cache, "use_cache": True} if takes_cache else {}
        out = model(input_ids=ids, **cache_arguments, **last_only)
        cache = getattr(out, "past_key_values", None)
        logits = out.logits[:, -1].to(device, torch.float32)
        if top_k is not None:
            threshold = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        noise = torch.empty_like(logits).exponential_(generator=generator).log()  # Gumbel's trick
        new = (logits - noise).argmax(-1, keepdim=True)
        rows = torch.cat([rows, new], dim=-1)
        ids = torch.cat([prefix, rows], dim=-1) if cache is None else new
    return rows[:, :length]
