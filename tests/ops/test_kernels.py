"""What the kernels have beside the contract of a backend: segments, one token at a time, a check of themselves."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from rebind.errors import NumericalWarning
from rebind.ops import step, trust
from rebind.ops.inputs import checked
from tests.ops.problems import COEFFICIENTS, compare, home, outcome, problem, tolerance_of
from tests.support import Draw, assert_close

pytest.importorskip("triton")

import triton
import triton.language as tl

from rebind.ops.step import _step
from rebind.ops.triton import TRITON, selfcheck, tiles
from rebind.ops.triton.calls import aligned, call, compile_ahead
from rebind.ops.triton.decode import decode
from rebind.ops.triton.launch import INTERPRETED, Plan

SINGLE = tolerance_of(torch.float32)


@pytest.mark.parametrize("coefficients", [COEFFICIENTS, ("log_decay",), ("erase",)], ids=str)
@pytest.mark.parametrize("state", [True, False])
def test_a_sequence_cut_in_segments_is_the_sequence(monkeypatch, coefficients, state):
    """Few heads on a large device: segments run side by side, from states that their composed maps give."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 64)
    monkeypatch.setattr(tiles, "SHORTEST", 1)
    case = problem(200, 6, 40, batch=1, heads=2, coefficients=coefficients, state=state).to(torch.float32)
    assert Plan.of(checked(**{name: x.to(home("triton")) for name, x in case.tensors.items()})).segments > 4
    compare(outcome(case, "triton"), outcome(case.double(), "reference"), SINGLE)


@pytest.mark.parametrize("widths", [(32, 16), (64, 16), (16, 32), (48, 17)], ids=str)
def test_segments_of_heads_with_wider_keys_stay_inside(monkeypatch, widths):
    """A segment's map has as many columns as keys are wide: those must not be looked for in the values."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 64)
    monkeypatch.setattr(tiles, "SHORTEST", 1)
    case = problem(100, *widths, batch=1, heads=2).to(torch.float32)
    compare(outcome(case, "triton"), outcome(case.double(), "reference"), SINGLE)


@pytest.mark.parametrize("length", [1.0, 4.0, 60.0] if INTERPRETED else [1.0, 4.0, 1000.0])
def test_keys_that_enlarge_are_solved_for_in_wider_numbers(length):
    """In half precision T₀ is found in float16, unless ε‖k‖² > 2 in a chunk: then its entries may grow."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # which the interpreter does not have
    case = problem(150, 16, 16, coefficients=("erase", "write")).to(dtype)
    case.tensors["k"][:, 5] *= length
    case.tensors["v"] /= length**1.5
    case.tensors["erase"][:, 5] = 0.9
    compare(outcome(case, "triton"), outcome(case.double(), "reference"), 2 * tolerance_of(dtype))


@pytest.mark.parametrize("erase", [-0.9, -1.9])
def test_keys_that_are_erased_the_wrong_way_are_too(erase):
    """I − ε k kᵀ lengthens what it is applied to where ε < 0, by (1 + |ε|)⁶⁴ in a chunk; a decay holds the states."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    case = problem(130, 16, 16, coefficients=("log_decay", "erase", "write")).to(dtype)
    case.tensors["k"][:] = torch.nn.functional.normalize(case.tensors["k"][:, :1].float(), dim=-1).to(dtype)
    case.tensors["erase"].fill_(erase)
    case.tensors["log_decay"].fill_(-1.2)
    compare(outcome(case, "triton"), outcome(case.double(), "reference"), 2 * tolerance_of(dtype))


@pytest.mark.skipif(INTERPRETED, reason="needs bfloat16, which Triton's interpreter does not have")
def test_a_long_key_that_is_hardly_erased_is_solved_for_in_wider_numbers_too():
    """Its ε‖k‖² is small, and the entry it makes with the key behind it, ε_i k_i·k_j, is beyond float16."""
    case = problem(150, 16, 16, coefficients=("erase", "write")).to(torch.bfloat16)
    case.tensors["k"][:, 6] = case.tensors["k"][:, 5]
    case.tensors["k"][:, 5] *= 1e6
    case.tensors["erase"][:, 5] = 1e-13
    case.tensors["v"] /= 1e6
    compare(outcome(case, "triton"), outcome(case.double(), "reference"), 2 * tolerance_of(torch.bfloat16))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_a_kernel_that_reads_past_the_end_is_caught():
    x, out = torch.zeros(40), torch.zeros(64)
    with pytest.raises(Exception, match="24 of 64 elements of a tile are outside"):
        _copy[(1,)](x, out, 64)
    _copy[(1,)](x, out, 40)


@triton.jit
def _copy(x, out, length):
    at = tl.arange(0, 64)
    tl.store(out + at, tl.load(x + at, mask=at < length, other=0.0))


@pytest.mark.parametrize("widths", [(1, 1), (24, 40), (64, 64), (200, 16)], ids=str)
@pytest.mark.parametrize("given", [COEFFICIENTS, ()], ids=["gated", "plain"])
def test_one_token_is_the_plain_step(widths, given):
    draw, there = Draw(7), home("triton")
    d_k, d_v = widths
    q, k = (draw.unit(3, 2, d_k).float().to(there) for _ in range(2))
    v, state = draw.normal(3, 4, d_v).float().to(there), draw.normal(3, 4, d_v, d_k).float().to(there)
    numbers = [draw.uniform(3, 4).float().to(there) if name in given else None for name in COEFFICIENTS]
    numbers[0] = None if numbers[0] is None else -numbers[0]
    other = state.clone()
    assert_close(decode(q, k, v, state, *numbers), _step(q, k, v, other, *numbers), 1e-5)
    assert_close(state, other, 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_decoding_is_the_scan():
    case = problem(20, 24, 16).to(torch.float32)
    expected = outcome(case, "chunked")
    tensors = {name: x.cuda() for name, x in case.tensors.items()}
    state = tensors.pop("state")
    outs = [step(**{name: x[:, t] for name, x in tensors.items()}, state=state) for t in range(20)]
    assert_close(torch.stack(outs, 1).cpu(), expected["out"], 1e-4)
    assert_close(state.cpu(), expected["final"], 1e-4)


def _inputs(dtype=torch.float32, **changes):
    tensors = dict(problem(70, 8, 8).to(dtype).tensors, **changes)
    return checked(**{name: x.to(home("triton")) for name, x in tensors.items()})


def test_kernels_that_are_right_are_trusted():
    assert selfcheck._compare(_inputs()) is None


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_kernels_that_are_wrong_are_not(monkeypatch, wrong):
    """As if the compiler had mixed up the signs of one result."""
    right = getattr(Plan, wrong)

    def broken(plan, *args):
        first, second, *rest = right(plan, *args)
        return first, -second, *rest

    monkeypatch.setattr(Plan, wrong, broken)
    reason = selfcheck._compare(replace(_inputs(), keep=True))
    assert reason is not None
    assert "differ from the reference by" in reason


def test_what_is_checked_is_what_will_run(monkeypatch):
    """The tiles of the problem at hand, and segments where it is cut: a wrong map of a segment is found."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 64)
    monkeypatch.setattr(tiles, "SHORTEST", 1)
    inputs = _inputs()
    assert selfcheck._compare(inputs) is None
    seen, right = [], Plan._maps

    def wrong(plan, *args):
        seen.append(plan.tiles)
        return 2 * right(plan, *args)

    monkeypatch.setattr(Plan, "_maps", wrong)
    assert "differ from the reference by" in selfcheck._compare(inputs)
    assert {*seen} == {tiles.Tiles.of(inputs)}  # on a GPU more than once: everything is compiled first


def test_the_check_is_made_in_full_precision(monkeypatch):
    """Segments are composed by torch's products, which autocast would round by far more than kernels may be off."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 64)
    monkeypatch.setattr(tiles, "SHORTEST", 1)
    inputs = replace(_inputs(), log_decay=None)  # nothing fades: what a segment begins with is seen to its end
    with torch.autocast(inputs.v.device.type, dtype=torch.bfloat16):
        assert selfcheck._compare(inputs) is None
    asked = []

    @contextmanager
    def noted(on):
        asked.append(on)
        yield

    monkeypatch.setattr(selfcheck, "tensor_float", noted)
    selfcheck._compare(inputs)
    assert asked == [False]


def test_kernels_that_do_not_compile_are_not_trusted(monkeypatch):
    def fail(plan):
        raise RuntimeError("ptxas died")

    monkeypatch.setattr(Plan, "forward", fail)
    assert "do not compile (ptxas died)" in selfcheck._compare(_inputs())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_wrong_kernels_give_way_aloud(monkeypatch):
    from rebind.ops import scan

    monkeypatch.setattr(trust, "_known", {})
    monkeypatch.setattr(selfcheck, "_compare", lambda inputs: "the kernels are wrong")
    inputs = _inputs()
    with pytest.warns(NumericalWarning, match="the kernels are wrong: the slower chunked backend runs instead"):
        out, _ = scan(inputs.q, inputs.k, inputs.v)
    assert_close(out.cpu(), scan(inputs.q.cpu(), inputs.k.cpu(), inputs.v.cpu())[0], 1e-4)


def test_what_kernels_refuse():
    refuses = lambda **changes: TRITON.refuses(_inputs(**changes))
    assert refuses() is None
    wide = torch.zeros(2, 70, 3, 300)
    assert "300 and 8 wide" in TRITON.refuses(_inputs(q=wide, k=wide, state=torch.zeros(2, 3, 8, 300)))
    assert "float64" in TRITON.refuses(_inputs(torch.float64))
    narrow = TRITON.refuses(_inputs(torch.bfloat16))
    assert "bits of bfloat16" in narrow if INTERPRETED else narrow is None


def test_a_kernel_is_for_the_tensors_that_are_aligned():
    """Compiled where one tensor begins anywhere, it may count on the others: it is not the one for another of them."""
    whole, odd = torch.zeros(16), torch.zeros(17)[1:]
    assert aligned(whole, odd) != aligned(odd, whole)
    assert aligned(whole, None) == (True, True)


class _Kernel:
    """What `call` needs of a kernel, and a note of what it was asked."""

    arg_names = ("x", "SIZE")

    def __init__(self, problem: Exception | None = None) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.problem = problem

    def warmup(self, *given: object, grid: tuple[int, ...], **constants: object) -> None:
        self.asked.append(("compile", given, grid, constants))
        if self.problem is not None:
            raise self.problem

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *given, **constants: self.asked.append(("run", given, grid, constants))


def test_kernels_are_compiled_ahead_and_not_run():
    kernel = _Kernel()
    compile_ahead(lambda: call(kernel, (3,), (), (1,), warps=4, SIZE=2))
    assert kernel.asked == [("compile", (1,), (3,), {"SIZE": 2, "num_warps": 4})]
    call(kernel, (3,), (), (1,), warps=4, SIZE=2)
    assert kernel.asked[1] == ("run", (1,), (3,), {"SIZE": 2, "num_warps": 4})


def test_what_does_not_compile_ahead_is_left_to_the_call():
    kernel = _Kernel(RuntimeError("no"))
    compile_ahead(lambda: call(kernel, (3,), (), (1,), warps=4, SIZE=2))
    call(kernel, (3,), (), (1,), warps=4, SIZE=2)
    assert [what for what, *_ in kernel.asked] == ["compile", "run"]
