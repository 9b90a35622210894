"""What target search minimizes: the loss of δ for a batch of facts, and its gradient.

    mean over contexts of the target's negative log-likelihood
      + kl · KL(original ‖ edited) of the next token at the subject
      + decay · ‖δ‖ / ‖h₀‖²

`SearchBatch` holds what is the same at every step: cached prefixes, suffixes, and the positions of the logits that
are needed. `Objective` computes the loss. On a GPU, launching the kernels of a step takes longer than the step of a
small model, so `RecordedObjective` records the step as a CUDA graph and replays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rebind.cuda_graphs import capture_graph, record_or_warn
from rebind.models.prompts import EncodedPrompt
from rebind.models.trunk import Tokens, Trunk, select_cache


@dataclass(frozen=True)
class TargetSettings:
    """How to search for δ."""

    steps: int = 25
    rate: float = 0.5
    clamp: float = 0.75  # largest ‖δ‖ / ‖h₀‖
    decay: float = 0.5
    kl: float = 0.0625
    enough: float = 0.05  # the search for a fact ends when its loss falls below this


@dataclass(frozen=True)
class FactPrompts:
    """The prompt of one fact, alone and behind every context, as tokens. The bare prompt is the first."""

    prompts: tuple[EncodedPrompt, ...]

    @property
    def target(self) -> tuple[int, ...]:
        """The tokens of the target, the same in every context."""
        return self.prompts[0].target

    @property
    def size(self) -> tuple[int, int, int]:
        """(rows, longest prefix, longest suffix) that the fact takes in a batch; the suffix begins at the subject."""
        return (
            len(self.prompts),
            max(prompt.subject_last for prompt in self.prompts),
            max(len(prompt.ids) - prompt.subject_last for prompt in self.prompts) + len(self.target) - 1,
        )


@dataclass(frozen=True, eq=False)
class SearchBatch:
    """The suffix of every prompt of every fact, from the subject's last token on."""

    tokens: Tokens  # the suffixes: the subject's last token, the rest of the prompt, the target without its last token
    cache: Any  # keys and values of the prefixes
    hidden: Tensor  # [rows, tokens, width]: output of the layer, unchanged
    owner: Tensor  # [rows]: the fact that a row belongs to
    bare: Tensor  # [n]: the row of each fact's bare prompt
    where: Tensor  # [m, 2]: (row, token) before each token of a target
    token: Tensor  # [m]: that token of the target
    weight: Tensor  # [m]: 1 / (target length × prompts of the fact)

    @classmethod
    def prepare(
        cls, trunk: Trunk, layer: int, facts: Sequence[FactPrompts], search_trunk: Trunk | None = None
    ) -> SearchBatch:
        """Run the prefixes. Hidden states come from `trunk`, the cache from the copy that the search runs on."""
        prefixes: list[tuple[int, ...]] = []
        suffixes: list[list[int]] = []
        owner, bare = [], []
        where, token, weight = [], [], []
        for index, fact in enumerate(facts):
            bare.append(len(suffixes))
            for prompt in fact.prompts:
                row, start = len(suffixes), prompt.subject_last
                prefixes.append(prompt.ids[:start])
                suffixes.append([*prompt.ids[start:], *fact.target[:-1]])
                owner.append(index)
                for step, target_token in enumerate(fact.target, start=len(prompt.ids) - 1 - start):
                    where.append((row, step))
                    token.append(target_token)
                    weight.append(1 / (len(fact.target) * len(fact.prompts)))
        past = Tokens.left_padded(prefixes, trunk.device)
        cache = trunk.cache(past, last_layer=None if search_trunk is None else layer)
        tokens = Tokens.following(past, suffixes)
        hidden = trunk.after(layer, tokens, cache=cache)
        if search_trunk is not None:
            cache = search_trunk.cache(past)
        tensor = partial(torch.tensor, device=hidden.device)
        indices = tensor(owner), tensor(bare), tensor(where), tensor(token)
        return cls(tokens, cache, hidden, *indices, tensor(weight, dtype=torch.float64))

    def __len__(self) -> int:
        return len(self.bare)

    def select(self, facts: Tensor) -> SearchBatch:
        """Return the batch of some of the facts."""
        device = self.owner.device
        new_fact = torch.full((len(self),), -1, device=device)
        new_fact[facts] = torch.arange(len(facts), device=device)
        rows = (new_fact[self.owner] >= 0).nonzero().squeeze(-1)
        new_row = torch.full((len(self.owner),), -1, device=device)
        new_row[rows] = torch.arange(len(rows), device=device)
        stays = new_row[self.where[:, 0]] >= 0
        cache_rows = rows.to(self.tokens.ids.device)
        return SearchBatch(
            self.tokens.select(cache_rows),
            select_cache(self.cache, cache_rows),
            self.hidden[rows],
            new_fact[self.owner[rows]],
            new_row[self.bare[facts]],
            torch.stack([new_row[self.where[stays, 0]], self.where[stays, 1]], dim=-1),
            self.token[stays],
            self.weight[stays],
        )


@dataclass(eq=False)
class Objective:
    """The loss [n] of δ [n, width], and its gradient."""

    trunk: Trunk
    layer: int
    batch: SearchBatch
    settings: TargetSettings
    length: Tensor  # [n]: ‖h₀‖
    original: Tensor | None = None  # [n, vocabulary]: log-probabilities at the subject for δ = 0; set by the first run
    _delta: Tensor | None = None  # the argument and the result of the last run
    _loss: Tensor | None = None

    def loss(self, delta: Tensor) -> Tensor:
        self._delta = delta.detach().requires_grad_()
        self._loss = self.run(self._delta)
        return self._loss.detach()

    def gradient(self) -> Tensor:
        """Return the gradient at the last argument of `loss`."""
        assert self._loss is not None
        assert self._delta is not None
        return torch.autograd.grad(self._loss.sum(), self._delta)[0]

    def select(self, facts: Tensor) -> Objective:
        """Return the objective of some of the facts."""
        original = None if self.original is None else self.original[facts]
        batch, length = self.batch.select(facts), self.length[facts]
        return replace(self, batch=batch, length=length, original=original, _delta=None, _loss=None)

    def run(self, delta: Tensor) -> Tensor:
        """Compute the loss of δ, differentiably."""
        batch, settings = self.batch, self.settings
        first = batch.hidden[:, :1] + delta[batch.owner].unsqueeze(1).to(batch.hidden.dtype)
        hidden = torch.cat([first, batch.hidden[:, 1:]], dim=1).to(self.trunk.dtype)
        subjects = torch.stack([batch.bare, torch.zeros_like(batch.bare)], dim=-1)  # (row, token) in the bare prompts
        where = torch.cat([batch.where, subjects])
        logits = self.trunk.logits(batch.tokens, where, cache=batch.cache, resume=(self.layer, hidden))
        log_probs = torch.log_softmax(logits, dim=-1).to(delta)
        at_targets, at_subjects = log_probs[: len(batch.where)], log_probs[len(batch.where) :]
        picked = at_targets.gather(-1, batch.token.unsqueeze(-1)).squeeze(-1)
        nll = delta.new_zeros(len(delta)).index_add(
            0, batch.owner[batch.where[:, 0]], -picked * batch.weight.to(picked)
        )
        if self.original is None:
            self.original = at_subjects.detach()
        divergence = (self.original.exp() * (self.original - at_subjects)).sum(-1)
        penalty = torch.linalg.vector_norm(delta, dim=-1) / self.length.square()
        return nll + settings.kl * divergence + settings.decay * penalty


class RecordedObjective:
    """An objective recorded as a CUDA graph: one replay computes the loss and the gradient."""

    def __init__(self, objective: Objective) -> None:
        """Record `objective`, which has run once, so that nothing set up by a first run goes into the graph."""
        self.objective, self.batch = objective, objective.batch
        self._delta = torch.zeros_like(self.batch.hidden[self.batch.bare, 0], dtype=objective.length.dtype)
        self._graph = torch.cuda.CUDAGraph()
        with capture_graph(self._graph):
            delta = self._delta.requires_grad_()
            loss = objective.run(delta)
            (self._gradient,) = torch.autograd.grad(loss.sum(), delta)
            self._loss = loss.detach()
        self._delta = self._delta.detach()

    def loss(self, delta: Tensor) -> Tensor:
        self._delta.copy_(delta)
        self._graph.replay()
        return self._loss.clone()

    def gradient(self) -> Tensor:
        return self._gradient

    def select(self, facts: Tensor) -> Objective:
        self._graph.reset()
        return self.objective.select(facts)


def can_record(trunk: Trunk) -> bool:
    """Return whether the model is on one CUDA device, the current one, on which graphs are recorded."""
    devices = {parameter.device for parameter in trunk.model.parameters()}
    device = next(iter(devices))
    return len(devices) == 1 and device.type == "cuda" and device.index in (None, torch.cuda.current_device())


def record(objective: Objective) -> RecordedObjective | Objective:
    """Record an objective; return it unchanged, with a warning, if the model's code does not allow that."""
    name = type(objective.trunk.model).__name__
    return record_or_warn(lambda: RecordedObjective(objective), f"the target search on {name}") or objective
