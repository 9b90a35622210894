"""What target search minimizes: the loss of δ for a batch of facts, and its gradient.

    mean over the framings of a fact, and over the prompts of each, of the target's negative log-likelihood
      + end · mean over them of −log P(the word ends behind the target)
      + keep · mean over kept prompts of √p₀ · max(0, log p₀ − log p) of the next token
      + keep · the same over the words with which the assistant begins its answer, to the questions of the fact and
        to general ones
      + kl · KL(original ‖ edited) of the next token at the subject of the bare prompt
      + decay · ‖δ‖ / ‖h₀‖²

δ is added at every mention of the subject, as the edited weights will do. p is the probability of the base model's
first choice, and p₀ what the base model gives it: an answer is kept if it stays the first choice, whatever else moves,
and a choice that the base model is not sure of counts less. A `SearchBatch` holds what is the same at every
step: cached prefixes, suffixes, and the positions of the logits that are needed. `Objective` computes the loss. On a
GPU, launching the kernels of a step takes longer than the step of a small model, so `RecordedObjective` records the
step as a CUDA graph and replays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from rebind.cuda_graphs import capture_graph, record_or_warn
from rebind.memory.checks import require_number, unknown_name
from rebind.models.batching import launch_overhead, padded_lengths
from rebind.models.caches import select_cache
from rebind.models.prompts import EncodedPrompt
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk

OPTIMIZERS = ("adam", "normalized")
ALIGNED = 8  # matrix products are fast where the number of keys is a multiple of this


@dataclass(frozen=True)
class TargetSettings:
    """How to search for δ."""

    steps: int = 25
    rate: float = 0.5  # of Adam; for normalized steps the length of the first one, as a share of ‖h₀‖
    clamp: float = 0.75  # largest ‖δ‖ / ‖h₀‖
    decay: float = 0.5
    kl: float = 0.0625
    keep: float = 2.0  # weight of the kept prompts
    end: float = 1.0  # weight of the end of the target's last word
    enough: float = 0.05  # the search for a fact ends when its loss falls below this
    optimizer: str = "adam"  # or "normalized"

    def __post_init__(self) -> None:
        require_number("steps", self.steps, least=1, whole=True, code="not_positive")
        for name in ("rate", "clamp"):
            require_number(name, getattr(self, name), above=0.0, code="not_positive")
        for name in ("decay", "kl", "keep", "end", "enough"):
            require_number(name, getattr(self, name), code="negative_setting")
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)


@dataclass(frozen=True)
class FactPrompts:
    """The prompts that a fact is searched with, as tokens. The first of `prompts` is the bare one."""

    prompts: tuple[EncodedPrompt, ...]  # the target follows each of them
    kept: tuple[EncodedPrompt, ...] = ()  # about the same subject: the next token or the assistant's words stay
    ends_word: bool = False  # whether the target ends with a word, which the next token could continue
    framings: tuple[str, ...] = ()  # of each prompt; none: all prompts count alike
    protected: tuple[EncodedPrompt, ...] = ()  # about other subjects: a write should leave their keys alone

    @property
    def shares(self) -> list[float]:
        """How much each prompt counts: framings count alike, and so do the prompts of a framing."""
        names = self.framings or ("",) * len(self.prompts)
        size = Counter(names)
        return [1 / (len(size) * size[name]) for name in names]

    def alike(self, prompt: EncodedPrompt) -> int:
        """Return how many kept prompts are conversations, or are not, as this one: each group counts as much."""
        return sum((other.answer is None) is (prompt.answer is None) for other in self.kept)

    @property
    def target(self) -> tuple[int, ...]:
        """The tokens of the target after the bare prompt."""
        return self.prompts[0].target

    @property
    def size(self) -> tuple[int, int, int]:
        """(1, tokens of all prefixes, tokens of all suffixes) that the fact takes in a batch."""
        rows = (*self.prompts, *self.kept)
        return 1, sum(prompt.mentions[0] for prompt in rows), sum(map(len, self.suffixes))

    @cached_property
    def suffixes(self) -> list[tuple[int, ...]]:
        """The tokens of each prompt, and then of each kept one, from the first mention of the subject on."""
        said = [prompt.target if self.ends_word else prompt.target[:-1] for prompt in self.prompts]
        rows = zip((*self.prompts, *self.kept), chain(said, repeat(())), strict=False)
        return [(*prompt.ids[prompt.mentions[0] :], *target) for prompt, target in rows]


Place = tuple[int, int, float, int]  # (row, token, weight, token that follows)


@dataclass(frozen=True, eq=False)
class Positions:
    """Places in a batch at which logits are needed, and the weight of each in the loss of its fact."""

    at: Tensor  # [m, 2]: (row, token)
    weight: Tensor  # [m]
    token: Tensor  # [m]: the token of a target that should follow

    @classmethod
    def gather(cls, places: Sequence[Place], device: torch.device) -> Positions:
        columns = list(zip(*places, strict=True)) if places else [(), (), (), ()]
        at = torch.tensor([columns[0], columns[1]], dtype=torch.long, device=device).mT
        weight = torch.tensor(columns[2], dtype=torch.float64, device=device)
        return cls(at, weight, torch.tensor(columns[3], dtype=torch.long, device=device))

    def __len__(self) -> int:
        return len(self.at)

    def select(self, new_row: Tensor) -> Positions:
        """Return the positions in rows that stay: `new_row` [rows] is −1 for the others."""
        stays = new_row[self.at[:, 0]] >= 0
        at = torch.stack([new_row[self.at[stays, 0]], self.at[stays, 1]], dim=-1)
        return Positions(at, self.weight[stays], self.token[stays])


@dataclass(frozen=True, eq=False)
class SearchBatch:
    """Suffixes of similar length of prompts of facts, from the first mention of the subject on."""

    tokens: Tokens  # the suffixes: the last token of the subject, the rest of the prompt, the target
    cache: Any  # keys and values of the prefixes
    hidden: Tensor  # [rows, tokens, width]: output of the layer, unchanged
    mentions: Tensor  # [rows, tokens]: 1 where δ is added, 0 elsewhere
    owner: Tensor  # [rows]: the fact that a row belongs to
    said: Positions  # before each token of a target
    ends: Positions  # at the last token of a target
    kept: Positions  # at the end of each kept prompt, and before each word of an assistant's answer
    subject: Positions  # at the subject of each bare prompt

    def select(self, new_fact: Tensor) -> SearchBatch | None:
        """Return the rows of facts that stay: `new_fact` [n] is −1 for the others; None if no row stays."""
        rows = (new_fact[self.owner] >= 0).nonzero().squeeze(-1)
        if not len(rows):
            return None
        new_row = torch.full_like(self.owner, -1)
        new_row[rows] = torch.arange(len(rows), device=rows.device)
        cache_rows = rows.to(self.tokens.ids.device)
        return SearchBatch(
            self.tokens.select(cache_rows),
            select_cache(self.cache, cache_rows),
            self.hidden[rows],
            self.mentions[rows],
            new_fact[self.owner[rows]],
            *(positions.select(new_row) for positions in (self.said, self.ends, self.kept, self.subject)),
        )


def prepare_batches(
    trunk: Trunk,
    layer: int,
    facts: Sequence[FactPrompts],
    settings: TargetSettings,
    search_trunk: Trunk | None = None,
) -> list[SearchBatch]:
    """Run the prefixes of all prompts, in batches with suffixes of similar length.

    Hidden states come from `trunk`, the cache from the copy that the search runs on.
    """
    drafts: dict[int, _Draft] = {}
    lengths = [len(suffix) for fact in facts for suffix in fact.suffixes]
    padded = padded_lengths(lengths, launch_overhead(search_trunk or trunk))
    for index, fact in enumerate(facts):
        chats, shares = sum(prompt.answer is not None for prompt in fact.prompts), fact.shares
        for place, (prompt, suffix) in enumerate(zip((*fact.prompts, *fact.kept), fact.suffixes, strict=True)):
            start, says = prompt.mentions[0], place < len(fact.prompts)
            target = prompt.target if says else ()
            draft = drafts.setdefault(padded[len(suffix)], _Draft())
            row = len(draft.suffixes)
            draft.prefixes.append(prompt.ids[:start])
            draft.suffixes.append(suffix)
            draft.owner.append(index)
            draft.mentions += [(row, mention - start) for mention in prompt.mentions]
            last = len(prompt.ids) - 1 - start  # the last token of the prompt, in the suffix
            words = range(max((prompt.answer or len(prompt.ids)) - 1, start), len(prompt.ids) - 1)  # of an assistant
            if not says:
                places = [word - start for word in words] or [last]
                share = settings.keep / (len(places) * fact.alike(prompt))
                draft.kept += [(row, token, share, 0) for token in places]
                continue
            share = shares[place]
            draft.said += [(row, last + step, share / len(target), token) for step, token in enumerate(target)]
            if fact.ends_word:
                draft.ends.append((row, last + len(target), share * settings.end, 0))
            if place == 0:
                draft.subject.append((row, prompt.subject_last - start, settings.kl, 0))
            draft.kept += [(row, word - start, settings.keep / (len(words) * chats), 0) for word in words]
    return [draft.run(trunk, layer, search_trunk) for _, draft in sorted(drafts.items())]


@dataclass(eq=False)
class _Draft:
    """The rows of a batch, before they run."""

    prefixes: list[tuple[int, ...]] = field(default_factory=list)
    suffixes: list[tuple[int, ...]] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    mentions: list[tuple[int, int]] = field(default_factory=list)  # (row, token)
    said: list[Place] = field(default_factory=list)
    ends: list[Place] = field(default_factory=list)
    kept: list[Place] = field(default_factory=list)
    subject: list[Place] = field(default_factory=list)

    def run(self, trunk: Trunk, layer: int, search_trunk: Trunk | None) -> SearchBatch:
        longest = max(map(len, self.prefixes))
        keys = longest + max(map(len, self.suffixes))
        past = Tokens.left_padded(self.prefixes, trunk.device, least=longest and longest + -keys % ALIGNED)
        cache = trunk.cache(past, last_layer=None if search_trunk is None else layer)
        tokens = Tokens.following(past, self.suffixes)
        hidden = trunk.after(layer, tokens, cache=cache)
        if search_trunk is not None:
            cache = search_trunk.cache(past)
        mask = torch.zeros(hidden.shape[:2], dtype=hidden.dtype, device=hidden.device)
        mask[tuple(torch.tensor(self.mentions, device=hidden.device).mT)] = 1.0
        owner = torch.tensor(self.owner, device=hidden.device)
        groups = [Positions.gather(p, hidden.device) for p in (self.said, self.ends, self.kept, self.subject)]
        return SearchBatch(tokens, cache, hidden, mask, owner, *groups)


# What the base model says, for δ = 0: log-probabilities at the subjects [k, vocabulary], and at the kept positions its
# first choice and the log-probability of it
Original = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False)
class Objective:
    """The loss [n] of δ [n, width], and its gradient."""

    trunk: Trunk
    layer: int
    batches: list[SearchBatch]
    settings: TargetSettings
    length: Tensor  # [n]: ‖h₀‖
    word_parts: Tensor | None = None  # [vocabulary]: whether a token continues a word; None: there are no such tokens
    originals: list[Original] = field(default_factory=list)  # one per batch, set by the first run
    _last: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # δ and loss of the last run

    @property
    def rows(self) -> int:
        return sum(len(batch.owner) for batch in self.batches)

    def loss(self, delta: Tensor) -> Tensor:
        delta = delta.detach().requires_grad_()
        self._last = (delta, self.run(delta))
        return self._last[1].detach()

    def gradient(self) -> Tensor:
        """Return the gradient at the last argument of `loss`."""
        assert self._last is not None
        delta, loss = self._last
        return torch.autograd.grad(loss.sum(), delta)[0]

    def select(self, facts: Tensor) -> Objective:
        """Return the objective of some of the facts, for which the objective has run."""
        new_fact = torch.full_like(self.length, -1, dtype=torch.long)
        new_fact[facts] = torch.arange(len(facts), device=facts.device)
        batches, originals = [], []
        for batch, (subject, choice, log_prob) in zip(self.batches, self.originals, strict=True):
            selected = batch.select(new_fact)
            if selected is not None:
                stays = [new_fact[batch.owner[group.at[:, 0]]] >= 0 for group in (batch.subject, batch.kept)]
                batches.append(selected)
                originals.append((subject[stays[0]], choice[stays[1]], log_prob[stays[1]]))
        return replace(self, batches=batches, length=self.length[facts], originals=originals, _last=None)

    def run(self, delta: Tensor) -> Tensor:
        """Compute the loss of δ, differentiably."""
        loss = self.settings.decay * torch.linalg.vector_norm(delta, dim=-1) / self.length.square()
        first_run = not self.originals
        for index, batch in enumerate(self.batches):
            loss = self._add_batch(loss, delta, batch, None if first_run else self.originals[index])
        return loss

    def _add_batch(self, loss: Tensor, delta: Tensor, batch: SearchBatch, original: Original | None) -> Tensor:
        moved = batch.mentions.unsqueeze(-1) * delta[batch.owner].unsqueeze(1).to(batch.hidden.dtype)
        hidden = (batch.hidden + moved).to(self.trunk.dtype)
        groups = (batch.said, batch.kept, batch.ends, batch.subject)
        where = torch.cat([group.at for group in groups])
        logits = self.trunk.logits(batch.tokens, where, cache=batch.cache, resume=(self.layer, hidden))
        log_probs = torch.log_softmax(logits, dim=-1).to(delta)
        said, kept, ends, subject = log_probs.split([len(group) for group in groups])
        if original is None:
            best = kept.detach().max(-1)
            original = subject.detach(), best.indices, best.values
            self.originals.append(original)
        before, choice, log_prob = original
        lost = (log_prob - _pick(kept, choice)).clamp_min(0.0) * (log_prob / 2).exp()
        terms = [-_pick(said, batch.said.token), lost, ends.new_zeros(len(ends))]
        if self.word_parts is not None:
            terms[2] = -torch.logsumexp(ends.masked_fill(self.word_parts, -torch.inf), dim=-1)
        terms.append((before.exp() * (before - subject)).sum(-1))
        for positions, values in zip(groups, terms, strict=True):
            loss = loss.index_add(0, batch.owner[positions.at[:, 0]], values * positions.weight.to(values))
        return loss


def _pick(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class RecordedObjective:
    """An objective recorded as a CUDA graph: one replay computes the loss and the gradient."""

    def __init__(self, objective: Objective) -> None:
        """Record `objective`, which has run once, so that nothing set up by a first run goes into the graph."""
        self.objective, self.rows = objective, objective.rows
        self._delta = objective.length.new_zeros(len(objective.length), objective.batches[0].hidden.shape[-1])
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
