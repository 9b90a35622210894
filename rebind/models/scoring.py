"""Score how strongly a model believes targets, with many prompts in few forward passes.

Prompts of similar length run together. The keys and values of a prompt are computed once for all of its targets,
and only the tokens of the targets run for each. Results stay on the device until the last batch is done, so
the device never waits for the host in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.models.batching import run_in_batches, tokens_per_batch
from rebind.models.caches import select_cache
from rebind.models.prompts import EncodedPrompt
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk


@dataclass(frozen=True)
class FactScore:
    """How strongly a model believes a target after its prompt."""

    probability: float  # of the whole target: the product over its tokens
    rank: int  # of the first token of the target; 1 is the highest
    nll: float  # of the target, per token
    tokens: int  # in the target
    right_tokens: int  # tokens of the target that are the first choice of the model, given those before
    first_token: int  # the first choice of the model for the next token
    says: str  # `first_token` as text

    @property
    def exact(self) -> bool:
        """Whether every token of the target is the first choice of the model."""
        return self.right_tokens == self.tokens

    def to_json(self) -> dict[str, Any]:
        """Return the fields that a ledger stores."""
        return {name: getattr(self, name) for name in ("probability", "rank", "nll", "exact", "says")}


@dataclass(frozen=True)
class _PromptTargets:
    """A prompt with all of its targets. A stem is a target without its last token, whose logits are not needed."""

    ids: tuple[int, ...]
    targets: list[tuple[int, ...]]

    @cached_property
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
    targets_of: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for ids, target in dict.fromkeys((prompt.ids, prompt.target) for prompt in encoded):
        if not target:
            raise InputError("A prompt without a target has no score", advice="Give it a target", code="no_target")
        targets_of.setdefault(ids, []).append(target)
    prompts = [_PromptTargets(ids, targets) for ids, targets in targets_of.items()]
    sizes = [prompt.size for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda index: (sizes[index][1], sizes[index]))
    keys: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    budget = batch_tokens or tokens_per_batch(trunk)
    for batch, part in run_in_batches(sizes, order, budget, partial(_score_batch, trunk, prompts)):
        parts.append(part)
        keys += [(prompts[index].ids, target) for index in batch for target in prompts[index].targets]
    lengths = [len(target) for _, target in keys]
    log_probs = torch.cat([part[0] for part in parts]).cpu().split(lengths)
    choices = torch.cat([part[1] for part in parts]).cpu().split(lengths)
    ranks = torch.cat([part[2] for part in parts]).tolist()
    distinct = sorted({int(choice[0]) for choice in choices})
    says = dict(zip(distinct, tokenizer.batch_decode([[token] for token in distinct]), strict=True))
    scores = {}
    for key, target_log_probs, best, rank in zip(keys, log_probs, choices, ranks, strict=True):
        target, first = key[1], int(best[0])
        total = math.fsum(target_log_probs.tolist())
        right = sum(token == choice for token, choice in zip(target, best.tolist(), strict=True))
        scores[key] = FactScore(
            math.exp(total), rank, -total / len(target), len(target), right, first_token=first, says=says[first]
        )
    return [scores[prompt.ids, prompt.target] for prompt in encoded]


def _score_batch(
    trunk: Trunk, all_prompts: Sequence[_PromptTargets], batch: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability and the first choice for every target token, and the rank of every first token."""
    prompts = [all_prompts[index] for index in batch]
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
    positions, tokens = torch.tensor(picks, device=logits.device).unbind(-1)
    target_logits = logits[positions, tokens]
    log_probs = target_logits - logits.logsumexp(-1)[positions]
    begins = accumulate((len(target) for _, target in targets[:-1]), initial=0)
    firsts = torch.tensor(list(begins), device=logits.device)
    ranks = (logits[positions[firsts]] > target_logits[firsts].unsqueeze(-1)).sum(-1) + 1
    return log_probs, logits.argmax(-1)[positions], ranks
