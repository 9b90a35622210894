"""How models of multi-query recall are trained."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rebind.lab.experiment import Point
from rebind.lab.mqar.models import Recaller, RecallerStack
from rebind.lab.mqar.task import SOFTMAX, Recall
from rebind.lab.stacks import Lesson, ModelStack, StackTraining, train_all
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.fast_weight import FastWeight
from rebind.precision import tensor_float
from rebind.storage import Row

SOLVED = 0.99  # the accuracy at which training ends
FIRST_TEST_SEED = 10_000  # tests are drawn with other random numbers than lessons


def train(settings: Recall, points: Sequence[Point], device: torch.device) -> list[Row]:
    """Train one model per point; they share a rule and a width."""
    rule, width = points[0]["rule"], points[0]["width"]
    with tensor_float(True):
        rows = train_all([RecallTraining(settings, dict(enumerate(points)), device)])
    parameters = sum(parameter.numel() for parameter in new_recaller(settings, rule, width).parameters())
    return [{"state": state_size(settings, rule, width), "parameters": parameters, **row} for row in rows]


def new_recaller(settings: Recall, rule: str, width: int, seed: int = 0) -> Recaller:
    """Return an untrained model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recaller(settings, rule, width)


def state_size(settings: Recall, rule: str, width: int) -> int:
    """Return how many numbers a layer carries from token to token; for attention at the longest tested sequence."""
    if rule == SOFTMAX:
        longest = max(task.length for task in settings.tasks(settings.tested))
        return longest * Attention(width, settings.heads, rotary=None).state_size
    return FastWeight(width, settings.heads, rule=rule, conv_size=settings.conv).state_size


class RecallTraining(StackTraining):
    """A stack of models with one rule and width. A model ends when it masters all sizes up to the trained length."""

    def __init__(self, settings: Recall, points: dict[int, Point], device: torch.device) -> None:
        rule, width = points[0]["rule"], points[0]["width"]
        self.settings, self.device = settings, device
        self.models = RecallerStack(settings, rule)
        recallers = [new_recaller(settings, rule, width, point["seed"]) for point in points.values()]
        stack = ModelStack(
            [dict(recaller.named_parameters()) for recaller in recallers],
            [point["rate"] for point in points.values()],
            self.models.loss,
            device,
            weight_decay=settings.decay,
            clip=True,
            cosine_steps=settings.steps,
        )
        super().__init__(stack, points, steps=settings.steps, every=settings.every)
        self.tasks, self.tests = settings.tasks(settings.trained), settings.tasks(settings.tested)
        longest = max(task.length for task in self.tasks)
        self.within = [number for number, test in enumerate(self.tests) if test.length <= longest]
        self.order = random.Random(0)  # of the tasks
        self.generators = {seed: torch.Generator(device).manual_seed(seed + 1) for seed in range(settings.seeds)}

    def draw_lessons(self, count: int) -> Iterator[Lesson]:
        """Draw the lesson of each step: models with the same seed learn from the same sequences."""
        for _ in range(count):
            task = self.order.choice(self.tasks)
            drawn = {seed: task.draw(self.settings.batch, generator) for seed, generator in self.generators.items()}
            lessons = [drawn[self.points[index]["seed"]] for index in self.members]
            yield tuple(torch.stack(parts) for parts in zip(*lessons, strict=True))

    @torch.no_grad()
    def evaluate(self, *, longer: bool = False) -> Tensor:
        """Return each model's share of right answers [models, tests] up to the trained length, or to all tests."""
        shares = []
        for number in range(len(self.tests)) if longer else self.within:
            test = self.tests[number]
            generator = torch.Generator(self.device).manual_seed(FIRST_TEST_SEED + number)  # the same every time
            right = []
            for first in range(0, self.settings.sequences, self.settings.batch):
                drawn = test.draw(min(self.settings.batch, self.settings.sequences - first), generator)
                tokens, places, answers = (part.expand(len(self.stack), -1, -1) for part in drawn)
                right.append(self.models.logits(self.stack.parameters(), tokens, places).argmax(-1) == answers)
            shares.append(torch.cat(right, dim=1).float().mean((1, 2)))
        return torch.stack(shares, dim=1)

    def ended(self, scores: dict[int, Any]) -> dict[int, Row]:
        for index, accuracies in scores.items():
            self.history[index].append(accuracies[self.within.index(self.settings.hardest())])
        used_up = self.steps >= self.settings.steps
        ended = [index for index, accuracies in scores.items() if used_up or min(accuracies) >= SOLVED]
        if not ended:
            return {}
        final = dict(zip(self.members, self.evaluate(longer=True).tolist(), strict=True))
        return {
            index: {"accuracies": final[index], "steps": self.steps, "course": self.history[index]} for index in ended
        }
