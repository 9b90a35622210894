"""Flags as Python bools, and where a flag may not be looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rebind.memory import checks
from rebind.memory.checks import known


def test_a_flag_is_known_where_it_may_be_looked_at():
    assert known(torch.tensor(True)) is True
    assert known(torch.tensor(False)) is False
    assert known(torch.tensor(True, device="meta")) is None


def test_inside_vmap_and_compile_it_is_not():
    seen = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        seen.append(known((x > 0).any()))
        return x

    torch.vmap(ask)(torch.ones(2, 3))
    torch.compile(ask, backend="eager", fullgraph=True)(torch.ones(3))
    assert seen == [None, None]


@pytest.mark.parametrize("capturing", [True, False])
def test_inside_a_recording_it_is_not(capturing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert checks._hidden(SimpleNamespace(is_cuda=True, is_meta=False)) is capturing


def test_a_compiler_is_not_asked_about_recordings(monkeypatch):
    """It could not say."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    assert checks._hidden(SimpleNamespace(is_cuda=True, is_meta=False))
