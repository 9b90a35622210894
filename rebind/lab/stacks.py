"""Many small models trained side by side, as one stack.

Row i of every tensor belongs to model i and no operation mixes rows, so each model learns what it would learn alone,
while one kernel launch serves all of them. Models may differ in size: smaller parameters are padded with zeros, which
stay zero as long as the loss does not depend on them. On a GPU a step is recorded as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from rebind.cuda_graphs import record_graph

Parameters: TypeAlias = dict[str, Tensor]  # [models, ...] each
Lesson: TypeAlias = tuple[Tensor, ...]  # what one step learns from: [models, ...] each

MEAN, SQUARE, SMALL = 0.9, 0.999, 1e-8  # Adam's β₁, β₂ and ε


class ModelStack:
    """Models of one architecture with their optimizer, Adam.

    Args:
        models: the initial parameters of each model.
        rates: the learning rate of each model.
        loss: computes the loss of each model, [models], from all parameters and a lesson.
        device: where the models train.
        weight_decay: decoupled, as in AdamW.
        clip: shorten gradients to length 1, and skip those that are not finite.
        cosine_steps: let the rates fall to zero over this many steps, as a cosine. None: constant rates.
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
        padded = {name: stack_padded([model[name].detach() for model in models]) for name in models[0]}
        self._shapes = {name: tensor.shape[1:] for name, tensor in padded.items()}
        self.theta = torch.cat([tensor.flatten(1) for tensor in padded.values()], dim=1).to(device).requires_grad_()
        self._loss, self._weight_decay, self._clip, self._cosine_steps = loss, weight_decay, clip, cosine_steps
        self._rates = torch.tensor(rates, device=device).unsqueeze(1)
        self._mean, self._square = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self._count = torch.zeros((), device=device)  # steps so far; on the device, so that a step can be recorded
        self._recordings: dict[tuple[torch.Size, ...], tuple[Lesson, Callable[[], object]]] = {}

    def __len__(self) -> int:
        return len(self.theta)

    def parameters(self) -> Parameters:
        """Return every parameter of all models, as views of one matrix."""
        parts = self.theta.split([math.prod(shape) for shape in self._shapes.values()], dim=1)
        return {name: part.unflatten(1, shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}

    def step(self, lesson: Lesson) -> None:
        """Take one step with every model. On a GPU the second step with these shapes and all later ones are replays."""
        if not self.theta.is_cuda:
            self._step(lesson)
            return
        shapes = tuple(tensor.shape for tensor in lesson)
        if shapes not in self._recordings:
            inputs = tuple(tensor.clone() for tensor in lesson)
            # Before it records anything, this takes the step: kernels must be compiled by then.
            self._recordings[shapes] = inputs, record_graph(lambda: self._step(inputs))
            return
        inputs, replay = self._recordings[shapes]
        for static, tensor in zip(inputs, lesson, strict=True):
            static.copy_(tensor)
        replay()

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these models alone."""
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
        self._mean.lerp_(gradient, 1 - MEAN)
        self._square.mul_(SQUARE).addcmul_(gradient, gradient, value=1 - SQUARE)
        mean_bias, square_bias = (-torch.expm1(self._count * math.log(beta)) for beta in (MEAN, SQUARE))
        root = (self._square / square_bias).sqrt_().add_(SMALL)
        if self._weight_decay:
            self.theta.mul_(1 - rates * self._weight_decay)
        self.theta.sub_(self._mean.div(root).mul_(rates / mean_bias))


def stack_padded(tensors: Sequence[Tensor], value: float = 0.0) -> Tensor:
    """Stack tensors of different sizes, each padded at its ends to the largest: [models, ...]."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    stacked = tensors[0].new_full((len(tensors), *shape), value)
    for row, tensor in zip(stacked, tensors, strict=True):
        row[tuple(map(slice, tensor.shape))] = tensor
    return stacked
