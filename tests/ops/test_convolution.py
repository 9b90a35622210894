"""The short convolution: plain torch and kernels against the sum written out."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional

from rebind.errors import InputError, NumericalWarning, ShapeError, UnknownNameError
from rebind.nn.parts.gates import ShortConvolution
from rebind.ops import convolution, short_convolution, split_convolution
from rebind.ops.kernels import forget_faults
from tests.ops.problems import home, tolerance_of
from tests.support import Draw, assert_close, assert_errors, raises

NAMES = ("out", "dx", "d_weight", "d_window")
LENGTHS = (0, 1, 2, 3, 4, 17, 70)  # size − 1 for each size among them, one run and several
WIDTHS = (1, 3, 16, 40)


def direct(x, weight, window):
    """silu(Σ_s w_s seen_{t + s}), term by term."""
    seen, length = torch.cat([window, x], dim=1), x.shape[1]
    terms = [weight[:, s] * seen[:, s : s + length] for s in range(weight.shape[1])]
    return functional.silu(torch.stack(terms).sum(0))


def problem(length, channels, size, *, window=True, rows=2, seed=0):
    draw = Draw(seed)
    tensors = draw.normal(rows, length, channels), draw.normal(channels, size), draw.normal(rows, size - 1, channels)
    return *tensors[:2], tensors[2] * float(window)


def outcome(function, tensors):
    """The output, and the gradients with the same cotangent for every function and dtype."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, Draw(9).normal(*out.shape).to(out))
    return dict(zip(NAMES, (out.detach().cpu(), *(grad.cpu() for grad in grads)), strict=True))


def agree(backend, case, dtype, tolerance=None):
    tensors = [tensor.to(dtype) for tensor in case]
    expected = outcome(direct, [tensor.double() for tensor in tensors])
    there = [tensor.to(home(backend)) for tensor in tensors]
    got = outcome(lambda *given: short_convolution(*given, backend=backend), there)
    for name in NAMES:
        assert got[name].dtype == dtype
        try:
            assert_close(got[name], expected[name], tolerance or tolerance_of(dtype))
        except AssertionError as failure:
            raise AssertionError(f"{name}: {failure}") from None


@pytest.fixture
def poisoned():
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class TestPlain:
    @pytest.mark.parametrize("size", range(1, 6))
    @pytest.mark.parametrize("window", [True, False], ids=["window", "zeros"])
    def test_is_the_sum_written_out(self, size, window):
        for length, channels in product(LENGTHS, WIDTHS):
            agree("torch", problem(length, channels, size, window=window), torch.float64)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_several_blocks(self, dtype):
        channels = convolution.BLOCK // 32  # in blocks of 16 tokens, with two rows
        agree("torch", problem(40, channels, 4), dtype, 1e-10 if dtype == torch.float64 else 1e-5)

    @pytest.mark.parametrize("size", [1, 3])
    def test_gradients_of_gradients(self, size):
        leaves = [tensor.requires_grad_() for tensor in problem(4, 2, size)]
        torch.autograd.gradgradcheck(short_convolution, leaves)

    def test_a_whole_may_be_changed_in_place(self):
        x, weight, window = problem(4, 3, 2)
        out = short_convolution(x.requires_grad_(), weight, window)
        expected = 2 * out.detach()
        assert_close(out.mul_(2).detach(), expected)

    def test_a_sequence_in_parts(self):
        x, weight, window = problem(11, 3, 4)
        seen = torch.cat([window, x], dim=1)
        parts = [short_convolution(x[:, a:b], weight, seen[:, a : a + 3]) for a, b in ((0, 2), (2, 9), (9, 11))]
        assert_close(torch.cat(parts, dim=1), short_convolution(x, weight, window))


class TestKernels:
    @pytest.fixture(autouse=True)
    def _triton(self, poisoned):
        pytest.importorskip("triton")

    @pytest.mark.parametrize("size", range(1, 6))
    @pytest.mark.parametrize("length", LENGTHS[1:])
    def test_lengths_and_sizes(self, length, size):
        agree("triton", problem(length, 3, size), torch.float32)

    @pytest.mark.parametrize("channels", [1, 16, 40, 130])
    @pytest.mark.parametrize("window", [True, False], ids=["window", "zeros"])
    def test_channels(self, channels, window):
        agree("triton", problem(17, channels, 4, window=window), torch.float32)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        agree("triton", problem(20, 5, 4), dtype)

    @pytest.mark.parametrize("parts", [(3, 2), (1, 1, 3), (200, 150), (128, 64)], ids=str)
    def test_parts(self, parts):
        """Each is a tensor of its own, and the gradients are those of the whole."""
        tensors = [tensor.to(home("triton"), torch.float32) for tensor in problem(17, sum(parts), 4)]

        def whole(*given):
            made = split_convolution(*given, parts, backend="triton")
            assert all(part.is_contiguous() and part.shape[2] == width for part, width in zip(made, parts, strict=True))
            return torch.cat(made, dim=-1)

        got, expected = outcome(whole, tensors), outcome(direct, [tensor.double() for tensor in tensors])
        for name in NAMES:
            assert_close(got[name], expected[name].cpu(), tolerance_of(torch.float32))

    def test_many_gradients_at_once(self):
        leaves = [tensor.to(home("triton"), torch.float32).requires_grad_() for tensor in problem(4, 3, 2)]
        slopes = Draw(8).normal(5, *leaves[0].shape).to(leaves[0])
        got, true = (
            torch.autograd.grad(function(*leaves), leaves, slopes, is_grads_batched=True)
            for function in (lambda *given: short_convolution(*given, backend="triton"), direct)
        )
        for one, expected in zip(got, true, strict=True):
            assert_close(one, expected, 1e-5)

    def test_a_part_that_nobody_uses(self):
        leaves = [tensor.to(home("triton"), torch.float32).requires_grad_() for tensor in problem(9, 5, 3)]
        first, _ = split_convolution(*leaves, [3, 2], backend="triton")
        got = torch.autograd.grad(first.square().sum(), leaves)
        true = torch.autograd.grad(direct(*leaves)[..., :3].square().sum(), leaves)
        for one, expected in zip(got, true, strict=True):
            assert_close(one, expected, 1e-5)

    def test_the_largest_size(self):
        agree("triton", problem(19, 3, convolution.LARGEST), torch.float32)

    def test_other_strides(self):
        x, weight, window = problem(18, 6, 3)
        case = (x.mT.contiguous().mT, weight.T.contiguous().T, window.mT.contiguous().mT)
        agree("triton", case, torch.float32)

    def test_weights_and_window_keep_their_digits(self):
        """Tokens in half precision, the rest in float32: the sum is that of what was given."""
        x, weight, window = (tensor.to(home("triton"), torch.float32) for tensor in problem(9, 4, 4))
        x = x.bfloat16()
        got = outcome(lambda *given: short_convolution(*given, backend="triton"), (x, weight, window))
        wide = [tensor.double().cpu().requires_grad_() for tensor in (x, weight, window)]
        out = direct(*wide)
        expected = (out, *torch.autograd.grad(out, wide, Draw(9).normal(*x.shape).bfloat16().double()))
        for name, true in zip(NAMES, expected, strict=True):
            narrow = name in ("out", "dx")
            assert got[name].dtype == (torch.bfloat16 if narrow else torch.float32)
            assert_close(got[name], true, tolerance_of(got[name].dtype))

    def test_gradients_of_gradients(self):
        leaves = [tensor.to(home("triton"), torch.float32).requires_grad_() for tensor in problem(6, 3, 3)]

        def second(backend):
            some, others = split_convolution(*leaves, [1, 2], backend=backend)
            first = torch.autograd.grad(some.square().sum() + others.square().sum(), leaves, create_graph=True)
            again = torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)
            return [*first, *again]

        for got, expected in zip(second("triton"), second("torch"), strict=True):
            assert_close(got, expected, 1e-5)

    def test_no_graph_where_none_is_wanted(self):
        leaves = [tensor.to(home("triton"), torch.float32).requires_grad_() for tensor in problem(5, 3, 3)]
        with torch.no_grad():
            assert not short_convolution(*leaves, backend="triton").requires_grad

    @pytest.mark.parametrize(
        "case", [problem(5, 3, 3), [x.float() for x in problem(5, 3, 9)], [x.float() for x in problem(0, 3, 3)]]
    )
    def test_what_they_refuse(self, case):
        """float64, a size beyond 8, and no tokens."""
        with raises(InputError, "backend_refuses"):
            short_convolution(*case, backend="triton")

    def test_registered_operators_keep_torchs_rules(self):
        case = [tensor.to(home("triton"), torch.float32) for tensor in problem(5, 3, 3)]
        leaves = [tensor.clone().requires_grad_() for tensor in case]
        torch.library.opcheck(torch.ops.rebind.short_convolution.default, leaves)
        torch.library.opcheck(
            torch.ops.rebind.short_convolution_backward.default,
            (torch.ones_like(case[0]), *case),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_compiled(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    function = lambda *given: short_convolution(*given, backend=backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (7, 12):
        case = [tensor.to(home(backend), torch.float32) for tensor in problem(length, 3, 4)]
        got, expected = outcome(compiled, case), outcome(function, case)
        for name in NAMES:
            assert_close(got[name], expected[name], 1e-6)


def test_the_registered_operator_falls_back_to_torch():
    case = problem(6, 3, 4)  # float64, which kernels do not take
    got, expected = outcome(torch.ops.rebind.short_convolution, case), outcome(direct, case)
    for name in NAMES:
        assert_close(got[name], expected[name])


class TestAutocast:
    @pytest.mark.parametrize("backend", ["torch", "triton"])
    def test_tokens_are_taken_in_its_dtype(self, backend):
        if backend == "triton":
            pytest.importorskip("triton")
        there = home(backend)
        case = [tensor.to(there, torch.float32) for tensor in problem(9, 3, 4)]

        def narrow(*given):
            with torch.autocast(there, dtype=torch.bfloat16):
                return short_convolution(*given, backend=backend)

        got, expected = outcome(narrow, case), outcome(direct, case)
        assert got["out"].dtype == torch.bfloat16
        for name in NAMES:
            assert name == "out" or got[name].dtype == torch.float32
            assert_close(got[name].float(), expected[name], 3e-2)

    def test_float64_stays(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert short_convolution(*problem(4, 3, 2)).dtype == torch.float64

    def test_a_layer_under_it(self):
        """One token at a time is the sequence, in the dtype of what went in."""
        layer, x = ShortConvolution(5, 4), Draw(3).normal(2, 6, 5).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            (out,), after = layer(x, layer.initial_window(2))
            window, steps = layer.initial_window(2), []
            for t in range(6):
                one, window = layer.step(x[:, t], window)
                steps.append(one)
        assert out.dtype == steps[0].dtype == torch.bfloat16
        assert_close(torch.stack(steps, 1).float(), out.float(), 2e-2)
        assert torch.equal(window, after)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 7])
def test_the_next_window_is_the_last_tokens(length, size):
    layer = ShortConvolution(3, size).double()
    x, _, window = problem(length, 3, size)
    parts, after = layer(x, window, parts=[1, 2])
    assert torch.equal(after, torch.cat([window, x], dim=1)[:, length:])
    masked, same = layer(x, window, torch.ones(2, length, dtype=torch.bool), [1, 2]) if length else (parts, after)
    for one, true in zip(masked, parts, strict=True):
        assert_close(one, true)
    assert torch.equal(same, after)


def test_what_is_refused():
    x, weight, window = problem(5, 3, 4)
    assert_errors(
        (ShapeError, "window_does_not_match", lambda: short_convolution(x, weight, window[:, 1:])),
        (ShapeError, "weight_does_not_match", lambda: short_convolution(x, weight[1:], window)),
        (InputError, "not_floating_point", lambda: short_convolution(x, weight.long(), window)),
        (InputError, "devices_differ", lambda: short_convolution(x, weight.to("meta"), window)),
        (InputError, "not_a_tensor", lambda: short_convolution(x, weight, None)),
        (UnknownNameError, "unknown_backend", lambda: short_convolution(x, weight, window, backend="cuda")),
        (ShapeError, "wrong_parts", lambda: split_convolution(x, weight, window, [x.shape[2], 1])),
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("shape", [(3, 1000, 1536), (2, 70, 40), (1, 300, 129), (5, 3, 8)], ids=str)
    @pytest.mark.parametrize("size", [1, 4, 8])
    def test_is_the_sum_written_out(self, dtype, shape, size):
        rows, length, channels = shape
        agree("triton", problem(length, channels, size, rows=rows), dtype)

    def test_wherever_tensors_begin(self):
        """A kernel compiled for aligned tensors is not called with others."""
        expected = None
        for shift in (0, 1, 2, 3, 4):
            case = []
            for at, tensor in enumerate(problem(40, 64, 4)):
                skipped = shift if at == shift % 3 else 0
                room = torch.empty(tensor.numel() + 8, device="cuda", dtype=torch.bfloat16)
                case.append(room[skipped : skipped + tensor.numel()].view(tensor.shape).copy_(tensor))
            got = short_convolution(*case)
            expected = got if expected is None else expected
            assert torch.equal(got, expected)

    def test_the_same_every_time(self):
        case = [tensor.to("cuda", torch.bfloat16) for tensor in problem(500, 96, 4)]
        first, again = (outcome(short_convolution, case) for _ in range(2))
        assert all(torch.equal(first[name], again[name]) for name in NAMES)

    def test_wrong_kernels_give_way_with_a_warning(self, monkeypatch):
        forget_faults()
        monkeypatch.setattr(convolution, "compare_kernels", lambda *tensors: "the kernels are wrong")
        case = [tensor.to("cuda", torch.float32) for tensor in problem(9, 4, 3)]
        with pytest.warns(NumericalWarning, match="the kernels are wrong; plain torch runs instead"):
            out = short_convolution(*case)
        forget_faults()
        assert_close(out.cpu(), direct(*problem(9, 4, 3)), 1e-4)

    def test_compiled(self):
        torch._dynamo.reset()
        case = [tensor.to("cuda", torch.bfloat16) for tensor in problem(80, 48, 4)]
        got = outcome(torch.compile(short_convolution, fullgraph=True), case)
        for name, expected in outcome(short_convolution, case).items():
            assert_close(got[name], expected, 1e-6)
