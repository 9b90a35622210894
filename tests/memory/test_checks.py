"""Flags as Python bools, and where a flag may not be looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rebind.memory.checks import known, unknown_name


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
    class Flag(SimpleNamespace):
        def __bool__(self) -> bool:
            return True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert known(Flag(is_cuda=True, is_meta=False)) is (None if capturing else True)


def test_an_unknown_name_comes_with_the_closest_one():
    error = unknown_name("feature map", "dpf", ["relu", "dpfp"])
    assert (error.code, error.expected) == ("unknown_feature_map", "one of dpfp, relu")
    assert "'dpfp'" in error.advice
    assert unknown_name("rule", "xyz", ["delta"]).advice == ""
