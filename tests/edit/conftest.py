"""No network and no cache but the test's own; models that several files load, save and edit."""

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


@pytest.fixture
def tiny():
    """A Llama of a few weights."""
    from tests.families import FAMILIES

    return FAMILIES["llama"]()


@pytest.fixture
def folder(tiny, tmp_path):
    """It on disk, with a tokenizer."""
    from tests.edit.saved import save

    return save(tiny, tmp_path / "tiny-llama")


@pytest.fixture
def llama():
    """It with its edits."""
    from tests.edit.edited import Case

    return Case("llama")


@pytest.fixture
def tokenizer():
    from tests.edit.edited import word_tokenizer

    return word_tokenizer()
