"""Train stacks of retrieval models: on a CPU one after another, on a GPU many side by side.

A step of a stack is a hundred small kernels, so on a GPU it is bound by launching them. There the steps between two
evaluations are replays of one CUDA graph (lookup of the sequences, forward, backward, Adam), their sequences are drawn
beforehand all at once, and each stack has a stream of its own: the host only starts rounds and reads losses.

What a model finds depends on its recipe, its seed and the config, not on the stacks beside it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.lab.retrieval import SOLVED, Recipe, Sequences, Stack, Task, Training, latest

ALIVE = 24  # stacks that train at once on a GPU
ROOM = 0.3  # the part of a GPU's memory that must be free for one more

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    loss: float  # at the end, on sequences of the task's length
    short: float  # the same on sequences of length S, as the public evaluation of setting 2 had them
    steps: int
    losses: list[float]  # at every evaluation


class Trainer:
    """A stack in training: `advance` starts the steps up to the next evaluation, `settle` reads it."""

    def __init__(
        self,
        recipe: Recipe,
        seeds: Sequence[int],
        config: Training,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.recipe, self.seeds, self.config, self.device, self.stream = recipe, list(seeds), config, device, stream
        self.ahead = 1 if stream is None else config.every  # steps whose sequences are drawn at once
        self.taken = 0
        self.alive = list(self.seeds)
        self.losses: dict[int, list[float]] = {seed: [] for seed in seeds}
        self.ended: dict[int, Trained] = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        with self._there():
            self.stack = Stack(recipe, seeds, config, device)
            self.adam = self._adam()
            self.draws = {seed: torch.Generator(device=device).manual_seed(seed + 1) for seed in seeds}
            self.at = torch.zeros(1, dtype=torch.int64, device=device)  # which of the drawn lessons comes next
            self.lessons = torch.empty(0)
            self.tests = self._tests(recipe.task)
        self.now: Tensor | None = None  # losses of those alive, perhaps still being computed
        self.done = torch.cuda.Event() if stream is not None else None

    @property
    def over(self) -> bool:
        return not self.alive

    @property
    def trained(self) -> list[Trained]:
        return [self.ended[seed] for seed in self.seeds]

    @property
    def ready(self) -> bool:
        """Whether `settle` would not wait."""
        return self.done is None or self.done.query()

    def advance(self) -> None:
        """Start the steps up to the next evaluation, and it. On a GPU this does not wait for them."""
        count = min(self.config.every, self.config.steps - self.taken)
        with self._there():
            if self.stream is None:
                for _ in range(count):
                    self._begin(self._drawn())
                    self._step()
            else:
                self._begin(self._drawn())
                self._replay(count)
            self.now = self._evaluate(self.tests)
            if self.done is not None:
                self.done.record()
        self.taken += count

    def settle(self) -> None:
        """Read the evaluation; models that are over leave the stack."""
        assert self.now is not None
        with self._there():
            now = self.now.tolist()
            for seed, value in zip(self.alive, now, strict=True):
                self.losses[seed].append(value)
            last = self.taken >= self.config.steps
            leaving = [row for row, seed in enumerate(self.alive) if last or _over(self.losses[seed], self.config)]
            if leaving:
                short = self._short(now)
                for row in leaving:
                    seed = self.alive[row]
                    self.ended[seed] = Trained(now[row], short[row], self.taken, self.losses[seed])
                self._keep([row for row in range(len(self.alive)) if row not in leaving])

    def _there(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _begin(self, lessons: Tensor) -> None:
        """Put lessons where the steps look for them: where a graph was recorded, in the same place."""
        if self.graph is None:
            self.lessons = lessons
        else:
            self.lessons.copy_(lessons)
        self.at.zero_()

    def _replay(self, count: int) -> None:
        """The steps on a GPU. The first of a stack is run as it is: it sets up what a graph must find in place."""
        if self.graph is None:
            self._step()
            count -= 1
            if not count:
                return
            make_room(self.device)
            graph = torch.cuda.CUDAGraph()
            # torch.cuda.graph() would wait for the device and collect garbage first, with every other stack idle
            graph.capture_begin()
            try:
                self._step()
            finally:
                graph.capture_end()
            self.graph = graph
        for _ in range(count):
            self.graph.replay()

    def _step(self) -> None:
        """One step of every model. Each draws its own sequences, so the gradient of the sum is that of each."""
        lessons = self.lessons.index_select(0, self.at).squeeze(0)
        loss = self.stack.loss(Sequences.of(lessons, self.recipe.task)).mean((1, 2)).sum()
        parameters = list(self.stack.parameters.values())
        for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            # None for what the rule does not use (sums have no gates); fused Adam walks all memory in one order
            parameter.grad = None if slope is None else slope.contiguous()
        self.adam.step()
        self.at.add_(1)

    def _adam(self) -> torch.optim.Adam:
        parameters = list(self.stack.parameters.values())
        return torch.optim.Adam(parameters, lr=self.config.rate, fused=True, capturable=self.stream is not None)

    def _drawn(self) -> Tensor:
        """Lessons of `ahead` steps: [ahead, models, batch, …]."""
        config = self.config
        every = [self.recipe.task.lessons(self.ahead * config.batch, self.draws[seed]) for seed in self.alive]
        return torch.stack(every).unflatten(1, (self.ahead, config.batch)).transpose(0, 1).contiguous()

    def _tests(self, task: Task) -> tuple[Sequences, Tensor]:
        """Sequences whose every distinct key is asked for, the same at every evaluation of a seed; which keys are."""
        drawn = []
        for seed in self.alive:
            keys, values = task.draw(self.config.tested, torch.Generator(device=self.device).manual_seed(10_000 + seed))
            asked = torch.arange(task.size, device=self.device).expand(self.config.tested, -1)
            present = (asked.unsqueeze(-1) == keys.unsqueeze(-2)).any(-1)
            drawn.append((keys, values, asked, latest(keys, values, asked), present))
        keys, values, asked, wanted, present = (torch.stack(part) for part in zip(*drawn, strict=True))
        return Sequences(keys, values, asked, wanted), present

    @torch.no_grad()
    def _evaluate(self, tests: tuple[Sequences, Tensor]) -> Tensor:
        """The mean loss of the keys that are there: [models]."""
        sequences, present = tests
        return (self.stack.loss(sequences) * present).sum((1, 2)) / present.sum((1, 2))

    def _short(self, now: list[float]) -> list[float]:
        """The losses on sequences of length S."""
        task = self.recipe.task
        if task.length == task.size:
            return now
        return self._evaluate(self._tests(Task(task.size, task.size, task.replacement))).tolist()

    def _keep(self, rows: list[int]) -> None:
        """Only these models go on: as they are, in a smaller stack. Its step is recorded anew."""
        self.alive = [self.alive[row] for row in rows]
        if self.graph is not None:
            self.graph.reset()
            self.graph = None
        if not rows:
            return
        held = [self.adam.state.get(p) for p in self.stack.parameters.values()]
        self.stack.keep(rows)
        self.adam = self._adam()
        for parameter, state in zip(self.stack.parameters.values(), held, strict=True):
            if state:
                kept = {name: value if name == "step" else value[rows] for name, value in state.items()}
                self.adam.state[parameter] = kept
        self.tests = self._tests(self.recipe.task)


def _over(losses: Sequence[float], config: Training) -> bool:
    best = min(range(len(losses)), key=lambda index: losses[index])
    return losses[-1] <= SOLVED or len(losses) - 1 - best >= config.patience


def train(recipe: Recipe, seeds: Sequence[int], config: Training, device: torch.device) -> list[Trained]:
    """Train a model a seed until it is solved, no longer improves or has had its steps."""
    return next(train_all([(recipe, seeds)], config, device))[1]


def train_all(
    jobs: Sequence[tuple[Recipe, Sequence[int]]], config: Training, device: torch.device
) -> Iterator[tuple[int, list[Trained]]]:
    """Train every stack; each comes, with its number, when it is over. A GPU takes the long ones first."""
    waiting = deque(range(len(jobs)))
    streams: list[torch.cuda.Stream | None] = [None]
    if device.type == "cuda":
        waiting = deque(sorted(waiting, key=lambda job: -jobs[job][0].task.length))
        streams = [torch.cuda.Stream(device) for _ in range(min(ALIVE, len(jobs)))]
    alive: dict[int, Trainer] = {}
    began: dict[int, float] = {}
    settled = True  # whether there may be room that was not there before
    while waiting or alive:
        while settled and waiting and streams and (not alive or make_room(device)):
            job = waiting.popleft()
            began[job] = time.monotonic()
            alive[job] = Trainer(*jobs[job], config, device, streams.pop())
            alive[job].advance()
        job, trainer = _next_ready(alive)
        trainer.settle()
        settled = trainer.over
        if not settled:
            trainer.advance()
            continue
        seconds = time.monotonic() - began[job]
        log.debug("%s: %d steps in %.1f s, %d beside it", trainer.recipe, trainer.taken, seconds, len(alive) - 1)
        streams.append(alive.pop(job).stream)
        yield job, trainer.trained


def _next_ready(alive: dict[int, Trainer]) -> tuple[int, Trainer]:
    while True:
        for job, trainer in alive.items():
            if trainer.ready:
                alive[job] = alive.pop(job)  # to the end: the others come first next time
                return job, trainer
        time.sleep(1e-4)


def make_room(device: torch.device) -> bool:
    """Whether there is memory for one more stack. What graphs leave behind is given back only when asked for."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    if free < ROOM * total:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
    return free >= ROOM * total
