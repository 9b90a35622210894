"""A training step as a CUDA graph: many a model takes longer to launch than to compute."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rebind.cuda_graphs import captured, or_none
from rebind.errors import CudaGraphWarning

SPARE = 4  # a fourth of a GPU's memory is left to whatever else a run does
WARM = 3  # steps that run before one is recorded: kernels are compiled and checked, workspaces made


class RecordedStep:
    """The loss of a batch, its gradients, and their norm, clipped, in one replay.

    Gradients lie where they did when the step was recorded: they are written over, and must not be set to None.
    """

    def __init__(
        self,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        parameters: Sequence[Tensor],
        clip: float,
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        """`loss_of(inputs, targets)` has run before, and no parameter has a gradient."""
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._graph = torch.cuda.CUDAGraph()
        with captured(self._graph):
            loss = loss_of(self._inputs, self._targets)
            with torch.autograd.set_multithreading_enabled(False):  # another thread would set up cuBLAS here
                loss.backward()
            self._norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
            self._loss = loss.detach()

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the norm before clipping; the parameters' gradients are those of this batch."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._loss.clone(), self._norm.clone()


def record(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: Sequence[Tensor],
    clip: float,
    inputs: Tensor,
    targets: Tensor,
    *,
    asked: bool,
) -> RecordedStep | None:
    """A recorded step, or None, with a warning, where the model does something that a graph does not hold.

    Where nobody `asked` for it, None too where memory is short: a recording holds on to all that a step needs, also
    while there is none.
    """
    made = None
    try:
        made = or_none(lambda: RecordedStep(loss_of, parameters, clip, inputs, targets), "a training step")
        short = made is not None and not asked and _short_of_memory()
    except torch.OutOfMemoryError:
        if asked:
            raise
        short = True
    if short:
        made = None
        torch.cuda.empty_cache()
        warnings.warn(
            "steps are not recorded as a CUDA graph: too little memory would be left; smaller batches may be faster",
            CudaGraphWarning,
            stacklevel=2,
        )
    if made is None:
        for parameter in parameters:
            parameter.grad = None
    return made


def _short_of_memory() -> bool:
    free, everything = torch.cuda.mem_get_info()
    return free * SPARE < everything
