"""Weights that are not, or not wholly, in the module that uses them.

- accelerate *offloads* modules: their weights wait on the CPU or on disk and are there during a forward pass only. A
  module that is edited is taken back into memory; all others are streamed as before.
- FSDP2 and tensor parallelism *shard* weights over processes, as DTensors. One weight at a time is gathered to be read,
  and written shard by shard. Every process must do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rebind.errors import InputError

LARGE = 2**20  # bytes of a constant that is worth moving


def whole(weight: Tensor) -> Tensor:
    """Return all of a weight that may be sharded; for a sharded one, a copy."""
    full: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return full


@torch.no_grad()
def copy_into(weight: Tensor, values: Tensor) -> None:
    """Copy values into a weight in place, cast to its dtype; into a sharded one, the shard of this process."""
    if isinstance(weight, DTensor):
        cast = values.to(weight.dtype).contiguous()
        weight.copy_(distribute_tensor(cast, weight.device_mesh, weight.placements))
    else:
        weight.copy_(values)


def prepare(model: nn.Module) -> None:
    """Make a model under FSDP2 ready to run in pieces: its blocks stay sharded, and what is around them is gathered.

    FSDP gathers what a module needs when it runs. Here blocks run, but not always the model around them.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        return
    root, *blocks = parts
    if not blocks or root is not model:
        raise InputError(
            "FSDP has sharded the model in another way than block by block, and then as a whole",
            expected="fully_shard on every block, then on the model",
            code="sharded_otherwise",
        )
    root.set_reshard_after_forward(False, recurse=False)
    root.set_reshard_after_backward(False, recurse=False)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(model)))  # upon which FSDP sets itself up
    root.unshard()
    reshard(blocks)


def reshard(blocks: Iterable[nn.Module]) -> None:
    """Let blocks under FSDP2 that a run has left in the middle go back to their shards, which are what is written."""
    for block in blocks:
        if isinstance(block, FSDPModule):
            block.reshard()


def whole_input(module: nn.Module, x: Tensor) -> Tensor:
    """Return all channels of a linear map's input [..., d_in], of which tensor parallelism gives each process some."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, DTensor) or x.shape[-1] == weight.shape[-1]:
        return x
    return whole(DTensor.from_local(x.detach().contiguous(), weight.device_mesh, [Shard(x.ndim - 1)]))


def is_whole(model: nn.Module) -> bool:
    """Return whether all weights of a model are plain numbers in its modules: not offloaded, sharded or quantized."""
    weights = list(model.parameters())
    return all(type(weight) is nn.Parameter and weight.is_floating_point() and not weight.is_meta for weight in weights)


def is_sharded(model: nn.Module) -> bool:
    """Return whether processes share the weights of a model."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and all of every parameter, one at a time, tied ones once; offloaded ones from where they wait."""
    owners, tied = dict(model.named_modules()), getattr(model, "all_tied_weights_keys", None) or {}
    for name, weight in model.named_parameters():
        if weight.is_meta and name in tied:  # in memory they are one parameter, which is named once
            continue
        path, _, own = name.rpartition(".")
        hook = offload_hook(owners[path]) if weight.is_meta else None
        if hook is not None:
            yield name, hook.weights_map[own]
        elif type(weight) in (nn.Parameter, DTensor) or not hasattr(weight, "__tensor_flatten__"):
            yield name, whole(weight.detach())
        else:  # quantized by torchao: several tensors
            yield from ((f"{name}.{part}", getattr(weight, part)) for part in weight.__tensor_flatten__()[0])


def offload_hook(module: nn.Module) -> Any | None:
    """Return the hook by which accelerate offloads a module; None if it does not."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])
    return next((one for one in hooks if getattr(one, "offload", False) and one.weights_map is not None), None)


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module with a weight runs on, wherever its weight waits."""
    weight, hook = next(module.parameters()), offload_hook(module)
    if hook is None or not weight.is_meta:
        return weight.device
    place = hook.execution_device
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def bytes_on(model: nn.Module, device: torch.device) -> int:
    """Return how much memory the weights of a model, or the shards of them here, take on a device."""
    local = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters())
    return sum(weight.nbytes for weight in local if weight.device == device)


def take_back(module: nn.Module) -> None:
    """Take the weights of an offloaded module back into memory, where it runs; its inputs still go there."""
    hook = offload_hook(module)
    if hook is None:
        return
    from accelerate.hooks import (  # type: ignore[import-untyped]
        AlignDevicesHook,
        add_hook_to_module,
        remove_hook_from_module,
    )
    from accelerate.utils import set_module_tensor_to_device  # type: ignore[import-untyped]

    weights = {name: hook.weights_map[name] for name, _ in module.named_parameters(recurse=False)}
    remove_hook_from_module(module)
    for name, weight in weights.items():
        set_module_tensor_to_device(module, name, hook.execution_device, value=weight)
    module.requires_grad_(False)
    places = {"execution_device": hook.execution_device, "io_same_device": hook.io_same_device}
    add_hook_to_module(module, AlignDevicesHook(**places, skip_keys=hook.skip_keys))


def waiting_constants(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the constants of a backward pass wait on the CPU, if the model is offloaded.

    A backward pass needs the weights of its forward pass again. Autograd would keep all that were streamed through the
    device until then.
    """
    if device.type == "cpu" or not any(weight.is_meta for weight in model.parameters()):
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(move_constant, bring_back)


def move_constant(saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    """Return a large constant on the CPU, with the device that it came from; other tensors as they are."""
    is_constant = not saved.requires_grad and saved.grad_fn is None
    return (saved.device, saved.cpu()) if is_constant and saved.nbytes >= LARGE else saved


def bring_back(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    """Return a tensor that `move_constant` has put aside."""
    return saved[1].to(saved[0]) if isinstance(saved, tuple) else saved
