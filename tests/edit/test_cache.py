"""The cache folder: where the user or the system wants it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rebind.edit import cache
from rebind.edit.cache import cache_folder


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"REBIND_CACHE": "/somewhere/else", "XDG_CACHE_HOME": "/x"}, "/somewhere/else"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/rebind"),
        ("linux", {}, "/home/me/.cache/rebind"),
        ("linux", {"REBIND_CACHE": ""}, "/home/me/.cache/rebind"),
        ("darwin", {}, "/home/me/Library/Caches/rebind"),
        ("linux", {"REBIND_CACHE": "~/mine"}, "/home/me/mine"),
    ],
)
def test_cache_folder(platform, environment, expected, monkeypatch):
    for name in ("REBIND_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cache.sys, "platform", platform)
    assert cache_folder() == Path(expected)
