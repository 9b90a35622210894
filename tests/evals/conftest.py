"""No network and no cache but the test's own."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the Hub's client, which reads it once

import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # doctests may have imported it before
    monkeypatch.setenv("REBIND_CACHE", str(tmp_path / "rebind-cache"))
