"""Weights that are offloaded or sharded: at most a part of them is in the module that uses them.

- accelerate *offloads* modules: their weights are on the CPU or on disk except during a forward pass. The weights of an
  edited module are loaded for good; all others are streamed as before.
- FSDP2 and tensor parallelism *shard* weights over processes, as DTensors. They are gathered one at a time to be read,
  and written shard by shard. Every process must make the same calls.
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

MIN_BYTES = 2**20  # the smallest constant that is worth moving


def full_tensor(weight: Tensor) -> Tensor:
    """Return a weight, gathered into a new tensor if it is sharded."""
    full: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return full


@torch.no_grad()
def copy_into(weight: Tensor, values: Tensor) -> None:
    """Copy values into a weight in place, cast to its dtype; for a sharded weight, the shard of this process."""
    if isinstance(weight, DTensor):
        cast = values.to(weight.dtype).contiguous()
        weight.copy_(distribute_tensor(cast, weight.device_mesh, weight.placements))
    else:
        weight.copy_(values)


def prepare_fsdp(model: nn.Module) -> None:
    """Make a model under FSDP2 ready to run in pieces: blocks stay sharded, the modules around them are gathered.

    FSDP gathers the weights of a module when it runs. Here blocks may run without the model around them.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        return
    root, *blocks = parts
    if not blocks or root is not model:
        raise InputError(
            "The model is sharded by FSDP, but not block by block and then as a whole",
            expected="fully_shard on every block, then on the model",
            code="sharded_otherwise",
        )
    root.set_reshard_after_forward(False, recurse=False)
    root.set_reshard_after_backward(False, recurse=False)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(model)))  # initializes FSDP
    root.unshard()
    reshard(blocks)


def reshard(blocks: Iterable[nn.Module]) -> None:
    """Free the gathered weights of FSDP2 blocks after an interrupted run, so that their shards are what is written."""
    for block in blocks:
        if isinstance(block, FSDPModule):
            block.reshard()


def full_input(module: nn.Module, x: Tensor) -> Tensor:
    """Return the input of a linear map with all channels [..., d_in]; tensor parallelism gives each process a part."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, DTensor) or x.shape[-1] == weight.shape[-1]:
        return x
    return full_tensor(DTensor.from_local(x.detach().contiguous(), weight.device_mesh, [Shard(x.ndim - 1)]))


def is_whole(model: nn.Module) -> bool:
    """Return whether all weights of a model are plain parameters: not offloaded, sharded or quantized."""
    weights = list(model.parameters())
    return all(type(weight) is nn.Parameter and weight.is_floating_point() and not weight.is_meta for weight in weights)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the weights of a model are sharded over processes."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of every parameter, tied ones once; offloaded ones are read from the CPU or disk."""
    owners, tied = dict(model.named_modules()), getattr(model, "all_tied_weights_keys", None) or {}
    for name, weight in model.named_parameters():
        if weight.is_meta and name in tied:  # in memory they are one parameter, with one name
            continue
        path, _, attribute = name.rpartition(".")
        hook = offload_hook(owners[path]) if weight.is_meta else None
        if hook is not None:
            yield name, hook.weights_map[attribute]
        elif type(weight) in (nn.Parameter, DTensor) or not hasattr(weight, "__tensor_flatten__"):
            yield name, full_tensor(weight.detach())
        else:  # quantized by torchao: several tensors
            yield from ((f"{name}.{part}", getattr(weight, part)) for part in weight.__tensor_flatten__()[0])


def offload_hook(module: nn.Module) -> Any | None:
    """Return the hook by which accelerate offloads a module, or None."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])
    return next((hook for hook in hooks if getattr(hook, "offload", False) and hook.weights_map is not None), None)


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module runs on, even if its weights are offloaded."""
    weight = next(module.parameters())
    hook = next(filter(None, map(offload_hook, module.modules())), None)
    if hook is None or not weight.is_meta:
        return weight.device
    device = hook.execution_device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def bytes_on(model: nn.Module, device: torch.device) -> int:
    """Return the bytes that the weights of a model, or the shards of this process, take on a device."""
    local = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters())
    return sum(weight.nbytes for weight in local if weight.device == device)


def load_offloaded(module: nn.Module) -> None:
    """Load the weights of an offloaded module onto the device it runs on, and keep them there."""
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
    devices = {"execution_device": hook.execution_device, "io_same_device": hook.io_same_device}
    add_hook_to_module(module, AlignDevicesHook(**devices, skip_keys=hook.skip_keys))


def waiting_constants(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which constants saved for a backward pass are moved to the CPU, if the model is offloaded.

    A backward pass needs the weights of its forward pass. Without this, autograd would keep every weight that was
    streamed through the device.
    """
    if device.type == "cpu" or not any(weight.is_meta for weight in model.parameters()):
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(move_constant, bring_back)


def move_constant(saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    """Return (device, copy on the CPU) of a large constant, and any other tensor unchanged."""
    is_constant = not saved.requires_grad and saved.grad_fn is None
    return (saved.device, saved.cpu()) if is_constant and saved.nbytes >= MIN_BYTES else saved


def bring_back(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    """Return a tensor that `move_constant` moved to its device."""
    return saved[1].to(saved[0]) if isinstance(saved, tuple) else saved
