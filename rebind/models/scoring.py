"""Score how strongly a model believes targets, many prompts in few passes.

Prompts of similar length run together. The keys and values of a prompt are computed once, however many targets follow
it, and only the tokens of the targets run for each. Results stay on the device until the last batch is done, so
nothing waits for the host in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.models.batching import run_in_batches
from rebind.models.prompts import EncodedPrompt
from rebind.models.trunk import Tokens, Trunk, select_cache

CPU_TOKENS, GPU_TOKENS = 4_096, 65_536  # in one batch


def tokens_per_batch(trunk: Trunk) -> int:
    """Return how many tokens a batch without gradients may hold."""
    return GPU_TOKENS if trunk.device.type == "cuda" else CPU_TOKENS


@dataclass(frozen=True)
class FactScore:
    """How strongly a model believes a target after its prompt."""

    probability: float  # of the whole target: the product over its tokens
    rank: int  # of the first token of the target; 1 is the highest
    nll: float  # of the target, per token
    tokens: int  # in the target
    right_tokens: int  # tokens of the target that are the first choice of the model, given those before
    first_token: int  # the first choice of the model for the next token
    says: str  # the same as text

    @property
    def exact(self) -> bool:
        """Whether every token of the target is the first choice of the model."""
        return self.right_tokens == self.tokens

    def to_json(self) -> dict[str, Any]:
        """Return the fields that a ledger stores."""
        return {name: getattr(self, name) for name in ("probability", "rank", "nll", "exact", "says")}


@dataclass(frozen=True)
class _PromptTargets:
    """A prompt with all of its targets. A stem is a target without its last token, the logits of which nobody needs."""

    ids: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]

    @property
    def stems(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(target[:-1] for target in self.targets))

    @property
    def size(self) -> tuple[int, int, int]:
        """(rows, tokens before, tokens after) in a batch."""
        return len(self.stems), len(self.ids) - 1, max(map(len, self.stems)) + 1


@torch.no_grad()
def score_prompts(
    trunk: Trunk, tokenizer: Any, encoded: Sequence[EncodedPrompt], *, batch_tokens: int | None = None
) -> list[FactScore]:
    """Score the target of each prompt."""
    if not encoded:
        return []
    grouped: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for prompt in encoded:
        if not prompt.target:
            raise InputError("A prompt without a target has no score", advice="Give it a target", code="no_target")
        grouped.setdefault(prompt.ids, {})[prompt.target] = None
    questions = [_PromptTargets(ids, tuple(targets)) for ids, targets in grouped.items()]
    sizes = [question.size for question in questions]
    order = sorted(range(len(questions)), key=lambda index: (sizes[index][1], sizes[index]))
    keys: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    budget = batch_tokens or tokens_per_batch(trunk)
    for batch, part in run_in_batches(sizes, order, budget, partial(_score_batch, trunk, questions)):
        parts.append(part)
        keys += [(questions[index].ids, target) for index in batch for target in questions[index].targets]
    lengths = [len(target) for _, target in keys]
    log_probs = torch.cat([part[0] for part in parts]).cpu().split(lengths)
    choices = torch.cat([part[1] for part in parts]).cpu().split(lengths)
    ranks = torch.cat([part[2] for part in parts]).tolist()
    distinct = sorted({int(choice[0]) for choice in choices})
    says = dict(zip(distinct, tokenizer.batch_decode([[token] for token in distinct]), strict=True))
    scores = {
        key: _score(key[1], picked.tolist(), choice.tolist(), rank, says)
        for key, picked, choice, rank in zip(keys, log_probs, choices, ranks, strict=True)
    }
    return [scores[prompt.ids, prompt.target] for prompt in encoded]


def _score(
    target: Sequence[int], log_probs: Sequence[float], choices: Sequence[int], rank: int, says: dict[int, str]
) -> FactScore:
    total = math.fsum(log_probs)
    return FactScore(
        probability=math.exp(total),
        rank=rank,
        nll=-total / len(target),
        tokens=len(target),
        right_tokens=sum(token == choice for token, choice in zip(target, choices, strict=True)),
        first_token=choices[0],
        says=says[choices[0]],
    )


def _score_batch(
    trunk: Trunk, questions: Sequence[_PromptTargets], batch: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability and the first choice for every target token, and the rank of every first token."""
    prompts = [questions[index] for index in batch]
    prefixes = Tokens.left_padded([prompt.ids[:-1] for prompt in prompts], trunk.device)
    cache = trunk.cache(prefixes)
    rows = [(index, stem) for index, prompt in enumerate(prompts) for stem in prompt.stems]
    if len(rows) > len(prompts):
        owners = torch.tensor([index for index, _ in rows], device=trunk.device)
        prefixes, cache = prefixes.select(owners), select_cache(cache, owners)
    suffixes = [[prompts[index].ids[-1], *stem] for index, stem in rows]
    where = [(row, step) for row, suffix in enumerate(suffixes) for step in range(len(suffix))]
    logits = trunk.logits(Tokens.following(prefixes, suffixes), torch.tensor(where), cache=cache)
    first_logits = dict(zip(rows, accumulate(map(len, suffixes), initial=0), strict=False))
    targets = [(index, target) for index, prompt in enumerate(prompts) for target in prompt.targets]
    picks = [
        (first_logits[index, target[:-1]] + step, token)
        for index, target in targets
        for step, token in enumerate(target)
    ]
    places, wanted = torch.tensor(picks, device=logits.device).unbind(-1)
    chosen = logits[places, wanted]
    log_probs = chosen - logits.logsumexp(-1)[places]
    begins = accumulate((len(target) for _, target in targets[:-1]), initial=0)
    firsts = torch.tensor(list(begins), device=logits.device)
    ranks = (logits[places[firsts]] > chosen[firsts].unsqueeze(-1)).sum(-1) + 1
    return log_probs, logits.argmax(-1)[places], ranks


@torch.no_grad()
def next_token_log_probs(trunk: Trunk, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the log-probabilities of the token after each row of ids, [n, vocabulary]: one batched pass."""
    tokens = Tokens.right_padded(rows, trunk.device)
    where = torch.tensor([(row, len(ids) - 1) for row, ids in enumerate(rows)], device=trunk.device)
    return torch.log_softmax(trunk.logits(tokens, where), dim=-1)


def text_nll(
    trunk: Trunk, tokenizer: Any, start: Sequence[int], ids: Sequence[int], *, window: int = 512
) -> tuple[float, int]:
    """Return the summed negative log-likelihood of the tokens of a text, window by window, and how many there are.

    Every window begins with the start tokens. Where the model has none, it begins with the last token of the window
    before, and the first token of the text, which has nothing in front, is not counted.
    """
    front = len(start) or 1  # tokens of a window that are not predicted
    limit = window if trunk.context_length is None else min(window, trunk.context_length - front)
    if start:
        rows = [(*start, *ids[begin : begin + limit]) for begin in range(0, len(ids), limit)]
    else:
        rows = [tuple(ids[begin : begin + limit + 1]) for begin in range(0, len(ids) - 1, limit)]
    if not rows:
        raise InputError(f"The text is {len(ids)} tokens long", expected="2 tokens or more", code="text_too_short")
    windows = [EncodedPrompt(row[:front], 0, row[front:]) for row in rows]
    at_once = max(1, tokens_per_batch(trunk) // (16 * limit))  # every token has a logit for every word
    scores = []
    for begin in range(0, len(windows), at_once):
        scores += score_prompts(trunk, tokenizer, windows[begin : begin + at_once])
    return math.fsum(score.nll * score.tokens for score in scores), sum(score.tokens for score in scores)
