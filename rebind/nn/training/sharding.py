"""Weights, gradients and moments split over the processes (FSDP2), and put together again for a checkpoint.

Each process holds its share of every parameter. A block's weights are gathered when it runs and let go when it has, its
gradients are averaged and split at once. What is saved is whole, so that a checkpoint does not show how it was trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rebind.nn.lm.model import RebindForCausalLM
from rebind.nn.training.processes import Processes

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(model: RebindForCausalLM, group: Processes) -> None:
    """Split a model that is the same in every process, block by block; what is left (embedding, norm) is the last part.

    A model on the CPU goes to the processes' device share by share: no device ever holds all of it.
    """
    mesh = init_device_mesh(group.device.type, (group.count,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state in the first process; nothing in the others. All must call it."""
    found: Any = get_model_state_dict(model, options=WHOLE)
    return dict(found)


def whole_moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """AdamW's state in the first process as `parameter:moment` → tensor; nothing in the others. All must call it."""
    found: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    return {
        f"{name}:{moment}": value
        for name, moments in found.get("state", {}).items()
        for moment, value in moments.items()
    }


def split_moments(
    optimizer: torch.optim.Optimizer, model: nn.Module, moments: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Give each process its share of the state of every parameter, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    state: Any = {"state": {name: dict(found) for name, found in moments.items()}, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def whole(value: Tensor) -> Tensor:
    """A number that may be split over the processes, whole in each."""
    return value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value


@contextmanager
def quiet() -> Iterator[None]:
    """FSDP2 warns of views that could be written in place while gradients are on. Ours never are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield
