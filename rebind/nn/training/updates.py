"""One update of a model: a batch's loss, gradients over its pieces and processes, AdamW; recorded where that pays."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindForCausalLM
from rebind.nn.training import sharding
from rebind.nn.training.config import TrainConfig
from rebind.nn.training.data import Batch
from rebind.nn.training.processes import Processes
from rebind.nn.training.recorded import WARM, RecordedStep, record

LARGEST = 400_000_000  # parameters up to which steps are recorded unasked: so far it was measured to be faster


class Updates:
    """Updates of one model by one optimizer, in this process's share of every batch."""

    def __init__(
        self,
        config: TrainConfig,
        group: Processes,
        model: RebindForCausalLM,
        optimizer: torch.optim.Optimizer,
        rows: int,
    ) -> None:
        """`rows`: of a piece of a batch, in each process."""
        self.config, self.group, self.model, self.optimizer, self.rows = config, group, model, optimizer, rows
        self.ran = self._wrapped()
        self.wide = config.precision == "float32" or (config.precision == "auto" and group.device.type != "cuda")
        self.recorded: RecordedStep | None = None
        self.records = self._records()
        self.records_in = WARM if self.records else -1  # updates from now; never, if negative

    def autocast(self) -> AbstractContextManager[Any]:
        kept = not self.records  # narrow weights that a graph would find stale
        return torch.autocast(self.group.device.type, dtype=torch.bfloat16, enabled=not self.wide, cache_enabled=kept)

    def make(self, rate: float, batch: Batch, caches: list[RebindCache]) -> tuple[Tensor, Tensor]:
        """One update; the loss before it and the norm of its gradients, not looked at."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.recorded is None and self.records_in == 0:
            clip = self.config.optimizer.clip
            parameters, asked = list(self.model.parameters()), self.config.record is True
            self.recorded = record(self._whole_loss, parameters, clip, *self._moved(batch), asked=asked)
        self.records_in -= 1
        if self.recorded is not None:
            found = self.recorded(*self._moved(batch))
            self.optimizer.step()
            return found
        return self._made(batch, caches)

    def _made(self, batch: Batch, caches: list[RebindCache]) -> tuple[Tensor, Tensor]:
        config, group = self.config, self.group
        total = torch.zeros((), device=group.device)
        for piece in range(config.accumulate):
            first = (piece * group.count + group.rank) * self.rows
            with self._unsynced(piece):
                inputs, targets = self._moved(batch, slice(first, first + self.rows))
                loss = self._loss(inputs, targets, caches[piece] if config.carry else None)
                with self._in_this_thread():
                    (loss / config.accumulate).backward()
            total += loss.detach() / config.accumulate
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, sharding.whole(norm.detach())

    def _loss(self, inputs: Tensor, targets: Tensor, cache: RebindCache | None) -> Tensor:
        """The mean loss of a piece; a cache goes on from here, its gradient cut."""
        with self.autocast():
            carried = {"past_key_values": cache, "use_cache": cache is not None}
            found = self.ran(input_ids=inputs, shift_labels=targets, return_logits=False, **carried)
        if cache is not None:
            cache.detach()
        return cast(Tensor, found.loss)

    def _whole_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss(inputs, targets, None)

    def _records(self) -> bool:
        """As the config says; if it does not, where it can be done and is known to be faster."""
        if self.config.record is not None:
            return self.config.record
        return self.config.recordable(self.group.count) and self.model.num_parameters() <= LARGEST

    def _wrapped(self) -> Any:
        ran: Any = self.model
        if self.group.count > 1 and not self.config.sharded:
            ran = DistributedDataParallel(self.model)
        return torch.compile(ran) if self.config.compile else ran

    def _in_this_thread(self) -> AbstractContextManager[Any]:
        """Backward passes without autograd's thread for the GPU: Python in another thread is several times slower."""
        if self.group.count > 1:
            return nullcontext()
        return cast(AbstractContextManager[Any], torch.autograd.set_multithreading_enabled(False))

    def _unsynced(self, piece: int) -> AbstractContextManager[Any]:
        """Gradients are averaged over the processes after a batch's last piece; where they are split, after each."""
        if self.group.count == 1 or self.config.sharded or piece == self.config.accumulate - 1:
            return nullcontext()
        return cast(AbstractContextManager[Any], self.ran.no_sync())

    def _moved(self, batch: Batch, mine: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Some rows on their device. A GPU is not waited for: they go there from memory that it reads by itself."""
        device = self.group.device
        inputs, targets = batch.inputs[mine], batch.targets[mine]
        if device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
