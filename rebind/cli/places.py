"""Where ledgers lie when nobody says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from rebind.errors import InputError

HEADER, LOG = "ledger.json", "log.jsonl"  # what makes a folder a ledger, and where its edits are


def data_folder() -> Path:
    """The user's data folder for rebind: unlike a cache, not to be thrown away."""
    if xdg := os.environ.get("XDG_DATA_HOME"):
        return Path(xdg).expanduser() / "rebind"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "rebind"
    if os.name == "nt" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "rebind"
    return Path.home() / ".local" / "share" / "rebind"


def ledgers_folder() -> Path:
    """The folder of all default ledgers: REBIND_LEDGERS, or one in the data folder."""
    chosen = os.environ.get("REBIND_LEDGERS")
    return Path(chosen).expanduser() if chosen else data_folder() / "ledgers"


def default_ledger(model_name: str, fingerprint: str) -> Path:
    return ledgers_folder() / f"{_slug(model_name)}-{fingerprint[:8]}"


def find_ledger(model: str, ledger: Path | None) -> Path:
    """The ledger that was named, or the one of a model, found by its name: no weights are read."""
    if ledger is not None:
        return ledger.expanduser()
    parent, slug = ledgers_folder(), _slug(_name_of(model))
    found = sorted(parent.glob(f"{_glob_safe(slug)}-????????/{HEADER}"))
    found = [file for file in found if _has_edits(file.parent)] or found  # one that was begun for nothing is no rival
    if len(found) == 1:
        return found[0].parent
    if found:
        names = ", ".join(file.parent.name for file in found)
        raise InputError(
            f"{len(found)} models named {slug} have ledgers in {parent} ({names}), expected one: name its folder "
            f"with --ledger"
        )
    others = sorted(file.parent.name for file in parent.glob(f"*/{HEADER}"))
    known = f" (there are {', '.join(others[:5])})" if others else ""
    raise InputError(
        f"no ledger of {slug} in {parent}{known}: `rebind edit` makes one, --model or --ledger names another"
    )


def _has_edits(ledger: Path) -> bool:
    log = ledger / LOG
    return log.exists() and log.stat().st_size > 0


def _slug(name: str) -> str:
    """A model's name as the name of a folder.

    >>> _slug("Qwen/Qwen3-0.6B")
    'Qwen--Qwen3-0.6B'
    """
    return re.sub(r"[^\w.-]+", "--", name).strip(".-") or "model"


def _name_of(model: str) -> str:
    """What a model is called once it is loaded."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def _glob_safe(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
