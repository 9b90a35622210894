"""Checkpoints: folders that appear complete or not at all, with everything that a run needs to continue exactly.

step-00000250/
  config.json, model.safetensors, tokenizer.json, …   a model that `from_pretrained` reads
  optimizer.safetensors                               AdamW's moments and step counts, by parameter
  random.safetensors                                  the random generators of every process
  carried.safetensors                                 states that continue into the next segment, if any
  state.json                                          the position of the run

Tensors are whole, so that a checkpoint does not depend on how the model was distributed. Every process must call the
functions that collect them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather  # type: ignore[import-untyped]
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from rebind.errors import InputError
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindBlock, RebindForCausalLM
from rebind.storage import check_json, create_folder, open_to_read, path_inside, read_json_object, seal_json, write_json

STATE = "state.json"
TENSORS = ("optimizer", "random", "carried")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The position of a run and its tensors, without the weights."""

    step: int  # steps that are done
    log_rows: int  # rows of the log that belong to them
    processes: int
    text: str  # digest of the text and the tokenizer
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]  # [processes, ...] each
    carried: Mapping[str, Tensor]  # [processes, ...] each


def save(
    path: Path, checkpoint: Checkpoint, model: RebindForCausalLM, weights: Mapping[str, Tensor], tokenizer: Any
) -> None:
    """Write a checkpoint with all weights of a model, of which the model itself may hold shards alone."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    position = dict(vars(checkpoint))
    tensors = {name: position.pop(name) for name in TENSORS}
    tensors["model"] = {name: weight for name, weight in weights.items() if name not in tied}

    def fill(folder: Path) -> None:
        for name, content in tensors.items():
            if content:
                contiguous = {key: value.contiguous() for key, value in content.items()}
                save_file(contiguous, folder / f"{name}.safetensors", metadata={"format": "pt"})
        model.config.architectures = [RebindForCausalLM.__name__]  # the class of a sharded model has another name
        for part in (model.config, model.generation_config, tokenizer):
            part.save_pretrained(folder)
        files = {file.name: _digest(file) for file in sorted(folder.iterdir())}
        write_json(folder / STATE, seal_json({**position, "files": files}))

    create_folder(path, fill)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint, and check that none of its files was altered since it was written."""
    try:
        contents = check_json(read_json_object(path / STATE) or {})
        for name, digest in contents.pop("files").items():
            if _digest(path_inside(path, name)) != digest:
                raise ValueError(f"{name} was altered")
        for name in TENSORS:
            file = path / f"{name}.safetensors"
            contents[name] = load_file(file) if file.exists() else {}
        return Checkpoint(**contents)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as problem:
        raise InputError(
            f"The checkpoint {path} is damaged ({problem})",
            advice="Remove its folder to resume from the checkpoint before it, or train into another folder",
            code="checkpoint_damaged",
        ) from None


def _digest(file: Path) -> str:
    with open_to_read(file) as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and not path.is_symlink())


def newest_checkpoint(folder: Path) -> Path | None:
    return next(reversed(list_checkpoints(folder)), None)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights by name and AdamW's moments as `parameter:moment`, complete in the main process."""
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


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random generators of all processes, [processes, ...] each."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return _gather(states, device)


def restore_random_state(states: Mapping[str, Tensor], process: int, device: torch.device) -> None:
    """Continue the random generators of a process where `random_state` found them."""
    torch.set_rng_state(states["cpu"][process].clone())  # a view of it crashes torch
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][process].clone(), device)


def carried_state(caches: Sequence[RebindCache], device: torch.device) -> dict[str, Tensor]:
    """Return the states in the caches of all pieces of a batch and all processes, [processes, ...] each."""
    states = {
        f"{piece}.{layer}.{index}": tensor
        for piece, cache in enumerate(caches)
        for layer, state in enumerate(cache.states)
        for index, tensor in enumerate([] if state is None else state.tensors)
    }
    return _gather(states, device)


def restore_carried_state(
    caches: Sequence[RebindCache], model: RebindForCausalLM, states: Mapping[str, Tensor], process: int
) -> None:
    """Give the caches of a process the states that `carried_state` returned."""
    for piece, cache in enumerate(caches):
        for layer, block in enumerate(model.model.layers):
            empty = cast(RebindBlock, block).mixer.initial_state(states[f"{piece}.{layer}.0"].shape[1])
            names = iter(f"{piece}.{layer}.{index}" for index in range(len(empty.tensors)))
            cache.states[layer] = empty.map(lambda tensor, names=names: states[next(names)][process].to(tensor.device))


def _gather(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of all processes [processes, ...] on the CPU; only `device` can exchange them."""
    ready = {name: tensor.detach().to(device).contiguous().unsqueeze(0) for name, tensor in tensors.items()}
    return {name: gather(tensor).cpu() for name, tensor in ready.items()}
