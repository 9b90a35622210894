"""Whose a folder is: new, of the run that is to go on in it, or of something that a run must leave alone."""

from __future__ import annotations

import json
from pathlib import Path

from rebind.errors import InputError
from rebind.nn.training.config import TrainConfig, differences
from rebind.nn.training.processes import LOCK

CONFIG, TOKENS = "config.json", "tokens"


def require_new_or_run(folder: Path) -> None:
    """Refuse a folder with other things in it, before anything is written."""
    if folder.is_dir() and not _has_run(folder) and any(not _begins_a_run(path) for path in folder.iterdir()):
        raise InputError(f"{folder} is there already and holds no training run: name another --out")


def require_same(folder: Path, config: TrainConfig, step: int) -> None:
    """Refuse to go on with a run of another config."""
    path = folder / CONFIG
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(f"{path} cannot be read ({problem}), expected a run's config: train elsewhere") from None
    now = json.loads(json.dumps(config.to_json()))
    if changed := differences(begun, now):
        finished = step == begun.get("steps")
        why = ", and steps decides the rate of every step, which falls to the last" if "steps" in changed else ""
        told = "; ".join(f"{name} is {new!r}, was {old!r}" for name, (old, new) in changed.items())
        raise InputError(
            f"{folder} has a {'finished ' if finished else ''}run of another config ({told}){why}: "
            f"{'' if finished else 'use the one it was begun with to go on, or '}train into another folder"
        )


def _has_run(folder: Path) -> bool:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"data", "preset", "optimizer", "steps"} <= found.keys()


def _begins_a_run(path: Path) -> bool:
    """What is there before the config, and stays if the run is killed."""
    return path.name in (LOCK, TOKENS) or path.match(".*.tmp")
