"""Bad input is refused with what was got, what was expected and what to do; and who runs what is left."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.ops import dispatch, explain, inputs, scan
from tests.ops.problems import problem

GOOD = problem(10)
NAN = torch.full((2, 10, 3), float("nan"), dtype=torch.float64)


def call(options=None, **tensors):
    given = {**GOOD.tensors, **tensors}
    return scan(given.pop("q"), given.pop("k"), given.pop("v"), **given, **(options or {}))


def ones(*shape, dtype=torch.float64, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        ({"q": [1.0]}, InputError, r"q is a list, expected a tensor \[B, T, Hk, Dk\]"),
        ({"v": ones(2, 10, 5)}, ShapeError, r"v has shape \[2, 10, 5\], expected \[B, T, H, Dv\]"),
        ({"k": ones(2, 10, 3, 7)}, ShapeError, "expected the same shape"),
        ({"v": ones(2, 9, 3, 5)}, ShapeError, "the same batch and length"),
        ({"v": ones(2, 10, 4, 5)}, ShapeError, "v has 4 heads and k 3, expected a multiple"),
        ({"v": ones(2, 10, 3, 0)}, ShapeError, "values 0 wide, expected 1 or more"),
        ({"q": ones(2, 10, 3, 6, dtype=torch.int64)}, InputError, "expected float64, float32, bfloat16 or float16"),
        ({"v": ones(2, 10, 3, 5, dtype=torch.float32)}, InputError, "v has dtype torch.float32 and q torch.float64"),
        ({"v": ones(2, 10, 3, 5, device="meta")}, InputError, "v is on meta .* expected one device"),
        ({"erase": ones(2, 10, 3, device="meta")}, InputError, "erase is on meta .* move it with"),
        ({"erase": 0.5}, InputError, "erase is a float, expected a tensor .* torch.full"),
        ({"erase": ones(2, 10)}, ShapeError, r"erase is \[2, 10\], expected one number a token and value head"),
        ({"write": ones(2, 10, 3, dtype=torch.int64)}, InputError, "write has dtype torch.int64"),
        ({"state": ones(2, 3, 6, 5)}, ShapeError, r"expected one \[Dv, Dk\] matrix .* \[2, 3, 5, 6\]"),
        ({"state": ones(2, 3, 5, 6, dtype=torch.int32)}, InputError, "state has dtype"),
        ({"state": 0}, InputError, "state is a int"),
    ],
)
def test_tensors(tensors, error, match):
    with pytest.raises(error, match=match):
        call(**tensors)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"chunk": 0}, InputError, "chunk is 0, expected a whole number of 1 or more"),
        ({"chunk": 2.0}, InputError, "chunk is 2.0"),
        ({"chunk": True}, InputError, "chunk is True"),
        ({"mini_batch": 4}, InputError, "both log_decay and mini_batch"),
        ({"backend": "cuda"}, UnknownNameError, "unknown backend 'cuda', expected one of auto, chunked"),
        ({"cu_seqlens": torch.tensor([0, 10])}, ShapeError, "a batch of 2, expected a batch of 1"),
    ],
)
def test_options(options, error, match):
    with pytest.raises(error, match=match):
        call(options)


def test_mini_batch_and_chunk():
    t = GOOD.tensors
    with pytest.raises(InputError, match="a mini-batch is the chunk"):
        scan(t["q"], t["k"], t["v"], mini_batch=4, chunk=4)


@pytest.mark.parametrize(
    ("bounds", "error", "match"),
    [
        ([0, 10], InputError, "cu_seqlens is a list"),
        (torch.tensor([0.0, 10.0]), InputError, "expected int32 or int64"),
        (torch.tensor([[0, 10]]), ShapeError, r"expected \[N \+ 1\]"),
        (torch.tensor([], dtype=torch.int64), ShapeError, r"expected \[N \+ 1\]"),
        (torch.tensor([1, 10]), InputError, "runs from 1 to 10, expected 0 to 10"),
        (torch.tensor([0, 9]), InputError, "runs from 0 to 9, expected 0 to 10"),
        (torch.tensor([0, 6, 4, 10]), InputError, "falls from 6 to 4 at entry 2"),
        (torch.tensor([0, -1, 10]), InputError, "falls from 0 to -1 at entry 1"),
        (torch.tensor([0, 10], device="meta"), InputError, "cu_seqlens is on meta"),
    ],
)
def test_boundaries(bounds, error, match):
    t = {name: x[:1] for name, x in GOOD.tensors.items()}
    with pytest.raises(error, match=match):
        scan(t["q"], t["k"], t["v"], cu_seqlens=bounds)


def test_one_state_a_packed_sequence():
    t = {name: x[:1] for name, x in GOOD.tensors.items()}
    with pytest.raises(ShapeError, match=r"\[2, 3, 5, 6\]"):
        scan(t["q"], t["k"], t["v"], cu_seqlens=torch.tensor([0, 4, 10]), state=t["state"])
    _, final = scan(t["q"], t["k"], t["v"], cu_seqlens=torch.tensor([0, 4, 10], dtype=torch.int32))
    assert final.shape == (2, 3, 5, 6)


class TestDebug:
    def test_off_by_default(self):
        assert inputs.DEBUG is False
        out, _ = call(log_decay=NAN)
        assert out.isnan().any()

    @pytest.mark.parametrize(
        ("tensors", "match"),
        [
            ({"erase": NAN}, "erase .* holds 60 NaN"),
            ({"log_decay": NAN}, "log_decay .* holds 60 NaN"),
            ({"log_decay": 0.1 + 0 * GOOD.tensors["erase"]}, "log_decay reaches 0.1, expected ln α ≤ 0"),
            ({"q": float("inf") * GOOD.tensors["q"]}, "q .* infinite"),
            ({"state": float("nan") * GOOD.tensors["state"]}, "state .* NaN"),
        ],
    )
    def test_values_are_looked_at(self, tensors, match, monkeypatch):
        monkeypatch.setattr(inputs, "DEBUG", True)
        with pytest.raises(InputError, match=match):
            call(**tensors)

    def test_forgetting_is_no_mistake(self, monkeypatch):
        monkeypatch.setattr(inputs, "DEBUG", True)
        call(log_decay=torch.full((2, 10, 3), float("-inf"), dtype=torch.float64))


class Fake:
    """Stands in for a backend that takes everything."""

    name = "triton"

    def __init__(self, why=None):
        self.why = why

    def refuses(self, _):
        return self.why


class TestDispatch:
    def test_on_a_cpu_the_chunk_form_runs(self, monkeypatch):
        monkeypatch.setattr(dispatch, "_triton", "triton is not installed")
        t = GOOD.tensors
        found = explain(t["q"], t["k"], t["v"])
        assert found.backend == "chunked"
        assert found.others == {"triton": "triton is not installed", "reference": "slower: a token at a time"}
        assert str(found).splitlines() == [
            "chunked    runs",
            "triton     triton is not installed",
            "reference  slower: a token at a time",
        ]

    def test_asked_for_by_name(self, monkeypatch):
        monkeypatch.setattr(dispatch, "_triton", Fake("no such device"))
        t = GOOD.to(torch.float32).tensors
        found = explain(t["q"], t["k"], t["v"], backend="reference")
        assert found.backend == "reference"
        assert found.others == {"triton": "no such device", "chunked": "'reference' was asked for"}
        with pytest.raises(InputError, match="backend 'triton' cannot run this: no such device; use backend='auto'"):
            explain(t["q"], t["k"], t["v"], backend="triton")

    def test_kernels_are_chosen_by_themselves_on_cuda_only(self, monkeypatch):
        monkeypatch.setattr(dispatch, "_triton", Fake())
        t = GOOD.to(torch.float32).tensors
        found = explain(t["q"], t["k"], t["v"])
        assert found.backend == "chunked"
        assert "by name" in found.others["triton"]
        assert explain(t["q"], t["k"], t["v"], backend="triton").backend == "triton"

    def test_float64_never_goes_to_the_kernels(self, monkeypatch):
        monkeypatch.setattr(dispatch, "_triton", Fake())
        t = GOOD.tensors
        assert "float64" in explain(t["q"], t["k"], t["v"]).others["triton"]

    def test_missing_kernels_are_said(self, monkeypatch):
        monkeypatch.setattr(dispatch, "_triton", None)
        monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
        t = GOOD.tensors
        assert explain(t["q"], t["k"], t["v"]).others["triton"] == "triton is not installed"
