"""Kernels are looked at once before they are trusted, aloud, and never where that would get in the way."""

from __future__ import annotations

import warnings

import pytest
import torch

from rebind.errors import NumericalWarning
from rebind.ops import trust
from rebind.ops.trust import difference, distrusted, noise


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(trust, "_known", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("REBIND_SELF_CHECK", raising=False)


class Asked:
    def __init__(self, answer):
        self.answer, self.count = answer, 0

    def __call__(self):
        self.count += 1
        return self.answer


def test_a_kind_is_asked_for_once():
    right, other = Asked(None), Asked(None)
    assert [distrusted(("a",), right, "torch") for _ in range(3)] == [None] * 3
    distrusted(("b",), other, "torch")
    assert (right.count, other.count) == (1, 1)


def test_what_is_wrong_is_said_once():
    wrong = Asked("the kernels are wrong")
    with pytest.warns(NumericalWarning, match="the kernels are wrong: plain torch runs instead"):
        assert distrusted(("a",), wrong, "plain torch") == "the kernels are wrong"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert distrusted(("a",), wrong, "plain torch") == "the kernels are wrong"
    assert wrong.count == 1


def test_a_graph_that_is_being_captured_goes_without_and_is_asked_for_later(monkeypatch):
    wrong = Asked("the kernels are wrong")
    with monkeypatch.context() as during:
        during.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert distrusted(("a",), wrong, "torch") is None
    with pytest.warns(NumericalWarning):
        assert distrusted(("a",), wrong, "torch") is not None


@pytest.mark.parametrize("off", ["", "0"])
def test_it_can_be_turned_off(monkeypatch, off):
    monkeypatch.setenv("REBIND_SELF_CHECK", off)
    wrong = Asked("the kernels are wrong")
    assert distrusted(("a",), wrong, "torch") is None
    assert wrong.count == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_no_difference_and_more_is(dtype):
    true = noise((50,), torch.empty(0), 0).double()
    like = torch.empty(0, dtype=dtype)

    def told(share):
        found = true * (1 + share * trust.ROUNDING[dtype])
        return difference("the kernels", lambda: [found, None], lambda: [true, None], like, "plain torch")

    assert told(0.9) is None
    assert "the kernels are wrong on cpu: they differ from plain torch by" in told(1.1)


def test_what_is_not_finite_differs():
    true = torch.ones(3, dtype=torch.float64)
    found = difference("it", lambda: [true / 0], lambda: [true], torch.empty(0), "plain torch")
    assert found == "it are wrong on cpu: they differ from plain torch by inf"


def test_noise_leaves_the_programs_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(noise((4,), torch.empty(0), 5), noise((4,), torch.empty(0), 5))
    assert torch.equal(torch.rand(2), expected)
