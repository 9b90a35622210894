"""The processes of a run: a single one, or those that `torchrun` started, each with a copy or a shard of the model.

accelerate joins the processes. torch shards the model, because accelerate does so on GPUs only. Checkpoints hold whole
tensors, so that they do not depend on how the model was distributed.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import gather  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rebind.memory.checks import usable_device
from rebind.nn.lm.model import RebindForCausalLM

PATIENCE = timedelta(hours=2)  # of the others, while the main process tokenizes a large text


def join_processes(device: str) -> tuple[PartialState, torch.device]:
    """Join the processes that `torchrun` started, if any; return them and the device that this one computes on."""
    usable = usable_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return PartialState(), usable
    is_new = not torch.distributed.is_initialized()
    processes = PartialState(cpu=usable.type == "cpu", timeout=PATIENCE)
    if is_new:
        atexit.register(processes.destroy_process_group)
    return processes, processes.device


def gather_to_cpu(value: Tensor, device: torch.device) -> Tensor:
    """Return the tensors of all processes [processes, ...]; only `device` can exchange them."""
    tensors: Tensor = gather(value.detach().to(device).contiguous().unsqueeze(0))
    return tensors.cpu()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random generators of all processes, [processes, ...] each."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: gather_to_cpu(state, device) for name, state in states.items()}


def restore_random_state(states: Mapping[str, Tensor], process: int, device: torch.device) -> None:
    """Continue the random generators of a process where `random_state` found them."""
    torch.set_rng_state(states["cpu"][process].clone())  # a view of it crashes torch
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][process].clone(), device)


def shard(model: RebindForCausalLM, processes: int, device: torch.device) -> None:
    """Split a model that is the same in every process (FSDP2): block by block, then the embedding and the norm.

    A model on the CPU moves to the devices shard by shard, so that no device ever holds all of it.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # we change no views
    mesh = init_device_mesh(device.type, (processes,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights by name and AdamW's moments as `parameter:moment`, complete in the main process.

    Every process must call this.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = cast(tuple[Any, Any], get_state_dict(model, optimizer, options=options))
    moments = state.get("state", {}).items()
    return weights, {f"{name}:{moment}": value for name, values in moments for moment, value in values.items()}


def restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Give the optimizer the moments that `whole_state` returned, or this process's shards of them."""
    state = cast(Any, get_optimizer_state_dict(model, optimizer))
    state["state"] = {}
    for key, value in moments.items():
        name, _, moment = key.rpartition(":")
        state["state"].setdefault(name, {})[moment] = value
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
