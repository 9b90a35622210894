"""Cache of search results, so that an interrupted edit resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from rebind.edit.targets.objective import FactPrompts, TargetSettings
from rebind.edit.targets.optimize import TargetStates
from rebind.storage import path_inside, write_file

PARTS = ("states", "initial", "loss", "steps")


def target_key(model: str, layer: int, settings: TargetSettings, fact: FactPrompts) -> str:
    """Return a digest of everything that a target state depends on."""
    prompts = [[list(prompt.ids), prompt.subject_last] for prompt in fact.prompts]
    inputs = [model, layer, asdict(settings), prompts, list(fact.target)]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


class TargetStore:
    """A folder with one file per group of targets; without a folder nothing is stored.

    Several processes may share the folder: each one removes only the files of its own edit.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._requested: set[str] = set()  # keys of the edit at work
        self._files: dict[Path, Sequence[str]] = {}  # the keys in each file

    def load(self, keys: Sequence[str]) -> dict[str, TargetStates]:
        """Return the stored targets among `keys`, as one row each. Damaged files are removed."""
        self._requested = set(keys)
        rows: dict[str, TargetStates] = {}
        for file in sorted(self.folder.glob("targets-*.safetensors")) if self.folder else ():
            try:
                self._files[file], targets = _read(file)
            except (SafetensorError, KeyError, TypeError, ValueError):
                file.unlink(missing_ok=True)
                continue
            except OSError:  # another process has just removed it
                continue
            for index, key in enumerate(self._files[file]):
                if key in self._requested:
                    rows[key] = targets.select(torch.tensor([index]))
        return rows

    def save(self, keys: Sequence[str], targets: TargetStates) -> None:
        """Store a group of targets."""
        if self.folder is None or not keys:
            return
        tensors = {part: getattr(targets, part).detach().cpu().contiguous() for part in PARTS}
        name = hashlib.sha256("".join(keys).encode()).hexdigest()[:24]
        file = path_inside(self.folder, f"targets-{name}.safetensors")
        write_file(file, save(tensors, metadata={"keys": json.dumps(list(keys))}))
        self._files[file] = keys

    def clear(self) -> None:
        """Remove the targets that were last loaded, once their edit is in the ledger."""
        for file, keys in self._files.items():
            if self._requested.issuperset(keys):
                file.unlink(missing_ok=True)
        self._files.clear()


def _read(file: Path) -> tuple[list[str], TargetStates]:
    with safe_open(str(file), framework="pt") as opened:
        return json.loads(opened.metadata()["keys"]), TargetStates(**{part: opened.get_tensor(part) for part in PARTS})
