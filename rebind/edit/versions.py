"""What an edit was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
import transformers


def versions() -> dict[str, str]:
    """Of everything that the numbers of an edit depend on."""
    return {
        "rebind": _version_of("rebind"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
