"""Train many small models in parallel, as one stack.

Row i of every tensor belongs to model i and no operation mixes rows, so each model learns what it would learn alone,
but one kernel launch serves all of them. Models may differ in size: smaller parameters are padded with zeros, which
stay zero as long as the loss does not depend on them.

On a GPU a step is recorded as a CUDA graph and replayed, and every stack has a stream, so that several stacks can train
at the same time. Code that uses the tensors of a stack must run in `with torch.cuda.stream(stack.stream)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rebind.lab.experiment import Point
from rebind.storage import Row

Parameters: TypeAlias = dict[str, Tensor]  # [models, ...] each
Lesson: TypeAlias = tuple[Tensor, ...]  # what one step learns from: [models, ...] each

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam's β₁, β₂ and ε


class ModelStack:
    """Models of one architecture with their optimizer, Adam.

    Args:
        models: the initial parameters of each model.
        rates: the learning rate of each model.
        loss: computes the loss of each model, [models], from all parameters and a lesson.
        device: the device to train on.
        weight_decay: decoupled weight decay, as in AdamW.
        clip: clip gradients to norm 1, and set entries that are not finite to 0.
        cosine_steps: decay the rates to zero over this many steps, along a cosine; by default they are constant.
    """

    def __init__(
        self,
        models: Sequence[Mapping[str, Tensor]],
        rates: Sequence[float],
        loss: Callable[[Parameters, Lesson], Tensor],
        device: torch.device,
        *,
        weight_decay: float = 0.0,
        clip: bool = False,
        cosine_steps: int | None = None,
    ) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        padded = {name: stack_padded([model[name].detach() for model in models]) for name in models[0]}
        self._shapes = {name: tensor.shape[1:] for name, tensor in padded.items()}
        self.theta = torch.cat([tensor.flatten(1) for tensor in padded.values()], dim=1).to(device).requires_grad_()
        self._loss, self._weight_decay, self._clip, self._cosine_steps = loss, weight_decay, clip, cosine_steps
        self._rates = torch.tensor(rates, device=device).unsqueeze(1)
        with torch.cuda.stream(self.stream):
            self._mean, self._square = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
            self._count = torch.zeros((), device=device)  # of steps; on the device, so that a step can be recorded
        self._recordings: dict[tuple[torch.Size, ...], tuple[Lesson, torch.cuda.CUDAGraph]] = {}

    def __len__(self) -> int:
        return len(self.theta)

    def parameters(self) -> Parameters:
        """Return every parameter of all models, as views of one matrix."""
        parts = self.theta.split([math.prod(shape) for shape in self._shapes.values()], dim=1)
        return {name: part.unflatten(1, shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}

    def step(self, lesson: Lesson) -> None:
        """Take one step with every model. On a GPU, steps after the first with these shapes are replayed."""
        if self.stream is None:
            self._step(lesson)
            return
        shapes = tuple(tensor.shape for tensor in lesson)
        if shapes not in self._recordings:
            inputs = tuple(tensor.clone() for tensor in lesson)
            self._step(inputs)  # compiles kernels, which is not possible while recording
            graph = torch.cuda.CUDAGraph()
            # Graphs recorded on one stream share a workspace of cuBLAS, which stacks that train together must not.
            with torch.cuda.graph(graph, stream=self.stream):
                self._step(inputs)
            self._recordings[shapes] = inputs, graph
            return
        inputs, graph = self._recordings[shapes]
        for static, tensor in zip(inputs, lesson, strict=True):
            static.copy_(tensor)
        graph.replay()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these models."""
        self._recordings.clear()
        self.theta = self.theta.detach()[list(rows)].requires_grad_()
        self._mean, self._square, self._rates = (x[list(rows)] for x in (self._mean, self._square, self._rates))

    def _step(self, lesson: Lesson) -> None:
        losses = self._loss(self.parameters(), lesson)
        (gradient,) = torch.autograd.grad(losses.sum(), self.theta)
        with torch.no_grad():
            self._update(gradient)

    def _update(self, gradient: Tensor) -> None:
        if self._clip:
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            gradient = gradient / torch.linalg.vector_norm(gradient, dim=1, keepdim=True).clamp_min(1.0)
        rates = self._rates
        if self._cosine_steps is not None:
            rates = rates * (0.5 + 0.5 * torch.cos(self._count * (math.pi / self._cosine_steps)))
        self._count += 1
        self._mean.lerp_(gradient, 1 - BETA_1)
        self._square.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
        mean_bias, square_bias = (-torch.expm1(self._count * math.log(beta)) for beta in (BETA_1, BETA_2))
        root = (self._square / square_bias).sqrt_().add_(EPSILON)
        if self._weight_decay:
            self.theta.mul_(1 - rates * self._weight_decay)
        self.theta.sub_(self._mean.div(root).mul_(rates / mean_bias))


class StackTraining(ABC):
    """Models that train in one stack, one per point, until each of them ends.

    Args:
        stack: the models.
        points: the point of each model, by index.
        steps: the maximum number of steps of a model.
        every: steps between evaluations.
    """

    def __init__(self, stack: ModelStack, points: Mapping[int, Point], *, steps: int, every: int) -> None:
        self.stack, self.points, self.most_steps, self.every = stack, points, steps, every
        self.members = list(points)  # indices of the points whose models are still in the stack
        self.history: dict[int, list[float]] = {index: [] for index in points}  # a score per evaluation
        self.steps = 0
        self._scores = torch.empty(0)

    @abstractmethod
    def draw_lessons(self, count: int) -> Iterable[Lesson]:
        """Draw the lessons of the members for this many steps."""

    @abstractmethod
    def evaluate(self) -> Tensor:
        """Return the score or scores of every member: [models, ...]."""

    @abstractmethod
    def ended(self, scores: dict[int, Any]) -> dict[int, Row]:
        """Return the rows of the members whose training ends with these scores."""

    def start_round(self) -> None:
        """Take the steps up to the next evaluation, and evaluate. On a GPU this does not wait for them."""
        count = min(self.every, self.most_steps - self.steps)
        with torch.cuda.stream(self.stack.stream):
            for lesson in self.draw_lessons(count):
                self.stack.step(lesson)
            self._scores = self.evaluate()
        self.steps += count

    def finish_round(self) -> dict[int, Row]:
        """Read the evaluation, remove the models whose training ends, and return their rows."""
        with torch.cuda.stream(self.stack.stream):
            rows = self.ended(dict(zip(self.members, self._scores.tolist(), strict=True)))
            if rows:
                running = [row for row, index in enumerate(self.members) if index not in rows]
                self.members = [self.members[row] for row in running]
                self.stack.keep(running)
        return rows


def train_all(trainings: Iterable[StackTraining]) -> list[Row]:
    """Train stacks in turn, or on a GPU at the same time, and return the rows in the order of their indices."""
    rows: dict[int, Row] = {}
    while trainings := [training for training in trainings if training.members]:
        for training in trainings:
            training.start_round()
        for training in trainings:
            rows |= training.finish_round()
    return [rows[index] for index in sorted(rows)]


def stack_padded(tensors: Sequence[Tensor], value: float = 0.0) -> Tensor:
    """Stack tensors of different sizes, each padded at its ends to the largest: [models, ...]."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    stacked = tensors[0].new_full((len(tensors), *shape), value)
    for row, tensor in zip(stacked, tensors, strict=True):
        row[tuple(map(slice, tensor.shape))] = tensor
    return stacked
