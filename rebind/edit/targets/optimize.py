"""What the hidden state at the subject should become for the model to say the new thing.

For each fact a vector δ is added to the hidden state of the subject's last token, at the output of
one block, and is moved by Adam until the model says the target (MEMIT eq. 16): it minimises the loss of
`objective`, within ‖δ‖ ≤ clamp · ‖h₀‖.

All facts are solved at once. δ sits at the subject's last token, so everything before that token is
the same at every step: its keys and values are computed once and only the rest of the prompt is run,
from the block above, with logits at the target's positions alone. Facts that are done leave the batch.
More facts than fit in memory are solved in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.edit.targets.objective import (
    RECORDING,
    Asked,
    Objective,
    Prompt,
    Recorded,
    Request,
    TargetSettings,
    can_be_recorded,
    recorded,
)
from rebind.errors import NumericalError
from rebind.models.batching import PAST, in_portions, tokens_that_fit
from rebind.models.trunk import Trunk

__all__ = ["Found", "Prompt", "Request", "TargetSettings", "find_targets"]


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
    quick: Trunk | None = None,
    tokens_at_once: int | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
    keep: Keep | None = None,
) -> Found:
    """A target for every request.

    `quick` is the same model in a narrower dtype, to search on: a target is where a search ended, not a number with
    eight digits. What it starts from is `trunk`'s.

    `tokens_at_once` bounds a group of facts: rows times tokens, padding included, a token of a cached prefix counted by
    what it takes beside one that is run. It is found from the device unless given, and halved (with a warning) when
    memory runs out all the same. `on_step(step, facts done, mean loss)` is told of progress. `keep(indices, found)` is
    handed what is finished, group by group, so that nothing is lost when a later group is interrupted; so are the
    finished facts of the interrupted group itself.
    """
    sizes = [(rows, PAST * prefix, suffix) for rows, prefix, suffix in (request.size for request in requests)]
    order = sorted(range(len(requests)), key=lambda index: sizes[index][::-1])  # like lengths together
    done, total_loss = 0, 0.0

    def solve(group: list[int]) -> Found:
        def told(step: int, finished: int, loss: Tensor) -> None:
            if on_step is not None:
                on_step(step, done + finished, (total_loss + float(loss.sum())) / (done + len(group)))

        search = _Search(group, settings)
        try:
            return search.run(trunk, quick, layer, [requests[index] for index in group], told)
        except KeyboardInterrupt:
            if keep is not None and len(rows := search.finished()):
                keep([group[row] for row in rows.tolist()], search.found().select(rows))
            raise

    parts: list[Found] = []
    for group, found in in_portions(sizes, order, tokens_at_once or tokens_that_fit(quick or trunk), solve):
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
        self.moving = torch.zeros(0, dtype=torch.bool)  # [n]: facts that are not done

    def run(
        self,
        trunk: Trunk,
        quick: Trunk | None,
        layer: int,
        requests: Sequence[Request],
        told: Callable[[int, int, Tensor], None],
    ) -> Found:
        objective: Objective | Recorded = self._start(trunk, quick, layer, requests)
        adam = _Adam(self.delta, self.settings.rate)
        record = can_be_recorded(trunk)
        rows = torch.arange(len(self.delta), device=self.delta.device)  # facts in the batch
        for step in range(self.settings.steps):
            loss = objective.loss(self.delta[rows])
            self.loss[rows] = torch.where(self.moving[rows], loss, self.loss[rows])
            self._check(rows, loss)
            self.moving[rows] &= loss >= self.settings.enough
            going = self.moving[rows].nonzero().squeeze(-1)
            told(step, len(self.loss) - len(going), self.loss)
            if step == self.settings.steps - 1 or not len(going):
                break
            slope = objective.slope()
            self._move(adam, rows[going], slope[going])
            left = len(rows) - len(going)
            if left and (not record or objective.asked.rows_a_fact * left * (self.settings.steps - step) > RECORDING):
                # A graph is for one size of batch: facts that are done stay in it, unmoved, until a new one pays.
                rows, objective = rows[going], objective.keep(going)
            if record and isinstance(objective, Objective):
                objective = recorded(objective)
                record = isinstance(objective, Recorded)
        return self.found()

    def finished(self) -> Tensor:
        """Facts whose loss fell below what is enough."""
        return torch.arange(len(self.moving), device=self.moving.device)[~self.moving]

    def found(self) -> Found:
        return Found(self.before + self.delta, self.before, self.loss, self.steps)

    def _start(self, trunk: Trunk, quick: Trunk | None, layer: int, requests: Sequence[Request]) -> Objective:
        asked = Asked.of(trunk, layer, requests, quick)
        wide = torch.promote_types(asked.hidden.dtype, torch.float32)
        self.before = asked.hidden[asked.bare, 0].to(wide)  # [n, width]: h₀
        self.length = torch.linalg.vector_norm(self.before, dim=-1)
        self.delta = torch.zeros_like(self.before)
        self.loss = torch.zeros_like(self.length)
        self.steps = torch.zeros_like(self.length, dtype=torch.long)
        self.moving = torch.ones_like(self.length, dtype=torch.bool)
        return Objective(quick or trunk, layer, asked, self.settings, self.length)

    def _check(self, rows: Tensor, loss: Tensor) -> None:
        if not torch.isfinite(loss).all():
            wrong = rows[~torch.isfinite(loss)]
            raise NumericalError(
                f"the loss of fact {self.group[int(wrong[0])]} became NaN or infinite ({len(wrong)} facts in all), "
                f"expected finite numbers: load the model in float32 or bfloat16, or lower the rate "
                f"({self.settings.rate})"
            )

    def _move(self, adam: _Adam, facts: Tensor, slope: Tensor) -> None:
        """One step of Adam, then back within the clamp."""
        adam.update(self.delta, facts, slope)
        self.steps[facts] += 1
        moved = self.delta[facts]
        size = torch.linalg.vector_norm(moved, dim=-1).clamp_min(torch.finfo(moved.dtype).tiny)
        shrink = (self.settings.clamp * self.length[facts] / size).clamp_max(1.0)
        self.delta[facts] = moved * shrink.unsqueeze(-1)


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
