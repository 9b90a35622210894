"""The user's cache and data folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rebind.storage import cache_dir, data_dir, ledgers_dir


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("REBIND_CACHE", "REBIND_DATA", "REBIND_LEDGERS", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="the folders of Linux")
def test_by_default_they_are_where_the_system_keeps_such_things(home, monkeypatch):
    assert cache_dir() == home / ".cache" / "rebind"
    assert data_dir() == home / ".local" / "share" / "rebind"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    monkeypatch.setenv("XDG_DATA_HOME", "/x/data")
    monkeypatch.setenv("REBIND_CACHE", "")
    assert cache_dir() == Path("/x/cache/rebind")
    assert ledgers_dir() == Path("/x/data/rebind/ledgers")
    assert list(home.iterdir()) == []


def test_the_environment_decides(home, monkeypatch):
    monkeypatch.setenv("REBIND_CACHE", "/somewhere")
    monkeypatch.setenv("REBIND_DATA", "~/mine")
    assert cache_dir() == Path("/somewhere")
    assert data_dir() == home / "mine"
    assert ledgers_dir() == home / "mine" / "ledgers"
    monkeypatch.setenv("REBIND_LEDGERS", "~/ledgers")
    assert ledgers_dir() == home / "ledgers"
