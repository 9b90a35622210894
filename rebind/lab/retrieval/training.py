"""How the models of both retrieval experiments are trained, and what is recorded of each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.errors import NumericalWarning
from rebind.lab.experiment import Claim, Experiment, Point, Row
from rebind.lab.report import select, spread
from rebind.lab.retrieval.models import FEATURES, Reader, Sequences, Task
from rebind.lab.stacks import ModelStack

SOLVED = 1e-3  # the loss at which training ends
FIRST_TEST_SEED = 10_000  # tests are drawn with other random numbers than lessons


@dataclass(frozen=True)
class Retrieval(Experiment):
    """The settings that both experiments share."""

    key_width: int = 64
    rate: float = 1e-3
    batch: int = 32
    steps: int = 100_000  # at most
    every: int = 100  # steps between evaluations
    patience: int = 11  # evaluations without improvement before training ends
    tested: int = 20  # sequences per evaluation
    sizes: tuple[int, ...] = ()  # S
    features: tuple[str, ...] = tuple(FEATURES)

    def train(self, points: Sequence[Point], device: torch.device, *, replacement: bool) -> list[Row]:
        """Train one model per point until it is solved, stops improving or has used its steps.

        Models with the same feature map and rule train in one stack if no size is more than twice another.
        """
        stacks: dict[tuple[str, str, int], list[int]] = {}
        for index, point in enumerate(points):
            smallest = next(first for first in _group_starts(self.sizes) if point["size"] <= 2 * first)
            stacks.setdefault((point["feature"], point.get("rule", "sum"), smallest), []).append(index)
        trainings = {
            key: Training(self, [points[index] for index in stack], key[1], replacement, device)
            for key, stack in stacks.items()
        }
        while active := [training for training in trainings.values() if not training.finished]:
            for training in active:
                training.start_round()
            for training in active:
                training.finish_round()
        rows = {
            index: row
            for key, stack in stacks.items()
            for index, row in zip(stack, trainings[key].results(), strict=True)
        }
        return [rows[index] for index in range(len(points))]


def _group_starts(sizes: Sequence[int]) -> list[int]:
    """Return the smallest size of each group in which no size is more than twice another."""
    starts: list[int] = []
    for size in sizes:
        if not starts or size > 2 * starts[-1]:
            starts.append(size)
    return starts


class Training:
    """A stack of models in training. On a GPU it has a stream of its own, so that several stacks can share the GPU.

    Models that ended stay in the stack until an eighth of it has ended.
    """

    def __init__(
        self, settings: Retrieval, points: Sequence[Point], rule: str, replacement: bool, device: torch.device
    ) -> None:
        self.settings, self.points, self.replacement, self.device = settings, list(points), replacement, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.steps = 0
        self.members = list(range(len(points)))  # the points of the models in the stack
        self.losses: list[list[float]] = [[] for _ in points]
        self.rows: dict[int, Row] = {}
        with torch.cuda.stream(self.stream):
            self.reader = Reader(points[0]["feature"], rule, settings.key_width, device)
            models = [self.reader.initial_parameters(point["size"], point["seed"]) for point in points]
            self.stack = ModelStack(models, [settings.rate] * len(points), self.reader.loss, device)
            self.generators = self._generators(1)
            self.tests = self._draw_tests()
            self.evaluation = self._evaluate(self.tests)
            self.last: list[float] = self.evaluation.tolist()  # the last finite loss of each point

    @property
    def finished(self) -> bool:
        return len(self.rows) == len(self.points)

    def results(self) -> list[Row]:
        """Return the row of every point."""
        return [self.rows[point] for point in range(len(self.points))]

    def start_round(self) -> None:
        """Take the steps up to the next evaluation, and evaluate. On a GPU this does not wait for them."""
        count = min(self.settings.every, self.settings.steps - self.steps)
        with torch.cuda.stream(self.stream):
            self._take_steps(count)
            self.evaluation = self._evaluate(self.tests)
        self.steps += count

    def finish_round(self) -> None:
        """Read the evaluation, and record the models that end with it."""
        with torch.cuda.stream(self.stream):
            losses = dict(zip(self.members, self.evaluation.tolist(), strict=True))
            ended = [point for point, loss in losses.items() if point not in self.rows and self._ends(point, loss)]
            if not ended:
                return
            self._record(ended, losses)
            running = [row for row, point in enumerate(self.members) if point not in self.rows]
            if running and 8 * len(running) <= 7 * len(self.members):
                self.members = [self.members[row] for row in running]
                self.stack.keep(running)
                self.tests = self._draw_tests()

    def _take_steps(self, count: int) -> None:
        """Draw the lessons of all steps at once, then take the steps."""
        batch = self.settings.batch
        drawn = self._task().draw_lessons(count * batch, [self.generators[point] for point in self.members])
        parts = [part.unflatten(1, (count, batch)).transpose(0, 1) for part in drawn.as_lesson()]
        for lesson in zip(*parts, strict=True):
            self.stack.step(lesson)

    def _ends(self, point: int, loss: float) -> bool:
        """Add a loss to the history of a point, and return whether its training ends here."""
        if not math.isfinite(loss):
            return True
        self.last[point] = loss
        history = self.losses[point]
        history.append(loss)
        without_improvement = len(history) - 1 - history.index(min(history))
        used_up = self.steps >= self.settings.steps
        return loss <= SOLVED or without_improvement >= self.settings.patience or used_up

    def _record(self, ended: Sequence[int], losses: dict[int, float]) -> None:
        short: dict[int, float] = {}
        if self.replacement:  # the public evaluation of setting 2 used sequences of length S
            short = dict(zip(self.members, self._evaluate(self._draw_tests(short=True)).tolist(), strict=True))
        for point in ended:
            diverged, last = not math.isfinite(losses[point]), self.last[point]
            row: Row = {"loss": last, "steps": self.steps, "losses": self.losses[point], "diverged": diverged}
            if self.replacement:
                row["short"] = last if diverged else short[point]
            self.rows[point] = row
            if diverged:
                warnings.warn(
                    f"The loss of {self.points[point]} was not finite after {self.steps} steps. Its row has the last "
                    f"finite loss, {last:.3g}, and says that it diverged. Try a lower rate.",
                    NumericalWarning,
                    stacklevel=2,
                )

    def _task(self) -> Task:
        return Task([self.points[point]["size"] for point in self.members], self.replacement)

    def _generators(self, offset: int) -> list[torch.Generator]:
        """Return one generator per point, seeded by its seed."""
        return [torch.Generator(self.device).manual_seed(point["seed"] + offset) for point in self.points]

    def _draw_tests(self, *, short: bool = False) -> Sequences:
        """Draw tests, the same for a model every time, whichever models are left."""
        generators = self._generators(FIRST_TEST_SEED)
        return self._task().draw_tests(self.settings.tested, [generators[point] for point in self.members], short=short)

    @torch.no_grad()
    def _evaluate(self, tests: Sequences) -> Tensor:
        """Return the loss of every model in the stack."""
        return self.reader.loss(self.stack.parameters(), tests.as_lesson())


def describe_losses(rows: Sequence[Row]) -> str:
    """Format the losses over the seeds, and how many of the models diverged."""
    diverged = len(select(rows, diverged=True))
    return spread([row["loss"] for row in rows]) + (f" ({diverged} of {len(rows)} diverged)" if diverged else "")


def finite_claim(rows: Sequence[Row]) -> Claim:
    """Claim that no model diverged."""
    diverged = len(select(rows, diverged=True))
    return Claim("no model's loss becomes NaN or infinite", not diverged, f"{diverged} of {len(rows)} do")
