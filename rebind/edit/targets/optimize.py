"""Target search: find the hidden state at the subject that makes the model say the target (MEMIT, eq. 16).

For each fact a vector δ is added to the hidden state of the subject's last token, at the output of one block. An
optimizer minimizes the loss of `objective` over δ, within ‖δ‖ ≤ clamp · ‖h₀‖: Adam, or steps along the gradient with
lengths that are given beforehand, from a share of ‖h₀‖ down to a tenth of that. As the bound is one on ‖δ‖, the
gradient is the direction that gains most. Adam gives every entry of δ the same pace instead, and takes some three times
as many steps.

All facts are searched at once. Nothing before the subject's last token depends on δ, so its keys and values are
computed once, and a step runs only the rest of the prompt, from the block above, with logits at the positions of the
target. Facts that are finished leave the batch. Facts that do not fit in memory together are searched in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rebind.edit.targets.objective import (
    FactPrompts,
    Objective,
    RecordedObjective,
    TargetSettings,
    can_record,
    prepare_batches,
    record,
)
from rebind.errors import NumericalError
from rebind.models.batching import CACHED_TOKEN_COST, run_in_batches, tokens_that_fit
from rebind.models.trunk import Trunk

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # of Adam
MOMENTUM, SHORTENING = 0.5, 0.1  # of normalized steps; the last one is shorter than the first by the second factor
RECORDING_COST = 27_000  # recording a step takes as long as running one with this many rows


@dataclass(frozen=True, eq=False)
class TargetStates:
    """The result of a target search, one row per fact."""

    states: Tensor  # [n, width]: h₀ + δ, the hidden state that the subject should have
    initial: Tensor  # [n, width]: h₀
    loss: Tensor  # [n]
    steps: Tensor  # [n]: updates of δ

    def select(self, rows: Tensor) -> TargetStates:
        return TargetStates(*(tensor[rows] for tensor in self.tensors()))

    def to(self, device: torch.device) -> TargetStates:
        return TargetStates(*(tensor.to(device) for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.states, self.initial, self.loss, self.steps

    @classmethod
    def concatenate(cls, parts: Sequence[TargetStates]) -> TargetStates:
        return cls(*(torch.cat(tensors) for tensors in zip(*(part.tensors() for part in parts), strict=True)))


OnStep = Callable[[int, int, float], None]  # (step, finished facts, mean loss)
OnGroup = Callable[[Sequence[int], TargetStates], None]  # (indices of facts, their targets)


def find_targets(
    trunk: Trunk,
    layer: int,
    facts: Sequence[FactPrompts],
    settings: TargetSettings,
    *,
    search_trunk: Trunk | None = None,
    word_parts: Tensor | None = None,
    tokens_at_once: int | None = None,
    allow_recording: bool = True,
    on_step: OnStep | None = None,
    on_group: OnGroup = lambda indices, targets: None,
) -> TargetStates:
    """Find the target state of every fact at the output of block `layer`.

    Args:
        trunk: the model; the search starts from its hidden states.
        layer: the block that δ is added behind.
        facts: the prompts of each fact.
        settings: how to search.
        search_trunk: a copy of the model in a narrower dtype that runs the steps; by default the model itself.
        word_parts: for each token of the vocabulary, whether it continues a word (`LanguageModel.word_parts`).
        tokens_at_once: bounds a group of facts: rows times tokens, with padding; tokens of cached prefixes count for
            less. By default what fits on the device; halved, with a warning, if memory runs out.
        allow_recording: record steps as a CUDA graph where that is possible.
        on_step: is called after every step.
        on_group: is called with the targets of every finished group and, when the search is interrupted, with those
            of the facts that are finished, so that they can be stored.
    """
    sizes = [(one, CACHED_TOKEN_COST * prefix, suffix) for one, prefix, suffix in (fact.size for fact in facts)]
    order = sorted(range(len(facts)), key=lambda index: sizes[index][::-1])  # similar lengths together
    budget = tokens_at_once or tokens_that_fit(search_trunk or trunk)
    done, total_loss = 0, 0.0

    def search_group(group: list[int]) -> TargetStates:
        def report(step: int, finished: int, loss: Tensor) -> None:
            if on_step is not None:
                on_step(step, done + finished, (total_loss + float(loss.sum())) / (done + len(group)))

        search = _GroupSearch(trunk, search_trunk, layer, [facts[index] for index in group], settings, word_parts)
        try:
            return search.run(allow_recording and can_record(trunk), report)
        except KeyboardInterrupt:
            if len(finished := (~search.active).nonzero().squeeze(-1)):
                on_group([group[row] for row in finished.tolist()], search.targets().select(finished))
            raise

    parts: list[TargetStates] = []
    for group, targets in run_in_batches(sizes, order, budget, search_group):
        parts.append(targets)
        done, total_loss = done + len(group), total_loss + float(targets.loss.sum())
        on_group(group, targets)
    targets = TargetStates.concatenate(parts)
    return targets.select(torch.tensor(order, device=targets.states.device).argsort())


class _GroupSearch:
    """δ for a group of facts, side by side."""

    def __init__(
        self,
        trunk: Trunk,
        search_trunk: Trunk | None,
        layer: int,
        facts: Sequence[FactPrompts],
        settings: TargetSettings,
        word_parts: Tensor | None,
    ) -> None:
        batches = prepare_batches(trunk, layer, facts, settings, search_trunk)
        states = batches[0].hidden
        wide = torch.promote_types(states.dtype, torch.float32)
        self.settings = settings
        self.initial = states.new_zeros(len(facts), states.shape[-1], dtype=wide)  # [n, width]: h₀
        for batch in batches:
            row, token = batch.subject.at.unbind(-1)
            self.initial[batch.owner[row]] = batch.hidden[row, token].to(wide)
        self.length = torch.linalg.vector_norm(self.initial, dim=-1)
        self.delta, self.first, self.second = (torch.zeros_like(self.initial) for _ in range(3))  # δ; moments of ∂δ
        self.loss = torch.zeros_like(self.length)
        self.steps = torch.zeros_like(self.length, dtype=torch.long)
        self.active = torch.ones_like(self.length, dtype=torch.bool)  # [n]: facts that are not finished
        self.objective: Objective | RecordedObjective  # of the facts that are still in the batch
        if word_parts is not None:  # the layer may be on another device than the embeddings
            word_parts = word_parts.to(self.length.device)
        self.objective = Objective(search_trunk or trunk, layer, batches, settings, self.length, word_parts)

    def run(self, recorded: bool, report: Callable[[int, int, Tensor], None]) -> TargetStates:
        """Search, with steps `recorded` as a CUDA graph if the model's code allows it."""
        rows = torch.arange(len(self.delta), device=self.delta.device)  # facts in the batch
        for step in range(self.settings.steps):
            loss = self.objective.loss(self.delta[rows])
            self.loss[rows] = torch.where(self.active[rows], loss, self.loss[rows])
            if broken := int((~torch.isfinite(loss)).sum()):
                raise NumericalError(
                    f"The search diverged: the loss of {broken} facts is NaN or infinite",
                    advice="Load the model in float32 or bfloat16, or try {targets.rate}",
                    settings={"targets.rate": self.settings.rate / 5},
                    code="target_search_diverged",
                )
            self.active[rows] &= loss >= self.settings.enough
            going = self.active[rows].nonzero().squeeze(-1)
            report(step, len(self.loss) - len(going), self.loss)
            if step == self.settings.steps - 1 or not len(going):
                break
            self._move(rows[going], self.objective.gradient()[going])
            # A graph has one size of batch: finished facts stay in it, unmoved, until recording a new one pays off.
            rows_per_fact = self.objective.rows / len(rows)
            saved_rows = rows_per_fact * (len(rows) - len(going)) * (self.settings.steps - step)
            if len(going) < len(rows) and (not recorded or saved_rows > RECORDING_COST):
                rows, self.objective = rows[going], self.objective.select(going)
            if recorded and isinstance(self.objective, Objective):
                self.objective = record(self.objective)
                recorded = isinstance(self.objective, RecordedObjective)
        return self.targets()

    def targets(self) -> TargetStates:
        return TargetStates(self.initial + self.delta, self.initial, self.loss, self.steps)

    def _move(self, facts: Tensor, gradient: Tensor) -> None:
        """Make one step, then shorten δ to the clamp."""
        step = self._adam(facts, gradient) if self.settings.optimizer == "adam" else self._normalized(facts, gradient)
        self.steps[facts] += 1
        delta = self.delta[facts] - step
        size = torch.linalg.vector_norm(delta, dim=-1).clamp_min(torch.finfo(delta.dtype).tiny)
        shrink = (self.settings.clamp * self.length[facts] / size).clamp_max(1.0)
        self.delta[facts] = delta * shrink.unsqueeze(-1)

    def _adam(self, facts: Tensor, gradient: Tensor) -> Tensor:
        self.first[facts] = BETA1 * self.first[facts] + (1 - BETA1) * gradient
        self.second[facts] = BETA2 * self.second[facts] + (1 - BETA2) * gradient.square()
        count = (self.steps[facts] + 1).to(gradient.dtype).unsqueeze(-1)
        first = self.first[facts] / (1 - BETA1**count)
        second = self.second[facts] / (1 - BETA2**count)
        return self.settings.rate * first / (second.sqrt() + EPSILON)

    def _normalized(self, facts: Tensor, gradient: Tensor) -> Tensor:
        self.first[facts] = MOMENTUM * self.first[facts] + (1 - MOMENTUM) * gradient
        progress = self.steps[facts].to(gradient.dtype) / max(
            self.settings.steps - 2, 1
        )  # the first loss needs no step
        size = self.settings.rate * SHORTENING**progress * self.length[facts]
        return size.unsqueeze(-1) * functional.normalize(self.first[facts], dim=-1)
