"""One training step: loss, gradient and update, over the pieces of a batch and all processes.

There is a single process, or those that `torchrun` started, each with a copy or a shard of the model. accelerate joins
them. torch shards the model, because accelerate does so on GPUs only.

On a GPU, launching the kernels of a small model takes longer than running them. There a step is recorded as a CUDA
graph and replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from rebind.cuda_graphs import capture_graph
from rebind.errors import CudaGraphWarning
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindForCausalLM
from rebind.nn.training.config import OptimizerConfig, TrainConfig
from rebind.nn.training.data import TokenBatch
from rebind.ops.sequence_parallel import SequenceSplit, split_sequence

STEPS_BEFORE_RECORDING = 3  # they compile kernels and allocate workspaces
SPARE_MEMORY = 0.25  # fraction of a GPU that a graph leaves free for everything else, unless it was requested

LossFunction = Callable[[Tensor, Tensor], Tensor]
Measured = tuple[Tensor, Tensor]  # the loss of a batch, and the norm of its gradient before clipping


def split_over(processes: PartialState, count: int) -> SequenceSplit | None:
    """Return how `count` neighboring processes share a sequence; None if each has its own."""
    if count == 1:
        return None
    group, _ = torch.distributed.new_subgroups(group_size=count)
    return SequenceSplit.of(group)


def shard(model: RebindForCausalLM, processes: int, device: torch.device) -> None:
    """Split a model that is the same in every process (FSDP2): block by block, then the embedding and the norm.

    A model on the CPU moves to the devices shard by shard, so that no device ever holds all of it.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # we change no views
    mesh = init_device_mesh(device.type, (processes,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class TrainingStep:
    """Steps of one optimizer on one model, each on this process's rows of a batch."""

    def __init__(
        self, config: TrainConfig, processes: PartialState, model: RebindForCausalLM, optimizer: torch.optim.Optimizer
    ) -> None:
        self.config, self.processes, self.model, self.optimizer = config, processes, model, optimizer
        self.device = model.device
        self.groups = config.sequences_at_once(processes.num_processes)
        self.rows = config.rows_per_piece(self.groups)
        self.split = split_over(processes, config.context_parallel)
        self.uses_copies = processes.num_processes > 1 and not config.sharded
        self.wrapped: Any = DistributedDataParallel(model) if self.uses_copies else model
        if config.compile:
            self.wrapped = torch.compile(self.wrapped)
        self.is_narrow = config.precision == "bfloat16" or (config.precision == "auto" and self.device.type == "cuda")
        self.is_recorded = config.should_record(processes.num_processes, model.num_parameters())
        self.steps_to_recording = STEPS_BEFORE_RECORDING if self.is_recorded else -1
        self.recording: RecordedStep | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision that the model runs in. A graph must not reuse bfloat16 copies of old weights."""
        reuses_copies = not self.is_recorded
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_narrow, cache_enabled=reuses_copies)

    def run(self, learning_rate: float, batch: TokenBatch, caches: Sequence[RebindCache]) -> Measured:
        """Take one step, without waiting for a GPU to finish it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.steps_to_recording == 0:
            self.recording = self._record(batch)
        self.steps_to_recording -= 1
        if self.recording is None:
            return self._run_pieces(batch, caches)
        measured = self.recording(*self._to_device(batch))
        self.optimizer.step()
        return measured

    def _record(self, batch: TokenBatch) -> RecordedStep | None:
        """Return a recorded step; None, with a warning, if the model does something that a graph cannot hold.

        A graph keeps all memory that a step needs, so it is also given up if that leaves less than `SPARE_MEMORY`.
        """
        parameters = list(self.model.parameters())
        recording: RecordedStep | None = None
        try:
            clip_norm = self.config.optimizer.clip_norm
            recording = RecordedStep(self._loss, parameters, clip_norm, *self._to_device(batch))
            free, total = torch.cuda.mem_get_info()
            if self.config.record or free >= SPARE_MEMORY * total:
                return recording
            reason = f"only {free / total:.0%} of the GPU's memory would be left"
        except RuntimeError as problem:  # torch.OutOfMemoryError, too
            reason = str(problem).splitlines()[0]
        recording = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for parameter in parameters:
            parameter.grad = None
        message = f"Training steps are not recorded as a CUDA graph and may be slower: {reason}"
        warnings.warn(message, CudaGraphWarning, stacklevel=3)
        return None

    def _run_pieces(self, batch: TokenBatch, caches: Sequence[RebindCache]) -> Measured:
        pieces, processes = self.config.accumulate, self.processes
        total = torch.zeros((), device=self.device)
        for piece in range(pieces):
            group = processes.process_index // self.config.context_parallel
            first = (piece * self.groups + group) * self.rows
            waits = self.uses_copies and piece < pieces - 1  # copies average their gradients once per batch
            with self.wrapped.no_sync() if waits else nullcontext(), split_sequence(self.split):
                inputs, targets = self._to_device(batch, slice(first, first + self.rows))
                loss = self._loss(inputs, targets, caches[piece] if self.config.carry else None)
                # Python operators are several times slower in autograd's thread for the GPU than in this one.
                with torch.autograd.set_multithreading_enabled(processes.num_processes > 1):
                    (loss / pieces).backward()
            total += loss.detach() / pieces
        norm = clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm).detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _loss(self, inputs: Tensor, targets: Tensor, cache: RebindCache | None = None) -> Tensor:
        """Return the mean loss of a piece; a cache continues after it, detached."""
        with self.autocast():
            carried = {"past_key_values": cache, "use_cache": cache is not None}
            output = self.wrapped(input_ids=inputs, shift_labels=targets, return_logits=False, **carried)
        if cache is not None:
            cache.detach()
        return cast(Tensor, output.loss)

    def _to_device(self, batch: TokenBatch, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return some rows, or this process's segments of them, on the device.

        Pinned memory lets the host go on while a GPU copies them.
        """
        inputs, targets = batch.inputs[rows], batch.targets[rows]
        if self.split is not None:
            inputs, targets = (x.chunk(self.split.count, dim=1)[self.split.rank] for x in (inputs, targets))
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


def build_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.AdamW:
    """Return AdamW for all parameters, fused on a GPU; only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    betas, fused = (config.beta1, config.beta2), parameters[0].device.type == "cuda" or None
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=fused)


class RecordedStep:
    """The loss of a batch, its gradient, clipped, and the norm of that, in one replay of a CUDA graph.

    Every replay overwrites the gradients of the parameters, which must not be set to None.
    """

    def __init__(
        self, loss_of: LossFunction, parameters: Sequence[Tensor], clip_norm: float, inputs: Tensor, targets: Tensor
    ) -> None:
        """Record `loss_of(inputs, targets)`, which has run before, for parameters without gradients."""
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._graph = torch.cuda.CUDAGraph()
        with capture_graph(self._graph):
            loss = loss_of(self._inputs, self._targets)
            with torch.autograd.set_multithreading_enabled(False):  # another thread would set up cuBLAS here
                loss.backward()
            self._norm = clip_grad_norm_(parameters, clip_norm)
            self._loss = loss.detach()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._loss.clone(), self._norm.clone()
