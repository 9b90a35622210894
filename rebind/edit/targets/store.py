"""Targets found before an interruption: stored as they are found, used again on the next run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rebind.edit.targets.optimize import Found, Request, TargetSettings, find_targets
from rebind.files import write_atomically
from rebind.models.trunk import Trunk

PARTS = ("hidden", "before", "loss", "steps")
Row = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden, before, loss, steps of one fact


def digest(model: str, layer: int, settings: TargetSettings, request: Request) -> str:
    """Of everything a target depends on."""
    prompts = [[list(prompt.ids), prompt.subject_last] for prompt in request.prompts]
    described = [model, layer, asdict(settings), prompts, list(request.target)]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class KeptTargets:
    """A folder of found targets, one file a group."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._asked: set[str] = set()  # the targets of the edit at work, by digest

    def load(self, names: Sequence[str]) -> dict[str, Row]:
        """Those of the wanted targets that are there; a damaged file is as good as none."""
        self._asked = set(names)
        rows: dict[str, Row] = {}
        for file in self._files():
            try:
                with safe_open(str(file), framework="pt") as stored:
                    told = stored.metadata()
                    tensors = {part: stored.get_tensor(part) for part in PARTS}
                held = json.loads(told["digests"])
                if told["sha256"] != _checksum(held, tensors):
                    raise ValueError("altered")
            except (SafetensorError, KeyError, TypeError, ValueError):
                file.unlink(missing_ok=True)
                continue
            except OSError:  # another process has done with it
                continue
            for index, name in enumerate(held):
                if name in self._asked:
                    hidden, before, loss, steps = (tensors[part][index] for part in PARTS)
                    rows[name] = hidden, before, loss, steps
        return rows

    def store(self, names: Sequence[str], found: Found) -> None:
        if self.folder is None or not names:
            return
        tensors = {part: getattr(found, part).detach().cpu().contiguous() for part in PARTS}
        whole = hashlib.sha256("".join(names).encode()).hexdigest()[:24]
        told = {"digests": json.dumps(list(names)), "sha256": _checksum(names, tensors)}
        write_atomically(self.folder / f"targets-{whole}.safetensors", save(tensors, metadata=told))

    def clear(self) -> None:
        """Once the targets that were asked for are in the ledger. Files with any others are another run's."""
        for file in self._files():
            try:
                with safe_open(str(file), framework="pt") as stored:
                    held = json.loads(stored.metadata()["digests"])
            except (SafetensorError, KeyError, TypeError, ValueError, OSError):
                continue  # the next run that looks at it removes it
            if self._asked.issuperset(held):
                file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [] if self.folder is None else sorted(self.folder.glob("targets-*.safetensors"))


def _checksum(names: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    """Of which targets these are and of every number in them."""
    whole = hashlib.sha256(json.dumps(list(names)).encode())
    for part in PARTS:
        tensor = tensors[part]
        whole.update(f"{part} {tensor.dtype} {list(tensor.shape)}".encode())
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def resume_targets(
    trunk: Trunk,
    layer: int,
    requests: Sequence[Request],
    settings: TargetSettings,
    model: str,
    kept: KeptTargets,
    **options: object,
) -> Found:
    """`find_targets` for what is not kept already."""
    names = [digest(model, layer, settings, request) for request in requests]
    rows = kept.load(names)
    missing = [index for index, name in enumerate(names) if name not in rows]
    if missing:
        fresh = find_targets(
            trunk,
            layer,
            [requests[index] for index in missing],
            settings,
            keep=lambda group, found: kept.store([names[missing[index]] for index in group], found),
            **options,  # type: ignore[arg-type]
        )
        parts = zip(fresh.hidden, fresh.before, fresh.loss, fresh.steps, strict=True)
        rows |= {names[index]: row for index, row in zip(missing, parts, strict=True)}
    device = trunk.device
    stacked = [torch.stack([rows[name][part].to(device) for name in names]) for part in range(4)]
    return Found(*stacked)
