"""Bad input is refused with an error that has a code; and which backend runs."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.ops import explain, kernels, scan
from rebind.ops.inputs import ScanInputs, check_values
from tests.ops.problems import home, problem
from tests.support import raises

GOOD = problem(10)
NAN = torch.full((2, 10, 3), float("nan"), dtype=torch.float64)


def call(options=None, **tensors):
    return scan(**{**GOOD.tensors, **tensors}, **(options or {}))


def ones(*shape, dtype=torch.float64, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("tensors", "error", "code"),
    [
        ({"q": [1.0]}, InputError, "not_a_tensor"),
        ({"v": ones(2, 10, 5)}, ShapeError, "wrong_shape"),
        ({"k": ones(2, 10, 3, 7)}, ShapeError, "sequences_do_not_match"),
        ({"v": ones(2, 9, 3, 5)}, ShapeError, "sequences_do_not_match"),
        ({"v": ones(2, 10, 4, 5)}, ShapeError, "heads_do_not_match"),
        ({"v": ones(2, 10, 3, 0)}, ShapeError, "wrong_shape"),
        ({"q": ones(2, 10, 3, 6, dtype=torch.int64)}, InputError, "not_floating_point"),
        ({"v": ones(2, 10, 3, 5, dtype=torch.float32)}, InputError, "wrong_dtype"),
        ({"v": ones(2, 10, 3, 5, device="meta")}, InputError, "devices_differ"),
        ({"erase": ones(2, 10, 3, device="meta")}, InputError, "devices_differ"),
        ({"erase": 0.5}, InputError, "not_a_tensor"),
        ({"erase": ones(2, 10)}, ShapeError, "coefficient_does_not_match"),
        ({"write": ones(2, 10, 3, dtype=torch.int64)}, InputError, "not_floating_point"),
        ({"state": ones(2, 3, 6, 5)}, ShapeError, "state_does_not_match"),
        ({"state": ones(2, 3, 5, 6, dtype=torch.int32)}, InputError, "not_floating_point"),
        ({"state": 0}, InputError, "not_a_tensor"),
    ],
)
def test_tensors(tensors, error, code):
    with raises(error, code):
        call(**tensors)


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        ({"chunk": 0}, InputError, "invalid_chunk"),
        ({"chunk": 2.0}, InputError, "invalid_chunk"),
        ({"chunk": True}, InputError, "invalid_chunk"),
        ({"mini_batch": 0}, InputError, "invalid_mini_batch"),
        ({"mini_batch": 4}, InputError, "mini_batch_conflict"),
        ({"mini_batch": 4, "chunk": 4, "log_decay": None}, InputError, "mini_batch_conflict"),
        ({"backend": "cuda"}, UnknownNameError, "unknown_backend"),
        ({"cu_seqlens": torch.tensor([0, 10])}, ShapeError, "packed_batch"),
    ],
)
def test_options(options, error, code):
    with raises(error, code):
        scan(**{**GOOD.tensors, **options})


@pytest.mark.parametrize(
    ("bounds", "error", "code"),
    [
        ([0, 10], InputError, "invalid_boundaries"),
        (torch.tensor([0.0, 10.0]), InputError, "invalid_boundaries"),
        (torch.tensor([[0, 10]]), ShapeError, "invalid_boundaries"),
        (torch.tensor([], dtype=torch.int64), ShapeError, "invalid_boundaries"),
        (torch.tensor([1, 10]), InputError, "invalid_boundaries"),
        (torch.tensor([0, 9]), InputError, "invalid_boundaries"),
        (torch.tensor([0, 6, 4, 10]), InputError, "invalid_boundaries"),
        (torch.tensor([0, -1, 10]), InputError, "invalid_boundaries"),
        (torch.tensor([0, 10], device="meta"), InputError, "devices_differ"),
    ],
)
def test_boundaries(bounds, error, code):
    t = {name: x[:1] for name, x in GOOD.tensors.items()}
    with raises(error, code):
        scan(t["q"], t["k"], t["v"], cu_seqlens=bounds)


def test_one_state_per_packed_sequence():
    t = {name: x[:1] for name, x in GOOD.tensors.items()}
    with raises(ShapeError, "state_does_not_match"):
        scan(t["q"], t["k"], t["v"], cu_seqlens=torch.tensor([0, 4, 10]), state=t["state"])
    _, final = scan(t["q"], t["k"], t["v"], cu_seqlens=torch.tensor([0, 4, 10], dtype=torch.int32))
    assert final.shape == (2, 3, 5, 6)


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({"erase": NAN}, "not_finite"),
        ({"log_decay": NAN}, "not_finite"),
        ({"log_decay": 0.1 + 0 * GOOD.tensors["erase"]}, "growing_decay"),
        ({"log_decay": 1e-3 + 0 * GOOD.tensors["q"]}, "growing_decay"),
        ({"probe": float("nan") * GOOD.tensors["q"]}, "not_finite"),
        ({"q": float("inf") * GOOD.tensors["q"]}, "not_finite"),
        ({"state": float("nan") * GOOD.tensors["state"]}, "not_finite"),
    ],
)
def test_values_are_read_on_a_cpu(tensors, code):
    with raises(InputError, code):
        call(**tensors)


def test_values_are_not_read_while_compiling():
    torch._dynamo.reset()
    out = torch.compile(lambda q, k, v: scan(q, k, v)[0], fullgraph=True, backend="aot_eager")(
        *(GOOD.tensors[name] * float("nan") for name in "qkv")
    )
    assert out.isnan().any()


def test_forgetting_is_no_mistake():
    check_values(ScanInputs(**{**GOOD.tensors, "log_decay": torch.full_like(NAN, float("-inf"))}))


class TestDispatch:
    """On a CPU. With the interpreter of Triton the kernels run there too, if they are requested."""

    def explain(self, dtype=torch.float32, **options):
        t = GOOD.to(dtype).tensors
        return explain(t["q"], t["k"], t["v"], **options)

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr(kernels, "find_spec", lambda name: None)
        kernels.load_kernels.cache_clear()
        try:
            explanation = self.explain()
            with raises(InputError, "backend_refuses"):
                self.explain(backend="triton")
        finally:
            kernels.load_kernels.cache_clear()
        assert str(explanation).splitlines() == [
            "chunked    runs",
            "triton     triton is not installed",
            "reference  slower: one token at a time",
        ]

    def test_kernels_are_chosen_automatically_on_cuda_only(self):
        pytest.importorskip("triton")
        explanation = self.explain()
        assert explanation.backend == "chunked"
        if kernels.interpreted():
            assert "on CUDA only" in explanation.others["triton"]
            assert self.explain(backend="triton").backend == "triton"

    def test_by_name(self):
        explanation = self.explain(backend="reference")
        assert explanation.backend == "reference"
        assert explanation.others["chunked"] == "'reference' was requested"

    def test_float64_never_goes_to_the_kernels(self):
        pytest.importorskip("triton")
        there = {name: x.double().to(home("triton")) for name, x in GOOD.tensors.items()}
        assert "float64" in explain(there["q"], there["k"], there["v"]).others["triton"]
