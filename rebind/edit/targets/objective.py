"""What the search for targets minimises: the loss of δ for a group of facts, and its gradient.

    mean over contexts of the target's negative log-likelihood
      + kl · KL(original ‖ edited) of the next token at the subject
      + decay · ‖δ‖ / ‖h₀‖²

`Asked` holds what is the same at every step: cached prefixes, suffixes, which logits are wanted. `Objective`
runs it. On a GPU a step of a small model is bound by launching kernels, so `Recorded` runs the step once as
a CUDA graph and then replays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rebind.cuda_graphs import captured, or_none
from rebind.models.trunk import Tokens, Trunk, select_cache


@dataclass(frozen=True)
class TargetSettings:
    """How δ is searched for."""

    steps: int = 25
    rate: float = 0.5
    clamp: float = 0.75  # largest ‖δ‖ / ‖h₀‖
    decay: float = 0.5
    kl: float = 0.0625
    enough: float = 0.05  # a fact whose loss is below this is done


@dataclass(frozen=True)
class Prompt:
    """One way of asking: the tokens up to where the target begins."""

    ids: tuple[int, ...]
    subject_last: int


@dataclass(frozen=True)
class Request:
    """One fact to find a target for. The first prompt is the bare one."""

    prompts: tuple[Prompt, ...]
    target: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int, int]:
        """(rows, longest prefix, longest suffix) that it takes in a batch."""
        return (
            len(self.prompts),
            max(prompt.subject_last for prompt in self.prompts),
            max(len(prompt.ids) - prompt.subject_last for prompt in self.prompts) + len(self.target) - 1,
        )


@dataclass(frozen=True, eq=False)
class Asked:
    """The suffix of every prompt of every fact, from the subject's last token on."""

    tokens: Tokens  # the suffixes: subject's last token, rest of the prompt, target but its last token
    cache: Any  # keys and values of the prefixes
    hidden: Tensor  # [rows, tokens, width]: output of the layer, unchanged
    owner: Tensor  # [rows]: which fact a row belongs to
    bare: Tensor  # [n]: the row of each fact's first prompt
    where: Tensor  # [m, 2]: (row, token) whose next token is part of a target
    token: Tensor  # [m]: that next token
    weight: Tensor  # [m]: 1 / (target length × prompts of the fact)

    @classmethod
    def of(cls, trunk: Trunk, layer: int, requests: Sequence[Request], quick: Trunk | None = None) -> Asked:
        """The hidden states are `trunk`'s; the cache is that of the trunk the search runs on."""
        prefixes: list[tuple[int, ...]] = []
        suffixes: list[list[int]] = []
        owner, bare = [], []
        where, token, weight = [], [], []
        for fact, request in enumerate(requests):
            bare.append(len(suffixes))
            for prompt in request.prompts:
                at = prompt.subject_last
                row = len(suffixes)
                first = len(prompt.ids) - 1 - at  # index in the suffix of the prompt's last token
                prefixes.append(prompt.ids[:at])
                suffixes.append([*prompt.ids[at:], *request.target[:-1]])
                owner.append(fact)
                for step, wanted in enumerate(request.target):
                    where.append((row, first + step))
                    token.append(wanted)
                    weight.append(1 / (len(request.target) * len(request.prompts)))
        past = Tokens.left_padded(prefixes, trunk.device)
        cache = trunk.cache(past, until=None if quick is None else layer)
        tokens = Tokens.following(past, suffixes)
        hidden = trunk.after(layer, tokens, cache=cache)
        if quick is not None:
            cache = quick.cache(past)
        place = hidden.device
        return cls(
            tokens,
            cache,
            hidden,
            torch.tensor(owner, device=place),
            torch.tensor(bare, device=place),
            torch.tensor(where, device=place),
            torch.tensor(token, device=place),
            torch.tensor(weight, dtype=torch.float64, device=place),
        )

    def __len__(self) -> int:
        return len(self.bare)

    @property
    def subjects(self) -> Tensor:
        """[n, 2]: (row, token) of each fact's subject, in its bare prompt. A later token cannot change what it says."""
        return torch.stack([self.bare, torch.zeros_like(self.bare)], dim=-1)

    @property
    def rows_a_fact(self) -> float:
        """How many rows a step runs for each fact."""
        return len(self.owner) / max(len(self), 1)

    def keep(self, facts: Tensor) -> Asked:
        """Some of the facts."""
        new = torch.full((len(self),), -1, device=self.owner.device)
        new[facts] = torch.arange(len(facts), device=facts.device)
        rows = (new[self.owner] >= 0).nonzero().squeeze(-1)
        renumbered = torch.full((len(self.owner),), -1, device=rows.device)
        renumbered[rows] = torch.arange(len(rows), device=rows.device)
        kept = renumbered[self.where[:, 0]] >= 0
        where = torch.stack([renumbered[self.where[kept, 0]], self.where[kept, 1]], dim=-1)
        there = rows.to(self.tokens.ids.device)
        return Asked(
            self.tokens.select(there),
            select_cache(self.cache, there),
            self.hidden[rows],
            new[self.owner[rows]],
            renumbered[self.bare[facts]],
            where,
            self.token[kept],
            self.weight[kept],
        )


@dataclass(eq=False)
class Objective:
    """The loss [n] of δ [n, width], and its gradient."""

    trunk: Trunk
    layer: int
    asked: Asked
    settings: TargetSettings
    length: Tensor  # [n]: ‖h₀‖
    original: Tensor | None = None  # [n, vocabulary]: log-probabilities at the subject when δ = 0; set by the first run
    _moved: Tensor | None = None  # where the last run was, and what it found there
    _loss: Tensor | None = None

    def loss(self, delta: Tensor) -> Tensor:
        self._moved = delta.detach().requires_grad_()
        self._loss = self._run(self._moved)
        return self._loss.detach()

    def slope(self) -> Tensor:
        """The gradient where the loss was last asked for."""
        assert self._loss is not None
        assert self._moved is not None
        return torch.autograd.grad(self._loss.sum(), self._moved)[0]

    def keep(self, facts: Tensor) -> Objective:
        """Some of the facts."""
        original = None if self.original is None else self.original[facts]
        return replace(
            self, asked=self.asked.keep(facts), length=self.length[facts], original=original, _moved=None, _loss=None
        )

    def _run(self, delta: Tensor) -> Tensor:
        asked, settings = self.asked, self.settings
        first = asked.hidden[:, :1] + delta[asked.owner].unsqueeze(1).to(asked.hidden.dtype)
        hidden = torch.cat([first, asked.hidden[:, 1:]], dim=1).to(self.trunk.dtype)
        wanted = torch.cat([asked.where, asked.subjects])
        logits = self.trunk.logits(asked.tokens, wanted, cache=asked.cache, start=(self.layer, hidden))
        said = torch.log_softmax(logits, dim=-1).to(delta)
        targets, now = said[: len(asked.where)], said[len(asked.where) :]
        picked = targets.gather(-1, asked.token.unsqueeze(-1)).squeeze(-1)
        nll = delta.new_zeros(len(delta)).index_add(
            0, asked.owner[asked.where[:, 0]], -picked * asked.weight.to(picked)
        )
        if self.original is None:
            self.original = now.detach()
        divergence = (self.original.exp() * (self.original - now)).sum(-1)
        penalty = torch.linalg.vector_norm(delta, dim=-1) / self.length.square()
        return nll + settings.kl * divergence + settings.decay * penalty


class Recorded:
    """An objective as a CUDA graph: the loss and the gradient in one replay, without Python and launches between."""

    def __init__(self, objective: Objective) -> None:
        """`objective` has run once: whatever is set up on the first run is there, and not in the graph."""
        self.objective = objective
        self._delta = torch.zeros_like(objective.asked.hidden[objective.asked.bare, 0], dtype=objective.length.dtype)
        self._graph = torch.cuda.CUDAGraph()
        with captured(self._graph):
            moved = self._delta.requires_grad_()
            loss = objective._run(moved)
            (self._slope,) = torch.autograd.grad(loss.sum(), moved)
            self._loss = loss.detach()
        self._delta = self._delta.detach()

    def loss(self, delta: Tensor) -> Tensor:
        self._delta.copy_(delta)
        self._graph.replay()
        return self._loss.clone()

    def slope(self) -> Tensor:
        return self._slope

    @property
    def asked(self) -> Asked:
        return self.objective.asked

    def keep(self, facts: Tensor) -> Objective:
        self._graph.reset()
        return self.objective.keep(facts)


RECORDING = 10_000  # rows whose step takes as long as recording one


def can_be_recorded(trunk: Trunk) -> bool:
    """Whether the model is on one CUDA device, and that is the current one, which graphs are captured on."""
    places = {parameter.device for parameter in trunk.model.parameters()}
    place = next(iter(places))
    return len(places) == 1 and place.type == "cuda" and place.index in (None, torch.cuda.current_device())


def recorded(objective: Objective) -> Recorded | Objective:
    """The objective as a graph, or as it is, with a warning, when the model's code does not allow that."""
    name = type(objective.trunk.model).__name__
    return or_none(lambda: Recorded(objective), f"the search for targets on {name}") or objective
