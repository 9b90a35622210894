"""Where rebind keeps its own files: what it can compute again (cache) and what it cannot (data)."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path, user_data_path


def cache_dir() -> Path:
    """Return the user's cache folder, not created: REBIND_CACHE, or the system's cache folder for rebind."""
    return _from_environment("REBIND_CACHE") or user_cache_path("rebind", appauthor=False)


def data_dir() -> Path:
    """Return the user's data folder, not created: REBIND_DATA, or the system's data folder for rebind."""
    return _from_environment("REBIND_DATA") or user_data_path("rebind", appauthor=False)


def ledgers_dir() -> Path:
    """Return the folder of all default ledgers, not created: REBIND_LEDGERS, or a folder in the data folder."""
    return _from_environment("REBIND_LEDGERS") or data_dir() / "ledgers"


def _from_environment(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value).expanduser() if value else None
