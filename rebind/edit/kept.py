"""Targets found before an interruption: stored as they are found, used again on the next run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rebind.edit.targets import Found, Request, TargetSettings, find_targets
from rebind.edit.trunk import Trunk
from rebind.files import write_atomically

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

    def load(self, wanted: Sequence[str]) -> dict[str, Row]:
        """Those of the wanted targets that are there; a damaged file is as good as none."""
        rows: dict[str, Row] = {}
        for file in sorted(self.folder.glob("targets-*.safetensors")) if self.folder is not None else ():
            try:
                with safe_open(str(file), framework="pt") as stored:
                    names = json.loads(stored.metadata()["digests"])
                    tensors = [stored.get_tensor(part) for part in ("hidden", "before", "loss", "steps")]
            except (SafetensorError, KeyError, TypeError, ValueError):
                file.unlink(missing_ok=True)
                continue
            for index, name in enumerate(names):
                if name in wanted:
                    hidden, before, loss, steps = (tensor[index] for tensor in tensors)
                    rows[name] = hidden, before, loss, steps
        return rows

    def store(self, names: Sequence[str], found: Found) -> None:
        if self.folder is None or not names:
            return
        parts = {"hidden": found.hidden, "before": found.before, "loss": found.loss, "steps": found.steps}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in parts.items()}
        whole = hashlib.sha256("".join(names).encode()).hexdigest()[:24]
        data = save(tensors, metadata={"digests": json.dumps(list(names))})
        write_atomically(self.folder / f"targets-{whole}.safetensors", data)

    def clear(self) -> None:
        """Once the targets are in the ledger."""
        for file in self.folder.glob("targets-*.safetensors") if self.folder is not None else ():
            file.unlink(missing_ok=True)


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
