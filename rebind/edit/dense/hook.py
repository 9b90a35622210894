"""The read of a dense memory, as a forward hook on a block: h ← h + Σ wᵢ δᵢ, at every token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rebind.errors import InputError
from rebind.memory.dense import MANY, Dense, Whitening
from rebind.models.trunk import SKIPPED
from rebind.models.weights.placement import device_of


@dataclass(eq=False)
class MemoryHook:
    """Adds what a memory reads to the hidden states that a block returns.

    The read is the same at every token, whatever is before or behind it, so batches, padding, caches and generation
    need nothing. States are whitened and compared in float32 (float64 for a float64 model), under autocast, too.
    """

    whitening: Whitening
    memory: Dense
    stream_axis: int | None = None  # where a family has several residual streams per token (`Trunk.stream_axis`)

    @classmethod
    def on(cls, block: nn.Module, whitening: Whitening, memory: Dense, stream_axis: int | None = None) -> MemoryHook:
        """Return a hook with the device of a block and a dtype that suits it."""
        dtype = torch.float64 if next(block.parameters()).dtype == torch.float64 else torch.float32
        return cls(*_moved(whitening, memory, device_of(block), dtype), stream_axis)

    def __call__(self, block: nn.Module, args: Any, output: Any) -> Any:
        if hasattr(block, SKIPPED):  # known states stand for its output, with what was read in them
            return output
        states = output[0] if isinstance(output, (tuple, list)) else output
        if self.memory.keys.device != states.device:  # the model has moved since
            dtype = self.memory.keys.dtype
            self.whitening, self.memory = _moved(self.whitening, self.memory, states.device, dtype)
        changed = states + self._change(states).to(states.dtype)
        return (changed, *output[1:]) if isinstance(output, (tuple, list)) else changed

    def _change(self, states: Tensor) -> Tensor:
        width = self.memory.keys.shape[-1]
        with torch.autocast(states.device.type, enabled=False):
            read = self.memory.read(self.whitening(mean_states(states, width, self.stream_axis)))
        if self.stream_axis is not None:  # all streams change alike
            return read.unsqueeze(self.stream_axis)
        return read if states.shape[-1] == width else read.repeat(*[1] * (read.ndim - 1), states.shape[-1] // width)


def require_no_memory(block: nn.Module, name: str, own: Collection[MemoryHook] = ()) -> None:
    """Raise if a block already reads a dense memory that is not one of one's own."""
    if any(isinstance(hook, MemoryHook) and hook not in own for hook in block._forward_hooks.values()):
        raise InputError(
            f"{name} already reads a dense memory",
            expected="a model without one",
            advice="Call remove() on what attach returned for it; if an Editor or a copy of the model has the memory, "
            "load the model again",
            code="already_attached",
        )


def mean_states(states: Tensor, width: int, stream_axis: int | None) -> Tensor:
    """Return one state per token in the output of a block: the mean, where a family has several streams."""
    if stream_axis is not None:
        return states.mean(stream_axis)
    return states if states.shape[-1] == width else states.unflatten(-1, (-1, width)).mean(-2)


def _moved(whitening: Whitening, memory: Dense, device: torch.device, dtype: torch.dtype) -> tuple[Whitening, Dense]:
    whitening = Whitening(whitening.mean.to(device, dtype), whitening.factor.to(device, dtype))
    memory = memory.to(device, dtype)
    return whitening, memory.with_cells() if len(memory) > MANY else memory
