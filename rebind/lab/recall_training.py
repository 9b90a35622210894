"""Train stacks of `rebind.lab.recall`: every model's parameters are a row of one matrix, so Adam is a few lines.

On a GPU the steps on one size are replays of a CUDA graph, hundreds of kernels each, and their sequences are drawn for
all steps up to the next evaluation.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.lab.recall import Model, Questions, Recall, Stack, Task
from rebind.lab.recorded import Place, Recorded
from rebind.precision import tensor_float

SOLVED = 0.99  # the accuracy at which training ends


@dataclass(frozen=True)
class Trained:
    accuracies: list[float]  # one a tested size
    steps: int
    course: list[float]  # at every evaluation, on the hardest of the sizes no longer than those trained


def train(models: Sequence[Model], rule: str, width: int, config: Recall, device: torch.device) -> list[Trained]:
    """Train every model until it is right about all sizes no longer than those trained, or has had its steps."""
    tasks, tests = (
        [Task.parse(size, config.vocabulary) for size in sizes] for sizes in (config.trained, config.tested)
    )
    within = _within(tests, tasks)
    order = random.Random(0)
    ended: dict[Model, Trained] = {}
    course: dict[Model, list[float]] = {model: [] for model in models}
    with tensor_float(True), _at(device) as place:
        stack = Stack(models, rule, width, config, device)
        trainer, step = _Trainer(stack, place), 0
        while stack.models:
            count = min(config.every, config.steps - step)
            trainer.take([order.choice(tasks) for _ in range(count)])
            step += count
            now = evaluate(stack, within)
            for model, found in zip(stack.models, now, strict=True):
                course[model].append(found[-1])
            over = [row for row, found in enumerate(now) if step == config.steps or min(found) >= SOLVED]
            if over:
                final = evaluate(stack, tests)
                ended |= {stack.models[row]: Trained(final[row], step, course[stack.models[row]]) for row in over}
                trainer.keep([row for row in range(len(now)) if row not in over])
    return [ended[model] for model in models]


class _Trainer:
    """A stack in training. At a place, a step on each task is recorded there; its stream is the current one."""

    def __init__(self, stack: Stack, place: Place | None) -> None:
        self.stack, self.place = stack, place
        self.adam = _AdamW(stack)
        device = stack.theta.device
        self.draws = {model.seed: torch.Generator(device=device).manual_seed(model.seed + 1) for model in stack.models}
        self._begin()

    def take(self, tasks: Sequence[Task]) -> None:
        """A step on each of these."""
        if self.place is None:
            for task in tasks:
                self._draw(task, 1)
                self._step(task)
            return
        for task, count in Counter(tasks).items():
            self._draw(task, count)
            # Plain steps first: kernels are compiled, and compared with the reference, which waits for the device.
            self.recorded.setdefault(task, Recorded(partial(self._step, task), self.place, plain=2))
        for task in tasks:
            self.recorded[task].run()

    def keep(self, rows: Sequence[int]) -> None:
        """Only these models go on. Their steps are recorded anew."""
        for recorded in self.recorded.values():
            recorded.forget()
        self.stack.keep(rows)
        self.adam.keep(rows)
        self._begin()

    def _begin(self) -> None:
        self.recorded: dict[Task, Recorded] = {}
        self.lessons: dict[Task, tuple[Questions, Tensor]] = {}  # what was drawn, and which of it comes next
        self.seeds = list(dict.fromkeys(model.seed for model in self.stack.models))
        rows = [self.seeds.index(model.seed) for model in self.stack.models]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=self.stack.theta.device)

    def _draw(self, task: Task, steps: int) -> None:
        """Sequences [steps, seeds, B, …]: models of one seed learn from the same."""
        config, names = self.stack.config, [part.name for part in fields(Questions)]
        drawn = [task.draw(steps * config.batch, self.draws[seed]) for seed in self.seeds]
        parts = [torch.stack([getattr(one, name) for one in drawn]) for name in names]
        parts = [part.unflatten(1, (steps, config.batch)).transpose(0, 1) for part in parts]
        if task not in self.lessons:  # a recording finds them where they were the first time
            room = steps if self.place is None else config.every
            held = Questions(*(part.new_empty(room, *part.shape[1:]) for part in parts))
            self.lessons[task] = held, torch.zeros(1, dtype=torch.int64, device=self.rows.device)
        held, at = self.lessons[task]
        for name, part in zip(names, parts, strict=True):
            getattr(held, name)[:steps].copy_(part)
        at.zero_()

    def _step(self, task: Task) -> None:
        held, at = self.lessons[task]
        parts = (getattr(held, part.name).index_select(0, at).squeeze(0) for part in fields(Questions))
        self.adam.step(_gradient(self.stack, Questions(*(part.index_select(0, self.rows) for part in parts))))
        at.add_(1)


@contextmanager
def _at(device: torch.device) -> Iterator[Place | None]:
    """On a GPU, a place whose stream is the current one."""
    if device.type != "cuda":
        yield None
        return
    place = Place(device)
    with torch.cuda.stream(place.stream):
        yield place
    place.release()
    torch.cuda.empty_cache()


@torch.no_grad()
def evaluate(stack: Stack, tests: Sequence[Task]) -> list[list[float]]:
    """The share of right answers of each model to each test: the same sequences for all models, at every evaluation."""
    device, config = stack.theta.device, stack.config
    shares = []
    for number, test in enumerate(tests):
        generator = torch.Generator(device=device).manual_seed(10_000 + number)
        right = []
        for first in range(0, config.sequences, config.batch):
            count = min(config.batch, config.sequences - first)
            asked = _for_all(test.draw(count, generator), len(stack.models))
            right.append((stack.logits(asked).argmax(-1) == asked.answers).flatten(1).float())
        shares.append(torch.cat(right, dim=1).mean(1))
    found: list[list[float]] = torch.stack(shares, dim=1).tolist()
    return found


class _AdamW:
    """Adam with decay over a stack whose models may leave; a rate a model, and gradients no longer than 1.

    The number of the step is on the device, and what depends on it in a table, so that a step can be recorded.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack, device, steps = stack, stack.theta.device, stack.config.steps
        self.first, self.second = torch.zeros_like(stack.theta), torch.zeros_like(stack.theta)
        self.rates = torch.tensor([model.rate for model in stack.models], device=device).unsqueeze(-1)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        table = [
            (0.5 * (1 + math.cos(math.pi * (n - 1) / steps)), 1 - 0.9**n, 1 - 0.999**n) for n in range(1, steps + 1)
        ]
        self.table = torch.tensor(table, device=device)  # of each step: the rate's share, and two corrections

    def keep(self, rows: Sequence[int]) -> None:
        self.first, self.second, self.rates = (one[list(rows)] for one in (self.first, self.second, self.rates))

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        share, first, second = self.table.index_select(0, self.at).squeeze(0).unbind()
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)  # a model that diverged stays where it is, the others go on
        gradient = gradient / torch.linalg.vector_norm(gradient, dim=1, keepdim=True).clamp_min(1.0)
        rates = self.rates * share
        self.first.lerp_(gradient, 0.1)
        self.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        root = (self.second / second).sqrt_().add_(1e-8)
        theta = self.stack.theta
        theta.mul_(1 - rates * self.stack.config.decay).sub_(rates * (self.first / first) / root)
        self.at.add_(1)


def _gradient(stack: Stack, asked: Questions) -> Tensor:
    """Of each model's mean loss, [models, …]."""
    logits = stack.logits(asked)
    loss = functional.cross_entropy(logits.flatten(0, -2), asked.answers.flatten(), reduction="sum")
    return torch.autograd.grad(loss / asked.answers[0].numel(), stack.theta)[0]


def _within(tests: Sequence[Task], tasks: Sequence[Task]) -> list[Task]:
    """The tests no longer than what is trained, the one of most pairs last."""
    longest = max(task.length for task in tasks)
    within = [test for test in tests if test.length <= longest]
    if not within:
        raise InputError(
            f"tested sizes are all longer than {longest}, expected one that is not, the longest trained: add one"
        )
    return sorted(within, key=lambda test: test.pairs)


def _for_all(asked: Questions, models: int) -> Questions:
    return Questions(*(getattr(asked, part.name).expand(models, -1, -1) for part in fields(Questions)))
