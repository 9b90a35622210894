"""Where ledgers and models lie, and what tells weights in a place from others put there."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path

from rebind.cli.options import DEFAULT_MODEL
from rebind.edit.ledger.log import digest_of
from rebind.files import sampled

SAMPLES = 16  # looks into a file of weights


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
    return ledgers_folder() / f"{slug(model_name)}-{fingerprint[:8]}"


def slug(name: str) -> str:
    """A model's name as the name of a folder.

    >>> slug("Qwen/Qwen3-0.6B")
    'Qwen--Qwen3-0.6B'
    """
    return re.sub(r"[^\w.-]+", "--", name).strip(".-") or "model"


def place_of(model: str) -> str:
    """What a model is known by without its weights: an absolute path, be it there or not, or a Hub id."""
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL or not (path.is_absolute() or is_there(path)):
        return model
    return os.path.realpath(path)  # Path.resolve refuses links that go round in a circle


def stamp_of(place: str) -> str:
    """What tells the weights in a place from others put there: their files' names, sizes and samples of their bytes.

    Nothing for a Hub id and the default model, and where nothing is there or it may not be looked at.
    """
    path = Path(place)
    try:
        if not path.is_absolute() or not path.exists():
            return ""
        files = _weights(path) if path.is_dir() else [path]
        return digest_of([[str(file.relative_to(path.parent)), *_sample(file)] for file in files])
    except OSError:
        return ""


def _weights(folder: Path) -> list[Path]:
    """The weights in a model's folder, or in all checkpoints of a training, and the configurations beside them."""
    found = sorted(file for file in folder.iterdir() if file.match("model*.safetensors"))
    found = found or sorted(folder.glob("checkpoints/*/model*.safetensors"))
    configs = sorted({file.with_name("config.json") for file in found})
    return [*found, *(file for file in configs if file.exists())]


def _sample(file: Path) -> tuple[int, str]:
    """A file's size and the digest of parts of it, evenly spread: all of it, where it is small."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        return size, sampled(opened, (size * part // SAMPLES for part in range(SAMPLES)))


def name_of(model: str) -> str:
    """What a model is called once it is loaded."""
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL:
        return model
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as problem:  # what may not be looked at is there; a name too long for a file is none
        return problem.errno == errno.EACCES
