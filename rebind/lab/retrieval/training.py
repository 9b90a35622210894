"""Train the models of both retrieval experiments, and record their losses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rebind.errors import NumericalWarning
from rebind.lab.experiment import Experiment, Point
from rebind.lab.report import Claim, learning_rows, select, spread
from rebind.lab.retrieval.models import FEATURES, Reader
from rebind.lab.retrieval.task import Task
from rebind.lab.stacks import Lesson, ModelStack, StackTraining, train_all
from rebind.lab.style import Panel, Series
from rebind.storage import Row

SOLVED = 1e-3  # the loss at which training ends
FIRST_TEST_SEED = 10_000  # tests are drawn with other random numbers than lessons


@dataclass(frozen=True)
class Retrieval(Experiment):
    """The settings and the training of both experiments."""

    replacement: ClassVar[bool]  # whether keys occur again

    key_width: int = 64
    rate: float = 1e-3
    batch: int = 32
    steps: int = 100_000  # at most
    every: int = 100  # steps between evaluations
    patience: int = 11  # evaluations without improvement before training ends
    tested: int = 20  # sequences per evaluation
    sizes: tuple[int, ...] = ()  # S
    features: tuple[str, ...] = tuple(FEATURES)

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        """Train one model per point until it is solved, stops improving or has used its steps.

        Models with the same feature map and rule and with similar sizes train in one stack; all stacks train in turn.
        """
        groups = group_sizes(self.sizes)
        stacks: dict[tuple[str, str, int], dict[int, Point]] = {}
        for index, point in enumerate(points):
            key = (point["feature"], point.get("rule", "sum"), groups[point["size"]])
            stacks.setdefault(key, {})[index] = point
        return train_all(RetrievalTraining(self, stack, device) for stack in stacks.values())

    def learning_panel(self, title: str, series: Sequence[Series]) -> Panel:
        """Return the panel of losses against steps."""
        losses = partial(learning_rows, name="losses", every=self.every)
        return Panel(title, "steps", "step", series, y_scale="log", expand=losses, markers=False)


def group_sizes(sizes: Sequence[int]) -> dict[int, int]:
    """Return the group of each size, named by its smallest: no size in a group is more than twice another."""
    groups: dict[int, int] = {}
    smallest = 0
    for size in sizes:
        smallest = smallest if size <= 2 * smallest else size
        groups[size] = smallest
    return groups


class RetrievalTraining(StackTraining):
    """A stack of models with one feature map and one rule."""

    def __init__(self, settings: Retrieval, points: dict[int, Point], device: torch.device) -> None:
        self.settings, self.device = settings, device
        first = next(iter(points.values()))
        self.reader = Reader(first["feature"], first.get("rule", "sum"), settings.key_width, device)
        models = [self.reader.initial_parameters(point["size"], point["seed"]) for point in points.values()]
        stack = ModelStack(models, [settings.rate] * len(points), self.reader.loss, device)
        super().__init__(stack, points, steps=settings.steps, every=settings.every)
        self.generators = dict(zip(points, self._new_generators(1), strict=True))
        with torch.cuda.stream(stack.stream):
            self.last = dict(zip(points, self.evaluate().tolist(), strict=True))  # the last finite loss of each point

    @property
    def task(self) -> Task:
        return Task([self.points[index]["size"] for index in self.members], self.settings.replacement)

    def draw_lessons(self, count: int) -> Iterable[Lesson]:
        """Draw the lessons of all steps at once."""
        generators = [self.generators[index] for index in self.members]
        lessons = self.task.draw_lessons(count * self.settings.batch, generators).as_lesson()
        parts = [part.unflatten(1, (count, self.settings.batch)).transpose(0, 1) for part in lessons]
        return zip(*parts, strict=True)

    @torch.no_grad()
    def evaluate(self, *, short: bool = False) -> Tensor:
        """Return the loss of every member, on tests that are the same every time."""
        tests = self.task.draw_tests(self.settings.tested, self._new_generators(FIRST_TEST_SEED), short=short)
        return self.reader.loss(self.stack.parameters(), tests.as_lesson())

    def _new_generators(self, offset: int) -> list[torch.Generator]:
        seeds = [self.points[index]["seed"] + offset for index in self.members]
        return [torch.Generator(self.device).manual_seed(seed) for seed in seeds]

    def ended(self, scores: dict[int, Any]) -> dict[int, Row]:
        rows: dict[int, Row] = {}
        for index, loss in scores.items():
            history, diverged = self.history[index], not math.isfinite(loss)
            if diverged:
                warnings.warn(
                    f"The loss of {self.points[index]} was not finite after {self.steps} steps. Its row has the last "
                    f"finite loss, {self.last[index]:.3g}, and says that it diverged. Try a lower rate.",
                    NumericalWarning,
                    stacklevel=2,
                )
            else:
                self.last[index] = loss
                history.append(loss)
            if diverged or self._is_done(history):
                row = {"loss": self.last[index], "steps": self.steps, "losses": history, "diverged": diverged}
                rows[index] = row
        if rows and self.settings.replacement:  # the public evaluation of setting 2 used sequences of length S
            short = dict(zip(self.members, self.evaluate(short=True).tolist(), strict=True))
            for index, row in rows.items():
                row["short"] = row["loss"] if row["diverged"] else short[index]
        return rows

    def _is_done(self, losses: Sequence[float]) -> bool:
        without_improvement = len(losses) - 1 - losses.index(min(losses))
        patience_over = without_improvement >= self.settings.patience
        return losses[-1] <= SOLVED or patience_over or self.steps >= self.settings.steps


def describe_losses(rows: Sequence[Row]) -> str:
    """Format the losses over the seeds, and how many of the models diverged."""
    diverged = len(select(rows, diverged=True))
    return spread([row["loss"] for row in rows]) + (f" ({diverged} of {len(rows)} diverged)" if diverged else "")


def finite_claim(rows: Sequence[Row]) -> Claim:
    """Claim that no model diverged."""
    diverged = len(select(rows, diverged=True))
    return Claim("no model's loss becomes NaN or infinite", not diverged, f"{diverged} of {len(rows)} do")
