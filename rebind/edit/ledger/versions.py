"""What an edit was made with."""

from __future__ import annotations

import platform

import torch
import transformers

from rebind.version import __version__


def versions() -> dict[str, str]:
    """Of everything that the numbers of an edit depend on."""
    return {
        "rebind": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
