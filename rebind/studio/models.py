"""The models that the page offers: those that are on this machine already."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from rebind.models.locate import DEFAULT_MODEL

MOST = 50


def local_models(hub_cache: str | Path = HF_HUB_CACHE) -> list[str]:
    """Return the embedded model and the Hub ids in the cache of the Hub."""
    folders = sorted(Path(hub_cache).glob("models--*/snapshots"))
    ids = [folder.parent.name.removeprefix("models--").replace("--", "/") for folder in folders]
    return [DEFAULT_MODEL, *ids[:MOST]]
