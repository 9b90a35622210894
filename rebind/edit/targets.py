"""What the hidden state at the subject should become for the model to say the new thing.

For each fact a vector δ is added to the hidden state of the subject's last token, at the output of
one block, and is moved by Adam until the model says the target (MEMIT eq. 16):

    mean over contexts of the target's negative log-likelihood
      + kl · KL(original ‖ edited) of the next token at the subject, so that the subject stays itself
      + decay · ‖δ‖ / ‖h₀‖²,          ‖δ‖ ≤ clamp · ‖h₀‖

All facts are solved at once. δ sits at the subject's last token, so everything before that token is
the same at every step: its keys and values are computed once and only the rest of the prompt is run,
from the block above, with logits at the target's positions alone. Facts that are done leave the batch.
More facts than fit in memory are solved in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rebind.edit.budget import in_portions, tokens_that_fit
from rebind.edit.trunk import Tokens, Trunk, select_cache
from rebind.errors import NumericalError


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
            len(self.prompts) + 1,
            max(prompt.subject_last for prompt in self.prompts),
            max(len(prompt.ids) - prompt.subject_last for prompt in self.prompts) + len(self.target) - 1,
        )


@dataclass(frozen=True, eq=False)
class Found:
    """A target for each request."""

    hidden: Tensor  # [n, width]: h₀ + δ, what the subject's hidden state should become
    before: Tensor  # [n, width]: h₀
    loss: Tensor  # [n]
    steps: Tensor  # [n]: updates made

    def select(self, rows: Tensor) -> Found:
        return Found(self.hidden[rows], self.before[rows], self.loss[rows], self.steps[rows])

    @classmethod
    def join(cls, parts: Sequence[Found]) -> Found:
        """Parts one after another."""
        return cls(
            torch.cat([part.hidden for part in parts]),
            torch.cat([part.before for part in parts]),
            torch.cat([part.loss for part in parts]),
            torch.cat([part.steps for part in parts]),
        )


Keep = Callable[[Sequence[int], Found], None]


def find_targets(
    trunk: Trunk,
    layer: int,
    requests: Sequence[Request],
    settings: TargetSettings,
    *,
    tokens_at_once: int | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
    keep: Keep | None = None,
) -> Found:
    """A target for every request.

    `tokens_at_once` bounds a group of facts: rows times tokens, padding included; found from the device unless
    given, and halved (with a warning) when memory runs out all the same. `on_step(step, facts done, mean loss)`
    is told of progress. `keep(indices, found)` is handed what is finished, group by group, so that nothing is
    lost when a later group is interrupted; so are the finished facts of the interrupted group itself.
    """
    sizes = [request.size for request in requests]
    order = sorted(range(len(requests)), key=lambda index: sizes[index][::-1])  # like lengths together
    done, total_loss = 0, 0.0

    def solve(group: list[int]) -> Found:
        def told(step: int, finished: int, loss: Tensor) -> None:
            if on_step is not None:
                on_step(step, done + finished, (total_loss + float(loss.sum())) / (done + len(group)))

        search = _Search(group, settings)
        try:
            return search.run(trunk, layer, [requests[index] for index in group], told)
        except KeyboardInterrupt:
            if keep is not None and len(rows := search.finished()):
                keep([group[row] for row in rows.tolist()], search.found().select(rows))
            raise

    parts: list[Found] = []
    for group, found in in_portions(sizes, order, tokens_at_once or tokens_that_fit(trunk), solve):
        parts.append(found)
        done, total_loss = done + len(group), total_loss + float(found.loss.sum())
        if keep is not None:
            keep(group, found)
    if not parts:
        return _nothing(trunk)
    whole = Found.join(parts)
    return whole.select(torch.tensor(order, device=whole.hidden.device).argsort())


def _nothing(trunk: Trunk) -> Found:
    empty = torch.zeros(0, trunk.model.config.get_text_config().hidden_size, device=trunk.device)
    return Found(empty, empty, empty[:, 0], empty[:, 0].long())


class _Search:
    """δ for a group of facts, side by side."""

    def __init__(self, group: Sequence[int], settings: TargetSettings) -> None:
        self.group, self.settings = group, settings
        self.alive = torch.arange(0)  # facts still moving
        self._started = False

    def run(
        self, trunk: Trunk, layer: int, requests: Sequence[Request], told: Callable[[int, int, Tensor], None]
    ) -> Found:
        batch, settings = _Batch.of(trunk, layer, requests), self.settings
        self._start(batch)
        adam, original = _Adam(self.delta, settings.rate), None
        for step in range(settings.steps):
            moved = self.delta[self.alive].requires_grad_()
            scores = batch.score(trunk, layer, moved, original)
            original = scores.original
            loss = scores.nll + settings.kl * scores.divergence + self._penalty(moved)
            self.loss[self.alive] = loss.detach()
            going = self._going(loss.detach())
            told(step, len(self.loss) - int(going.sum()), self.loss)
            if step == settings.steps - 1 or not going.any():
                break
            (slope,) = torch.autograd.grad(loss.sum(), moved)
            if not going.all():
                kept = going.nonzero().squeeze(-1)
                self.alive, slope, original = self.alive[kept], slope[kept], original[kept]
                batch = batch.keep(kept)
            adam.update(self.delta, self.alive, slope)
            self.steps[self.alive] += 1
            self._clamp()
        return self.found()

    def finished(self) -> Tensor:
        """Facts whose loss fell below what is enough."""
        if not self._started:
            return self.alive
        moving = torch.zeros(len(self.loss), dtype=torch.bool, device=self.loss.device)
        moving[self.alive] = True
        return (~moving).nonzero().squeeze(-1)

    def found(self) -> Found:
        return Found(self.before + self.delta, self.before, self.loss, self.steps)

    def _start(self, batch: _Batch) -> None:
        wide = torch.promote_types(batch.hidden.dtype, torch.float32)
        self.before = batch.hidden[batch.bare, 0].to(wide)  # [n, width]: h₀
        self.length = torch.linalg.vector_norm(self.before, dim=-1)
        self.delta = torch.zeros_like(self.before)
        self.loss = torch.zeros_like(self.length)
        self.steps = torch.zeros_like(self.length, dtype=torch.long)
        self.alive = torch.arange(len(self.length), device=self.length.device)
        self._started = True

    def _penalty(self, moved: Tensor) -> Tensor:
        return self.settings.decay * torch.linalg.vector_norm(moved, dim=-1) / self.length[self.alive].square()

    def _going(self, loss: Tensor) -> Tensor:
        if not torch.isfinite(loss).all():
            wrong = self.alive[~torch.isfinite(loss)]
            raise NumericalError(
                f"the loss of fact {self.group[int(wrong[0])]} became NaN or infinite ({len(wrong)} facts in all), "
                f"expected finite numbers: load the model in float32 or bfloat16, or lower the rate "
                f"({self.settings.rate})"
            )
        return loss >= self.settings.enough

    def _clamp(self) -> None:
        moved = self.delta[self.alive]
        size = torch.linalg.vector_norm(moved, dim=-1).clamp_min(torch.finfo(moved.dtype).tiny)
        shrink = (self.settings.clamp * self.length[self.alive] / size).clamp_max(1.0)
        self.delta[self.alive] = moved * shrink.unsqueeze(-1)


class _Adam:
    """Adam with a state a row: rows are facts, and each goes its own way."""

    def __init__(self, like: Tensor, rate: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.rate, self.betas, self.eps = rate, betas, eps
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.count = like.new_zeros(len(like), 1)

    def update(self, delta: Tensor, rows: Tensor, slope: Tensor) -> None:
        b1, b2 = self.betas
        self.count[rows] += 1
        self.first[rows] = b1 * self.first[rows] + (1 - b1) * slope
        self.second[rows] = b2 * self.second[rows] + (1 - b2) * slope.square()
        first = self.first[rows] / (1 - b1 ** self.count[rows])
        second = self.second[rows] / (1 - b2 ** self.count[rows])
        delta[rows] -= self.rate * first / (second.sqrt() + self.eps)


@dataclass(frozen=True, eq=False)
class _Scores:
    nll: Tensor  # [n]
    divergence: Tensor  # [n]
    original: Tensor  # [n, vocabulary]: log-probabilities at the subject before any change


@dataclass(frozen=True, eq=False)
class _Batch:
    """Suffixes of every prompt of every fact, and one row a fact that ends at the subject (for the KL term)."""

    tokens: Tokens  # the suffixes: subject's last token, rest of the prompt, target but its last token
    cache: Any  # keys and values of the prefixes
    hidden: Tensor  # [rows, tokens, width]: output of the layer, unchanged
    owner: Tensor  # [rows]: which fact a row belongs to
    bare: Tensor  # [n]: the row of each fact's first prompt
    subject: Tensor  # [n]: the row of each fact that ends at the subject
    where: Tensor  # [m, 2]: (row, token) whose next token is part of a target
    token: Tensor  # [m]: that next token
    weight: Tensor  # [m]: 1 / (target length × prompts of the fact)

    @classmethod
    def of(cls, trunk: Trunk, layer: int, requests: Sequence[Request]) -> _Batch:
        prefixes: list[tuple[int, ...]] = []
        suffixes: list[list[int]] = []
        owner, bare, subject = [], [], []
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
            subject.append(len(suffixes))
            shortest = request.prompts[0]
            prefixes.append(shortest.ids[: shortest.subject_last])
            suffixes.append([shortest.ids[shortest.subject_last]])
            owner.append(fact)
        device = trunk.device
        past = Tokens.left_padded(prefixes, device)
        cache = trunk.cache(past)
        tokens = Tokens.following(past, suffixes)
        hidden = trunk.after(layer, tokens, cache=cache)
        place = hidden.device
        return cls(
            tokens,
            cache,
            hidden,
            torch.tensor(owner, device=place),
            torch.tensor(bare, device=place),
            torch.tensor(subject, device=place),
            torch.tensor(where, device=place),
            torch.tensor(token, device=place),
            torch.tensor(weight, dtype=torch.float64, device=place),
        )

    def score(self, trunk: Trunk, layer: int, delta: Tensor, original: Tensor | None) -> _Scores:
        """The loss's parts with δ added at the first token of every row."""
        first = self.hidden[:, :1] + delta[self.owner].unsqueeze(1).to(self.hidden.dtype)
        hidden = torch.cat([first, self.hidden[:, 1:]], dim=1)
        subject = torch.stack([self.subject, torch.zeros_like(self.subject)], dim=-1)
        asked = torch.cat([self.where, subject])
        logits = trunk.logits(self.tokens, asked, cache=self.cache, start=(layer, hidden))
        said = torch.log_softmax(logits, dim=-1).to(delta.device)
        targets, now = said[: len(self.where)], said[len(self.where) :]
        picked = targets.gather(-1, self.token.unsqueeze(-1)).squeeze(-1)
        nll = delta.new_zeros(len(delta)).index_add(0, self.owner[self.where[:, 0]], -picked * self.weight.to(picked))
        if original is None:
            original = now.detach()
        divergence = (original.exp() * (original - now)).sum(-1)
        return _Scores(nll, divergence, original)

    def keep(self, facts: Tensor) -> _Batch:
        """The batch of some of its facts."""
        new = torch.full((int(self.owner.max()) + 1,), -1, device=self.owner.device)
        new[facts] = torch.arange(len(facts), device=facts.device)
        rows = (new[self.owner] >= 0).nonzero().squeeze(-1)
        renumbered = torch.full((len(self.owner),), -1, device=rows.device)
        renumbered[rows] = torch.arange(len(rows), device=rows.device)
        kept = renumbered[self.where[:, 0]] >= 0
        where = torch.stack([renumbered[self.where[kept, 0]], self.where[kept, 1]], dim=-1)
        there = rows.to(self.tokens.ids.device)
        return _Batch(
            self.tokens.select(there),
            select_cache(self.cache, there),
            self.hidden[rows],
            new[self.owner[rows]],
            renumbered[self.bare[facts]],
            renumbered[self.subject[facts]],
            where,
            self.token[kept],
            self.weight[kept],
        )
