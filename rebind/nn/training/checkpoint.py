"""Checkpoints: folders that are there whole or not at all, and hold everything a run needs to go on.

step-00000250/
  config.json, model.safetensors, tokenizer.json, …   a model that `from_pretrained` reads
  optimizer.safetensors                               AdamW's two moments and step counts, by parameter
  random.safetensors                                  every process's random generators
  carried.safetensors                                 memories that go on into the next segment, if they do
  state.json                                          step, rate, position in the data, digests of all files
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor

from rebind.errors import InputError, StorageError
from rebind.files import write_folder_atomically
from rebind.nn.lm.model import RebindForCausalLM

STATE = "state.json"
PARTS = ("optimizer", "random", "carried")


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged, and an older one was taken."""


@dataclass(frozen=True)
class Place:
    """Where a run is, and of what."""

    step: int  # steps done
    segments: int  # segments read
    rate: float  # of the last step
    log_bytes: int  # of the log that belong to it
    processes: int
    corpus: str  # digests
    tokenizer: str


@dataclass(frozen=True, eq=False)
class Tensors:
    """Names to tensors. One that was read has no weights: `Checkpoint.fill` gives them to a model."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]  # [processes, ...] each
    carried: Mapping[str, Tensor]  # [processes, ...] each


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One that was read, and found whole."""

    folder: Path
    place: Place
    tensors: Tensors

    def fill(self, model: RebindForCausalLM) -> None:
        """Give the model these weights."""
        load_model(model, self.folder / "model.safetensors")


def save(folder: Path, model: RebindForCausalLM, tokenizer: Any, place: Place, tensors: Tensors, *, keep: int) -> Path:
    """Write one, then remove all but the newest `keep`."""

    def fill(into: Path) -> None:
        _save_model(into, model, tensors.weights)
        tokenizer.save_pretrained(into)
        for name in PARTS:
            if content := getattr(tensors, name):
                save_file({key: value.contiguous() for key, value in content.items()}, into / f"{name}.safetensors")
        digests = {file.name: _digest(file) for file in sorted(into.iterdir())}
        (into / STATE).write_text(json.dumps({**asdict(place), "files": digests}, indent=1), encoding="utf-8")

    path = folder / f"step-{place.step:08d}"
    try:
        write_folder_atomically(path, fill)
    except SafetensorError as problem:  # its name for a full disk
        raise StorageError(
            f"cannot write checkpoint {path} ({problem}), expected room and write access: free some space and run the "
            f"same command again, it goes on from the checkpoint before"
        ) from problem
    for old in steps(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def tidy(folder: Path) -> None:
    """Remove what killed runs were writing. For whoever has the folder to himself."""
    for left in folder.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, for a reader beside a run, who puts nothing aside."""
    for path in reversed(steps(folder)):
        problem = _damage(path)
        if problem is None:
            return path
        if not path.is_dir():  # the run has removed it: there is a newer one
            return newest(folder)
        warnings.warn(
            f"checkpoint {path} is damaged ({problem}): the one before it is taken", CheckpointWarning, stacklevel=3
        )
    return None


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole. Damaged ones are put aside, with a warning; None where there is none."""
    for path in reversed(steps(folder)):
        problem = _damage(path)
        if problem is None:
            return read(path)
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        warnings.warn(
            f"checkpoint {path} is damaged ({problem}): it was renamed to {aside.name}, and the one before it is taken",
            CheckpointWarning,
            stacklevel=2,
        )
    return None


def read(path: Path) -> Checkpoint:
    told = json.loads((path / STATE).read_text(encoding="utf-8"))
    told.pop("files")
    parts = {name: path / f"{name}.safetensors" for name in PARTS}
    tensors = Tensors({}, **{name: load_file(file) if file.exists() else {} for name, file in parts.items()})
    return Checkpoint(path, Place(**told), tensors)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Tensor]:
    """AdamW's state as `parameter:moment` → tensor."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}:{moment}": value.detach().cpu()
        for parameter, moments in optimizer.state.items()
        for moment, value in moments.items()
    }


def moments_by_name(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """That state by parameter, for all parameters that the optimizer has and no others."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in saved.items():
        name, _, moment = key.rpartition(":")
        found.setdefault(name, {})[moment] = value
    if missing := sorted(set(_order(optimizer, model)) ^ set(found)):
        raise InputError(
            f"the checkpoint's optimizer and the model differ in {missing[0]!r}: train into another folder"
        )
    return found


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, moments: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Give the optimizer that state back, each tensor where the optimizer wants it."""
    state = {index: dict(moments[name]) for index, name in enumerate(_order(optimizer, model))}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _order(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[str]:
    """The names of an optimizer's parameters, in its own order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _save_model(into: Path, model: RebindForCausalLM, weights: Mapping[str, Tensor]) -> None:
    """What `save_pretrained` writes, without its progress bar: a tied output is the embedding, and is not written."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    contents = {name: weight.detach().cpu().contiguous() for name, weight in weights.items() if name not in tied}
    save_file(contents, into / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [RebindForCausalLM.__name__]  # a sharded model's class has another name
    model.config.save_pretrained(into)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(into)


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files."""
    try:
        files = json.loads((path / STATE).read_text(encoding="utf-8"))["files"]
        for name, digest in files.items():
            if _digest(path / name) != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, AttributeError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
