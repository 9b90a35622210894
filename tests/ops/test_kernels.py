"""What the kernels have beside the contract of a backend: segments, one token at a time, a check of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rebind.errors import NumericalWarning
from rebind.ops import scan, step
from rebind.ops.chunked.plain import gradients
from rebind.ops.inputs import ScanInputs
from rebind.ops.kernels import forget_faults, interpreted
from rebind.ops.reference import recurrence
from tests.ops.problems import CHANNELS, COEFFICIENTS, compare, home, outcome, problem, tolerance_of
from tests.support import Draw, assert_close

pytest.importorskip("triton")

import triton
import triton.language as tl

from rebind.ops.triton import TRITON, selfcheck
from rebind.ops.triton.calls import call, compile_ahead, kind_of
from rebind.ops.triton.channel_plan import plan_of
from rebind.ops.triton.decode import decode
from rebind.ops.triton.launch import LaunchPlan
from rebind.ops.triton.tiles import Tiles, segments_of

INTERPRETED = interpreted()
SINGLE = tolerance_of(torch.float32)


def compare_segments(case, segments):
    """Run a scan in segments, which a few long heads on a large device need, and compare it with the reference."""
    case = case.to(torch.float32)

    def results(run, tensors, dtype):
        inputs = replace(ScanInputs(**tensors).checked(), keep=True)
        out, final, saved, backward = run(inputs)
        draw = Draw(99)
        slopes = draw.normal(*out.shape).to(out), draw.normal(*final.shape).to(final)
        return dict(enumerate(x.detach().cpu() for x in (out, final, *backward(saved, *slopes)) if x is not None))

    def kernels(inputs):
        plan = plan_of(inputs, Tiles.of(inputs), segments)
        return *plan.forward(), plan.backward

    def reference(inputs):
        return *recurrence(inputs), [], lambda saved, *slopes: gradients(inputs, *slopes)

    there = {name: x.to(home("triton")) for name, x in case.tensors.items()}
    with torch.no_grad():
        got = results(kernels, there, torch.float32)
    compare(got, results(reference, case.double().tensors, torch.float64), SINGLE)


@pytest.mark.parametrize("coefficients", [COEFFICIENTS, ("log_decay",), ("erase",), CHANNELS], ids=str)
@pytest.mark.parametrize("state", [True, False])
def test_a_sequence_cut_in_segments_is_the_sequence(coefficients, state):
    """Segments run side by side, from states that their composed maps give."""
    compare_segments(problem(150, 6, 40, batch=1, heads=2, coefficients=coefficients, state=state), 5)


@pytest.mark.parametrize("widths", [(32, 16), (64, 16), (16, 32), (48, 17)], ids=str)
def test_segments_of_heads_with_wider_keys_stay_inside(widths):
    """A segment's map has as many columns as keys are wide: those must not be looked for in the values."""
    compare_segments(problem(70, *widths, batch=1, heads=1), 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_few_heads_and_long_sequences_are_cut():
    x = torch.zeros(1, 2**16, 1, 16, device="cuda")
    inputs = ScanInputs(x, x, x)
    assert segments_of(inputs, Tiles.of(inputs)) > 1


@pytest.mark.parametrize("length", [1.0, 4.0, 60.0] if INTERPRETED else [1.0, 4.0, 1000.0])
def test_keys_that_enlarge_are_solved_for_in_wider_numbers(length):
    """In half precision T₀ is found in float16, unless ε‖k‖² > 2 in a chunk: then its entries may grow."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # which the interpreter does not have
    size = {"length": 80, "batch": 1, "heads": 1} if INTERPRETED else {"length": 150}
    case = problem(d_k=16, d_v=16, coefficients=("erase", "write"), **size).to(dtype)
    case.tensors["k"][:, 5] *= length
    case.tensors["v"] /= length**1.5
    case.tensors["erase"][:, 5] = 0.9
    compare(outcome(case, "triton"), outcome(case.double(), "reference"), 2 * tolerance_of(dtype))


@pytest.mark.parametrize("erase", [-0.9, -1.9])
def test_keys_that_are_erased_the_wrong_way_are_too(erase):
    """I − ε k kᵀ lengthens what it is applied to where ε < 0, by (1 + |ε|)⁶⁴ in a chunk; a decay holds the states."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    case = problem(80, 16, 16, batch=1, heads=1, coefficients=("log_decay", "erase", "write")).to(dtype)
    case.tensors["k"][:] = torch.nn.functional.normalize(case.tensors["k"][:, :1].float(), dim=-1).to(dtype)
    case.tensors["erase"].fill_(erase)
    case.tensors["log_decay"].fill_(-1.2)
    compare(outcome(case, "triton"), outcome(case.double(), "reference"), 2 * tolerance_of(dtype))


@pytest.mark.skipif(INTERPRETED, reason="needs bfloat16, which Triton's interpreter does not have")
def test_a_long_key_that_is_hardly_erased_is_solved_for_in_wider_numbers_too():
    """Its ε‖k‖² is small, and the entry it makes with the key behind it, ε_i k_i·k_j, is beyond float16."""
    case = problem(80, 16, 16, batch=1, heads=1, coefficients=("erase", "write")).to(torch.bfloat16)
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
@pytest.mark.parametrize(
    "names", [COEFFICIENTS, (), CHANNELS, ("log_decay", "erase_key"), ("probe", "erase_key", "write")], ids=str
)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_one_token_is_the_plain_step(widths, names, before):
    draw, there = Draw(7), home("triton")
    d_k, d_v = widths
    q, k = (draw.unit(3, 2, d_k).float().to(there) for _ in range(2))
    v, state = draw.normal(3, 4, d_v).float().to(there), draw.normal(3, 4, d_v, d_k).float().to(there)
    shapes = dict.fromkeys(COEFFICIENTS, (3, 4)) | {"log_decays": (3, 4, d_k)}
    shapes |= dict.fromkeys(("probe", "erase_key"), (3, 2, d_k))
    drawn = {name: draw.uniform(*shapes[name]).float().to(there) for name in names}
    others = {name.replace("decays", "decay"): -x if "decay" in name else x for name, x in drawn.items()}
    on_cpu = {name: x.cpu() for name, x in others.items()}
    other = state.cpu().clone()
    out = step(q.cpu(), k.cpu(), v.cpu(), other, **on_cpu, probe_before_decay=before)
    arguments = {**dict.fromkeys(COEFFICIENTS), **others}
    assert_close(decode(q, k, v, state, **arguments, probe_before_decay=before).cpu(), out, 1e-5)
    assert_close(state.cpu(), other, 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_decoding_is_the_scan():
    case = problem(20, 24, 16).to(torch.float32)
    expected = outcome(case, "chunked")
    tensors = {name: x.cuda() for name, x in case.tensors.items()}
    state = tensors.pop("state")
    outs = [step(**{name: x[:, t] for name, x in tensors.items()}, state=state) for t in range(20)]
    assert_close(torch.stack(outs, 1).cpu(), expected["out"], 1e-4)
    assert_close(state.cpu(), expected["final"], 1e-4)


def inputs_of(dtype=torch.float32, **changes):
    tensors = dict(problem(70, 8, 8).to(dtype).tensors, **changes)
    return ScanInputs(**{name: x.to(home("triton")) for name, x in tensors.items()}).checked()


def test_kernels_for_channels_are_compared_with_channels():
    case = problem(70, 8, 8, coefficients=CHANNELS).to(torch.float32)
    inputs = ScanInputs(**{name: x.to(home("triton")) for name, x in case.tensors.items()}, keep=True)
    assert selfcheck.compare_kernels(inputs) is None


@pytest.mark.parametrize("cut", [True, False])
def test_kernels_that_are_right_are_trusted(cut):
    """In full precision: autocast would round the products that compose segments by more than kernels may be off."""
    inputs = replace(inputs_of(), log_decay=None)  # nothing fades: a segment's first state is seen to its end
    with torch.autocast(inputs.v.device.type, dtype=torch.bfloat16):
        assert selfcheck.compare_kernels(inputs, cut=cut) is None


def test_kernels_are_compared_inside_of_a_registered_operator():
    """There torch.compile calls them first, and autograd records nothing."""
    with torch._C._AutoDispatchBelowAutograd():
        assert selfcheck.compare_kernels(replace(inputs_of(), keep=True)) is None


@pytest.mark.parametrize("wrong", ["forward", "backward", "segments"])
def test_kernels_that_are_wrong_are_not(monkeypatch, wrong):
    """As if the compiler had mixed up the signs of one result."""
    name = "backward" if wrong == "backward" else "forward"
    right, seen = getattr(LaunchPlan, name), []

    def broken(plan, *args):
        seen.append(plan.tiles)
        first, second, *rest = right(plan, *args)
        return first, second if wrong == "segments" and plan.segments == 1 else -second, *rest

    monkeypatch.setattr(LaunchPlan, name, broken)
    inputs = replace(inputs_of(), keep=True)
    fault = selfcheck.compare_kernels(inputs, cut=wrong == "segments")
    assert "differ from plain torch by" in fault
    assert {*seen} == {Tiles.of(inputs)}, "the tiles of the problem at hand"


def test_kernels_that_do_not_compile_are_not_trusted(monkeypatch):
    def fail(plan):
        raise RuntimeError("ptxas died")

    monkeypatch.setattr(LaunchPlan, "forward", fail)
    assert "do not compile (ptxas died)" in selfcheck.compare_kernels(inputs_of())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_wrong_kernels_give_way_with_a_warning(monkeypatch):
    forget_faults()
    monkeypatch.setattr(selfcheck, "compare_kernels", lambda inputs, cut: "the kernels are wrong")
    inputs = inputs_of()
    with pytest.warns(NumericalWarning, match="the kernels are wrong; the slower chunked backend runs instead"):
        out, _ = scan(inputs.q, inputs.k, inputs.v)
    forget_faults()
    assert_close(out.cpu(), scan(inputs.q.cpu(), inputs.k.cpu(), inputs.v.cpu())[0], 1e-4)


def test_what_kernels_refuse():
    assert TRITON.refuses(inputs_of()) is None
    wide = torch.zeros(2, 70, 3, 300)
    assert "300 and 8 wide" in TRITON.refuses(inputs_of(q=wide, k=wide, state=torch.zeros(2, 3, 8, 300)))
    assert "float64" in TRITON.refuses(inputs_of(torch.float64))
    narrow = TRITON.refuses(inputs_of(torch.bfloat16))
    assert "bits of bfloat16" in narrow if INTERPRETED else narrow is None
    before = replace(inputs_of(torch.float16), probe_before_decay=True)
    assert "overflows float16" in TRITON.refuses(before)
    before = replace(inputs_of(torch.float16), probe_before_decay=True)
    assert "overflows float16" in TRITON.refuses(before)
    before = replace(inputs_of(torch.float16), probe_before_decay=True)
    assert "overflows float16" in TRITON.refuses(before)


def test_a_kernel_is_for_the_tensors_that_are_aligned():
    """Compiled where one tensor begins anywhere, it may count on the others: it is not the one for another of them."""
    whole, odd = torch.zeros(16), torch.zeros(17)[1:]
    assert kind_of(whole, odd) != kind_of(odd, whole)
    assert kind_of(whole, None)[2] is None


class _Kernel:
    """What `call` needs of a kernel, and a record of its calls."""

    arg_names = ("x", "SIZE")

    def __init__(self, problem: Exception | None = None) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.problem = problem

    def warmup(self, *tensors: object, grid: tuple[int, ...], **constants: object) -> None:
        self.calls.append(("compile", tensors, grid, constants))
        if self.problem is not None:
            raise self.problem

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *tensors, **constants: self.calls.append(("run", tensors, grid, constants))


def test_kernels_are_compiled_ahead_and_not_run():
    kernel = _Kernel()
    compile_ahead(lambda: call(kernel, (3,), (), (1,), warps=4, SIZE=2))
    assert kernel.calls == [("compile", (1,), (3,), {"SIZE": 2, "num_warps": 4})]
    call(kernel, (3,), (), (1,), warps=4, SIZE=2)
    assert kernel.calls[1] == ("run", (1,), (3,), {"SIZE": 2, "num_warps": 4})


def test_what_does_not_compile_ahead_is_left_to_the_call():
    kernel = _Kernel(RuntimeError("no"))
    compile_ahead(lambda: call(kernel, (3,), (), (1,), warps=4, SIZE=2))
    call(kernel, (3,), (), (1,), warps=4, SIZE=2)
    assert [what for what, *_ in kernel.calls] == ["compile", "run"]
