"""Checkpoints: folders that appear complete or not at all, with everything that a run needs to continue exactly.

step-00000250/
  config.json, model.safetensors, tokenizer.json, …   a model that `from_pretrained` reads
  optimizer.safetensors                               AdamW's moments and step counts, by parameter
  random.safetensors                                  the random generators of every process
  carried.safetensors                                 states that continue into the next segment, if any
  state.json                                          the position of the run, and digests of all files
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file
from torch import Tensor

from rebind.errors import RebindWarning
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindBlock, RebindForCausalLM
from rebind.storage import create_folder, read_json_object, write_json

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
        write_json(folder / STATE, {**position, "files": files})

    create_folder(path, fill)


def read(path: Path) -> Checkpoint:
    contents: dict[str, Any] = read_json_object(path / STATE) or {}
    del contents["files"]
    for name in TENSORS:
        file = path / f"{name}.safetensors"
        contents[name] = load_file(file) if file.exists() else {}
    return Checkpoint(**contents)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest_checkpoint(folder: Path, *, remove_damaged: bool = False) -> Path | None:
    """Return the newest checkpoint in a folder, or None. Damaged ones are passed over with a warning, or removed."""
    for path in reversed(list_checkpoints(folder)):
        problem = _damage(path)
        if problem is None:
            return path
        message = f"Checkpoint {path} is damaged ({problem}), so the one before it is used"
        warnings.warn(message, RebindWarning, stacklevel=2)
        if remove_damaged:
            shutil.rmtree(path)
    return None


def _damage(path: Path) -> str | None:
    """Return what is wrong with the files of a checkpoint; None if all are as they were written."""
    state = read_json_object(path / STATE) or {"files": {STATE: "unreadable"}}
    changed = (name for name, digest in state["files"].items() if _digest(path / name) != digest)
    return next((f"{name} has changed" for name in changed), None)


def _digest(file: Path) -> str | None:
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def carried_tensors(caches: Sequence[RebindCache]) -> dict[str, Tensor]:
    """Return the states in the caches of all pieces of a batch, by name."""
    return {
        f"{piece}.{layer}.{index}": tensor
        for piece, cache in enumerate(caches)
        for layer, state in enumerate(cache.states)
        for index, tensor in enumerate([] if state is None else state.tensors)
    }


def restore_carried(caches: Sequence[RebindCache], model: RebindForCausalLM, tensors: Mapping[str, Tensor]) -> None:
    """Give the caches the states that `carried_tensors` returned."""
    for piece, cache in enumerate(caches):
        for layer, block in enumerate(model.model.layers):
            empty = cast(RebindBlock, block).mixer.initial_state(len(tensors[f"{piece}.{layer}.0"]))
            names = iter(f"{piece}.{layer}.{index}" for index in range(len(empty.tensors)))
            cache.states[layer] = empty.map(lambda tensor, names=names: tensors[next(names)].to(tensor.device))
