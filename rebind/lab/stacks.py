"""Train stacks of retrieval models: on a CPU one after another, on a GPU many side by side.

A step of a stack is some sixty small kernels, so on a GPU it is bound by launching them. There the steps between two
evaluations are replays of one CUDA graph (lookup of the sequences, forward, backward, Adam), an evaluation is another,
the sequences of a round are drawn beforehand all at once, and each stack has a stream of its own: the host only starts
rounds and reads losses.

What a model finds depends on its recipe, its seed and the config, not on the stacks beside it. A model whose loss is no
longer finite ends there.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.lab.experiment import LabWarning
from rebind.lab.recorded import Place, Recorded
from rebind.lab.retrieval import SOLVED, Recipe, Sequences, Stack, Task, Training, latest

ALIVE = 24  # stacks that train at once on a GPU
ROOM = 0.3  # the part of a GPU's memory that must be free for one more

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    loss: float  # at the end, on sequences of the task's length; the last finite one of a model that diverged
    short: float  # the same on sequences of length S, as the public evaluation of setting 2 had them
    steps: int
    losses: list[float]  # at every evaluation
    diverged: bool = False  # ended because its loss was NaN or infinite; `short` is then `loss`


class Trainer:
    """A stack in training: `advance` starts the steps up to the next evaluation, `settle` reads it."""

    def __init__(
        self,
        recipe: Recipe,
        seeds: Sequence[int],
        config: Training,
        device: torch.device,
        place: Place | None = None,
    ) -> None:
        self.recipe, self.seeds, self.config, self.device, self.place = recipe, list(seeds), config, device, place
        self.ahead = 1 if place is None else config.every  # steps whose sequences are drawn at once
        self.taken = 0
        self.alive = list(self.seeds)
        self.losses: dict[int, list[float]] = {seed: [] for seed in seeds}
        self.ended: dict[int, Trained] = {}
        self.recordings: tuple[Recorded, Recorded] | None = None  # of a step and of an evaluation
        with self._there():
            self.stack = Stack(recipe, seeds, config, device)
            self.adam = self._adam()
            self.draws = {seed: torch.Generator(device=device).manual_seed(seed + 1) for seed in seeds}
            self.at = torch.zeros(1, dtype=torch.int64, device=device)  # which of the drawn lessons comes next
            self.lessons = torch.empty(0)
            self._prepare()
        self.done = torch.cuda.Event() if place is not None else None

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
            if self.recordings is None:
                for _ in range(count):
                    self._begin(self._drawn())
                    self._step()
                self._look()
            else:
                step, look = self.recordings
                self._begin(self._drawn())
                step.run(count)
                look.run()
            if self.done is not None:
                self.done.record()
        self.taken += count

    def settle(self) -> None:
        """Read the evaluation; models that are over leave the stack."""
        with self._there():
            now = self.now.tolist()
            for seed, value in zip(self.alive, now, strict=True):
                if math.isfinite(value):
                    self.losses[seed].append(value)
            leaving = [row for row, value in enumerate(now) if self._leaves(self.alive[row], value)]
            if leaving:
                short = self._short(now)
                for row in leaving:
                    self._end(self.alive[row], now[row], short[row])
                self._keep([row for row in range(len(self.alive)) if row not in leaving])

    def _leaves(self, seed: int, now: float) -> bool:
        return not math.isfinite(now) or self.taken >= self.config.steps or _over(self.losses[seed], self.config)

    def _end(self, seed: int, loss: float, short: float) -> None:
        losses = self.losses[seed]
        if math.isfinite(loss) and math.isfinite(short):
            self.ended[seed] = Trained(loss, short, self.taken, losses)
            return
        last = losses[-1] if losses else self._untrained(seed)
        self.ended[seed] = Trained(last, last, self.taken, losses, diverged=True)
        warnings.warn(
            f"the loss of {self.recipe}, seed {seed}, is not finite after {self.taken} steps, expected a number: its "
            f"row has the last that was, {last:.3g}, and says that it diverged; try a lower rate",
            LabWarning,
            stacklevel=2,
        )

    def _there(self) -> AbstractContextManager[object]:
        return nullcontext() if self.place is None else torch.cuda.stream(self.place.stream)

    def _prepare(self) -> None:
        """What the models now in the stack are tested with, and where; on a GPU, what will be recorded of them."""
        self.tests = self._tests(self.recipe.task, self.alive)
        self.now = torch.zeros(len(self.alive), device=self.device)  # their losses, perhaps still being computed
        if self.place is not None:
            make_room(self.device)
            self.recordings = Recorded(self._step, self.place), Recorded(self._look, self.place)

    def _begin(self, lessons: Tensor) -> None:
        """Put lessons where the steps look for them: for a recording, always the same place."""
        if self.lessons.shape != lessons.shape or self.recordings is None:
            self.lessons = lessons
        else:
            self.lessons.copy_(lessons)
        self.at.zero_()

    def _step(self) -> None:
        """One step of every model. Each draws its own sequences, so the gradient of the sum is that of each."""
        lessons = self.lessons.index_select(0, self.at).squeeze(0)
        losses = self.stack.loss(Sequences.of(lessons, self.recipe.task))
        mean = torch.full_like(losses, 1 / losses[0].numel())
        parameters = list(self.stack.parameters.values())
        slopes = torch.autograd.grad(losses, parameters, mean, allow_unused=True)
        for parameter, slope in zip(parameters, slopes, strict=True):
            # None for what the rule does not use (sums have no gates); fused Adam walks all memory in one order
            parameter.grad = None if slope is None else slope.contiguous()
        self.adam.step()
        self.at.add_(1)

    def _look(self) -> None:
        """Evaluate the models."""
        self.now.copy_(_evaluate(self.stack, self.tests))

    def _adam(self) -> torch.optim.Adam:
        parameters = list(self.stack.parameters.values())
        return torch.optim.Adam(parameters, lr=self.config.rate, fused=True, capturable=self.place is not None)

    def _drawn(self) -> Tensor:
        """Lessons of `ahead` steps: [ahead, models, batch, …]."""
        config = self.config
        every = self.recipe.task.lessons(self.ahead * config.batch, [self.draws[seed] for seed in self.alive])
        return every.unflatten(1, (self.ahead, config.batch)).transpose(0, 1).contiguous()

    def _tests(self, task: Task, seeds: Sequence[int]) -> tuple[Sequences, Tensor]:
        """Sequences whose every distinct key is asked for, the same at every evaluation of a seed; which keys are."""
        draws = [torch.Generator(device=self.device).manual_seed(10_000 + seed) for seed in seeds]
        keys, values = task.draw(self.config.tested, draws)
        asked = torch.arange(task.size, device=self.device).expand(len(seeds), self.config.tested, -1)
        present = (asked.unsqueeze(-1) == keys.unsqueeze(-2)).any(-1)
        return Sequences(keys, values, asked, latest(keys, values, asked)), present

    def _short(self, now: list[float]) -> list[float]:
        """The losses on sequences of length S."""
        task = self.recipe.task
        if task.length == task.size:
            return now
        return _evaluate(self.stack, self._tests(Task(task.size, task.size, task.replacement), self.alive)).tolist()

    def _untrained(self, seed: int) -> float:
        stack = Stack(self.recipe, [seed], self.config, self.device)
        return float(_evaluate(stack, self._tests(self.recipe.task, [seed])).nan_to_num())

    def _keep(self, rows: list[int]) -> None:
        """Only these models go on: as they are, in a smaller stack. Its step is recorded anew."""
        self.alive = [self.alive[row] for row in rows]
        for recorded in self.recordings or ():
            recorded.forget()
        self.recordings = None  # they hold on to this trainer, and it to them
        if not rows:
            return
        held = [self.adam.state.get(p) for p in self.stack.parameters.values()]
        self.stack.keep(rows)
        self.adam = self._adam()
        for parameter, state in zip(self.stack.parameters.values(), held, strict=True):
            if state:
                kept = {name: value if name == "step" else value[rows] for name, value in state.items()}
                self.adam.state[parameter] = kept
        self._prepare()


@torch.no_grad()
def _evaluate(stack: Stack, tests: tuple[Sequences, Tensor]) -> Tensor:
    """The mean loss of the keys that are there: [models]."""
    sequences, present = tests
    return (stack.loss(sequences) * present).sum((1, 2)) / present.sum((1, 2))


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
    gpu = device.type == "cuda"
    if gpu:
        waiting = deque(sorted(waiting, key=lambda job: -jobs[job][0].task.length))
    alive: dict[int, Trainer] = {}
    began: dict[int, float] = {}
    idle: list[Place] = []  # where stacks have been
    settled = True  # whether there may be room that was not there before
    while waiting or alive:
        while settled and waiting and len(alive) < (ALIVE if gpu else 1) and (not alive or make_room(device, idle)):
            job = waiting.popleft()
            began[job] = time.monotonic()
            place = (idle.pop() if idle else Place(device)) if gpu else None
            alive[job] = Trainer(*jobs[job], config, device, place)
            alive[job].advance()
        job, trainer = _next_ready(alive)
        trainer.settle()
        settled = trainer.over
        if not settled:
            trainer.advance()
            continue
        seconds = time.monotonic() - began[job]
        log.debug("%s: %d steps in %.1f s, %d beside it", trainer.recipe, trainer.taken, seconds, len(alive) - 1)
        found = trainer.trained
        if trainer.place is not None:
            idle.append(trainer.place)
        del alive[job], trainer  # its memory, before another begins
        yield job, found


def _next_ready(alive: dict[int, Trainer]) -> tuple[int, Trainer]:
    while True:
        for job, trainer in alive.items():
            if trainer.ready:
                alive[job] = alive.pop(job)  # to the end: the others come first next time
                return job, trainer
        time.sleep(1e-4)


def make_room(device: torch.device, idle: Sequence[Place] = ()) -> bool:
    """Whether there is memory for one more stack. What graphs leave behind is given back only when it is short."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    if free < ROOM * total:
        for place in idle:
            place.release()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
    return free >= ROOM * total
