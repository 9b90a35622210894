"""Tests run without a network and with a cache folder of their own; models that several files share."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, when it is imported

import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # doctests may have imported it before
    monkeypatch.setenv("REBIND_CACHE", str(tmp_path / "rebind-cache"))


@pytest.fixture
def tiny():
    """A Llama with few weights."""
    from tests.families import FAMILIES

    return FAMILIES["llama"]()


@pytest.fixture
def folder(tiny, tmp_path):
    """The tiny Llama on disk, with a tokenizer."""
    from tests.tiny import save

    return save(tiny, tmp_path / "tiny-llama")


@pytest.fixture
def llama():
    """A tiny Llama with its edits."""
    from tests.edit.edited import Case

    return Case("llama")


@pytest.fixture
def tokenizer():
    from tests.edit.edited import word_tokenizer

    return word_tokenizer()
