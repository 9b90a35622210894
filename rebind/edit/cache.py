"""Where rebind keeps what it can compute again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder for rebind, not created: REBIND_CACHE, or what the system calls a cache."""
    if chosen := os.environ.get("REBIND_CACHE"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "rebind"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rebind"
    if os.name == "nt" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "rebind"
    return Path.home() / ".cache" / "rebind"
