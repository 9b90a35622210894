"""Kernels are compared once before they are trusted, and never while a CUDA graph is being recorded."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from rebind.errors import NumericalWarning
from rebind.ops import convolution, entropy, gated, kernels, norm
from rebind.ops.kernels import TOLERANCE, compare_results, draw, find_fault, forget_faults, usable


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    forget_faults()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("REBIND_SELF_CHECK", raising=False)


class Comparison:
    def __init__(self, answer):
        self.answer, self.count = answer, 0

    def __call__(self):
        self.count += 1
        return self.answer


def test_a_kind_is_asked_for_once():
    right, other = Comparison(None), Comparison(None)
    assert [find_fault(("a",), right, "torch") for _ in range(3)] == [None] * 3
    find_fault(("b",), other, "torch")
    assert (right.count, other.count) == (1, 1)


def test_what_is_wrong_is_said_once():
    wrong = Comparison("the kernels are wrong")
    with pytest.warns(NumericalWarning, match="the kernels are wrong; plain torch runs instead"):
        assert find_fault(("a",), wrong, "plain torch") == "the kernels are wrong"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_fault(("a",), wrong, "plain torch") == "the kernels are wrong"
    assert wrong.count == 1


def test_a_graph_that_is_being_captured_goes_without_and_is_asked_for_later(monkeypatch):
    wrong = Comparison("the kernels are wrong")
    with monkeypatch.context() as during:
        during.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert find_fault(("a",), wrong, "torch") is None
    with pytest.warns(NumericalWarning):
        assert find_fault(("a",), wrong, "torch") is not None


@pytest.mark.parametrize("off", ["", "0"])
def test_it_can_be_turned_off(monkeypatch, off):
    monkeypatch.setenv("REBIND_SELF_CHECK", off)
    wrong = Comparison("the kernels are wrong")
    assert find_fault(("a",), wrong, "torch") is None
    assert wrong.count == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_no_difference_and_more_is(dtype):
    true = draw((50,), torch.empty(0), 0).double()
    like = torch.empty(0, dtype=dtype)

    def fault(share):
        off = true * (1 + share * TOLERANCE[dtype])
        return compare_results("The kernels", lambda: [off, None], lambda: [true, None], like)

    assert fault(0.9) is None
    assert "The kernels are wrong on cpu: they differ from plain torch by" in fault(1.1)
    assert "by inf" in compare_results("The kernels", lambda: [true / 0], lambda: [true], like)


def test_drawing_leaves_the_programs_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(draw((4,), torch.empty(0), 5), draw((4,), torch.empty(0), 5))
    assert torch.equal(torch.rand(2), expected)


def rows(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")


OPERATIONS = {
    "convolution": lambda dtype: convolution.compare_kernels(rows(2, 5, 4, dtype=dtype), rows(4, 3), [3, 1]),
    "entropy": lambda dtype: entropy.compare_kernels(rows(2, 3, dtype=dtype)),
    "gated": lambda dtype: gated.compare_kernels(rows(2, 3, dtype=dtype)),
    "norm": lambda dtype: norm.compare_kernels(rows(2, 3, dtype=dtype), None, rows(3), dtype, False),
    "norm of a sum": lambda dtype: norm.compare_kernels(rows(2, 64), rows(2, 64, dtype=dtype), rows(64), dtype, False),
    "norm in groups": lambda dtype: norm.compare_kernels(rows(2, 3, dtype=dtype), None, 0.3, dtype, True),
}


@pytest.mark.parametrize("name", OPERATIONS)
class TestOperations:
    """Each compares its kernels with plain torch, on a GPU or in Triton's interpreter."""

    @pytest.fixture
    def module(self, name):
        pytest.importorskip("triton")
        return getattr(kernels.load_kernels(), name.split()[0])

    @pytest.mark.usefixtures("module")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_kernels_that_are_right_are_trusted(self, name, dtype):
        assert OPERATIONS[name](dtype) is None

    @pytest.mark.parametrize("wrong", ["forward", "backward"])
    def test_kernels_that_are_wrong_are_not(self, name, module, wrong, monkeypatch):
        """As if the compiler had mixed up the signs of the last result."""
        wrong = "row_losses" if name == "entropy" else wrong
        right = getattr(module, wrong)

        def broken(*tensors):
            results = right(*tensors)
            if isinstance(results, torch.Tensor):
                return -results
            place = 1 if "norm" in name else len(results) - 1  # the sum, or the weight's gradient, may be missing
            place = 0 if "norm" in name and wrong == "backward" else place
            return tuple(-result if at == place else result for at, result in enumerate(results))

        monkeypatch.setattr(module, wrong, broken)
        assert "differ from plain torch by" in OPERATIONS[name](torch.float32)

    def test_kernels_that_do_not_compile_are_not(self, name, module, monkeypatch):
        def fail(*tensors):
            raise RuntimeError("no compiler")

        monkeypatch.setattr(module, "row_losses" if name == "entropy" else "forward", fail)
        assert "do not compile (no compiler)" in OPERATIONS[name](torch.float32)


class TestUsable:
    """For what looks like a tensor on a GPU."""

    def tensor(self, dtype=torch.bfloat16, size=6, is_cuda=True):
        return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="cuda:0", numel=lambda: size)

    @pytest.fixture(autouse=True)
    def _triton(self):
        pytest.importorskip("triton")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_where_they_agree(self, dtype):
        assert usable(self.tensor(dtype), ("a",), lambda: None)

    @pytest.mark.parametrize("other", [{"dtype": torch.float64}, {"size": 0}, {"is_cuda": False}], ids=str)
    def test_not_for_what_they_do_not_take(self, other):
        assert not usable(self.tensor(**other), ("a",), lambda: pytest.fail("compared"))

    def test_not_without_triton(self, monkeypatch):
        monkeypatch.setattr(kernels, "load_kernels", lambda: "triton is not installed")
        assert not usable(self.tensor(), ("a",), lambda: None)

    def test_not_where_they_are_wrong_for_that_dtype(self):
        with pytest.warns(NumericalWarning, match="they are wrong; plain torch runs instead"):
            assert not usable(self.tensor(), ("a",), lambda: "they are wrong")
        assert usable(self.tensor(torch.float16), ("a",), lambda: None)
