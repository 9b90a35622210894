"""Fixtures of the ledger's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"
