"""x + r and its RMSNorm: the formula, gradients of every order, and the kernels in the interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rebind.ops import add_norm, rms_norm
from rebind.ops.kernels import kernels_on_cpu
from rebind.ops.norm import BLOCK, compare_kernels, gated_norm, takes_kernels
from tests.support import Draw, assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-3
SHAPES = [(), (1,), (3,), (2, 5), (19,)]
VIEWS = {  # of 2,000 numbers
    "an expanded group": lambda base: base[:24].view(1, 3, 8).expand(5, 3, 8),
    "expanded rows": lambda base: base[:16].view(2, 1, 8).expand(2, 4, 8),
    "expanded numbers": lambda base: base[:8].view(2, 4, 1).expand(2, 4, 8),
    "groups that overlap": lambda base: base.as_strided((5, 3, 8), (4, 8, 1)),
    "groups an odd way apart": lambda base: base.as_strided((5, 3, 7), (31, 7, 1), 3),
    "groups of one row": lambda base: base.as_strided((5, 1, 8), (31, 999, 1), 3),
    "unevenly spaced groups": lambda base: base.as_strided((3, 5, 2, 8), (300, 31, 8, 1), 3),
    "evenly spaced groups": lambda base: base.as_strided((3, 5, 2, 8), (155, 31, 8, 1), 3),
    "one group, however far": lambda base: base.as_strided((1, 5, 3, 8), (7, 31, 8, 1), 3),
    "a dimension of one": lambda base: base.as_strided((4, 1, 3, 8), (31, 5, 8, 1), 3),
    "rows apart": lambda base: base.as_strided((4, 8), (31, 1), 3),
    "rows apart in groups": lambda base: base.as_strided((4, 3, 8), (70, 20, 1), 3),
    "numbers apart": lambda base: base.as_strided((4, 3, 8), (1, 100, 5)),
    "every other number": lambda base: base[::2][:9],
    "tokens of a few": lambda base: base[: 3 * 9 * 8].view(3, 9, 8)[:, 2:7],
    "heads": lambda base: base[:1920].view(2, 3, 4, 80)[..., 8:56].unflatten(-1, (2, 24)),
}


def formula(x, read, weight):
    total = x if read is None else x + read
    return total, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight


def drawn(shape, width, dtype=torch.float64, read=True):
    draw = Draw(3)
    tensors = draw.normal(*shape, width), draw.normal(*shape, width), draw.normal(width)
    x, more, weight = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    return [x, more if read else None, weight]


def there(*tensors):
    return [tensor for tensor in tensors if tensor is not None]


def moved(tensors, dtype=None):
    """The same as leaves of their own on the device."""
    return [None if one is None else one.detach().to(DEVICE, dtype or one.dtype).requires_grad_() for one in tensors]


def assert_all_close(got, expected, tolerance):
    for one, true in zip(got, expected, strict=True):
        assert_close(one, true, tolerance)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (0,), (2, 0)], ids=str)
def test_it_is_the_formula_with_its_gradients(shape, read):
    given = drawn(shape, 6, read=read)
    slopes = [Draw(seed).normal(*shape, 6) for seed in (4, 5)]
    found, expected = add_norm(*given, EPS), formula(*given)
    assert_all_close(found, expected, 1e-12)
    gradients = (torch.autograd.grad(out, there(*given), slopes) for out in (found, expected))
    assert_all_close(*gradients, 1e-12)


def test_without_a_read_the_sum_is_x_itself():
    x, _, weight = drawn((3,), 4, read=False)
    assert add_norm(x, None, weight, EPS)[0] is x


def test_the_norm_comes_in_the_dtype_that_is_asked_for():
    x, read, weight = drawn((3,), 4, torch.float32)
    total, found = add_norm(x, read.bfloat16(), weight, EPS, torch.bfloat16)
    assert (total.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    total, found = add_norm(x.bfloat16(), read, weight, EPS)
    assert (total.dtype, found.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("size", "weight", "runs"),
    [
        (12, torch.ones(6), True),
        (12, 0.5, True),
        (12, torch.ones(3), False),
        (12, torch.ones(12), False),
        (6 * 2**31, 0.5, False),
    ],
)
def test_what_kernels_take(monkeypatch, size, weight, runs):
    """A weight as wide as the rows, and not too many rows. x looks like float32 rows [2, 6] on a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("REBIND_SELF_CHECK", "0")
    x = SimpleNamespace(
        is_cuda=True, dtype=torch.float32, device="cuda", shape=torch.Size([2, 6]), numel=lambda: size,
        is_contiguous=lambda: True,
    )  # fmt: skip
    assert takes_kernels(x, None, weight, torch.float32) is runs


def kind_of_launch(kernel, tensors, constants):
    """What makes Triton compile a kernel of its own, except for where tensors begin."""
    return (kernel, *(None if tensor is None else tensor.dtype for tensor in tensors), *constants.items())


class TestGatedNorm:
    @pytest.mark.parametrize("rows", [1, 7, BLOCK // 8 + 3])
    def test_it_is_the_formula_with_its_gradients(self, rows):
        draw = Draw(0)
        x, gate, slope = (draw.normal(rows, 8) for _ in range(3))
        leaves = [tensor.requires_grad_() for tensor in (x, gate, draw.normal(8))]

        def formula(x, gate, weight):
            return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight * torch.nn.functional.silu(gate)

        got, expected = gated_norm(*leaves, EPS), formula(*leaves)
        assert_close(got, expected, 1e-12)
        grads = (torch.autograd.grad(out, leaves, slope) for out in (got, expected))
        for one, other in zip(*grads, strict=True):
            assert_close(one, other, 1e-12)

    def test_gradients_of_gradients(self):
        draw = Draw(1)
        leaves = [draw.normal(*size).requires_grad_() for size in ((3, 4), (3, 4), (4,))]
        assert torch.autograd.gradcheck(lambda *x: gated_norm(*x, EPS), leaves)
        assert torch.autograd.gradgradcheck(lambda *x: gated_norm(*x, EPS), leaves)

    def test_rows_that_gate_themselves_with_a_weight_that_does_not_learn(self):
        x, weight = Draw(2).normal(3, 4).requires_grad_(), Draw(3).normal(4)
        assert torch.autograd.gradgradcheck(lambda x: gated_norm(x, x, weight, EPS), [x])
        expected = torch.autograd.grad(gated_norm(x, x, weight, EPS).sum(), x)
        assert_close(torch.autograd.grad(gated_norm(x, x, weight, EPS).sum(), x, create_graph=True)[0], expected[0])


class TestKernels:
    """On a GPU, or in Triton's interpreter."""

    @pytest.fixture(autouse=True)
    def kernels(self):
        kernels = pytest.importorskip("rebind.ops.triton.norm")
        with kernels_on_cpu():
            yield kernels

    @pytest.mark.parametrize("kinds", ["32 32 32", "32 16 16", "16 16 16", "32 32 16"])
    @pytest.mark.parametrize("read", [True, False])
    @pytest.mark.parametrize("width", [1, 7, 256, 300])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_they_are_the_formula(self, shape, width, read, kinds):
        """x, what is added and the norm in float32 or float16; the weight in float32."""
        of_x, of_read, of_norm = ({"32": torch.float32, "16": torch.float16}[kind] for kind in kinds.split())
        x, more, weight = drawn(shape, width, torch.float32, read=read)
        given = [*moved([x], of_x), *moved([more], of_read), *moved([weight])]
        slopes = [Draw(seed).normal(*shape, width).to(DEVICE, kind) for seed, kind in ((4, of_x), (5, of_norm))]
        out = add_norm(*given, EPS, of_norm)
        got = [*out, *torch.autograd.grad(out, there(*given), slopes)]
        wide = moved(given, torch.float64)
        expected = formula(*wide)
        truth = [*expected, *torch.autograd.grad(expected, there(*wide), [slope.double() for slope in slopes])]
        kinds = [of_x, of_norm, *(one.dtype for one in there(*given))]
        for one, true, kind in zip(got, truth, kinds, strict=True):
            assert one.dtype == kind
            assert_close(one.double(), true, 1e-5 if {of_x, of_read, of_norm} == {torch.float32} else 5e-3)

    @pytest.mark.parametrize("used", [0, 1])
    def test_one_of_the_two_may_go_unused(self, used):
        given = moved(drawn((3,), 8, torch.float32))
        found = torch.autograd.grad(add_norm(*given, EPS)[used].square().sum(), given, allow_unused=True)
        true = torch.autograd.grad(formula(*given)[used].square().sum(), given, allow_unused=True)
        assert [one is None for one in found] == [one is None for one in true]
        assert_all_close(there(*found), there(*true), 1e-5)

    def test_many_gradients_at_once(self):
        given = moved(drawn((2, 3), 4, torch.float32))
        slopes = [Draw(seed).normal(5, 2, 3, 4).float().to(DEVICE) for seed in (4, 5)]
        got, true = (
            torch.autograd.grad(call(*given), given, slopes, is_grads_batched=True)
            for call in (lambda *given: add_norm(*given, EPS), formula)
        )
        assert_all_close(got, true, 1e-5)

    def test_without_gradients(self):
        given = [one.detach().to(DEVICE) for one in drawn((2, 3), 6, torch.float32)]
        assert_all_close(add_norm(*given, EPS), formula(*given), 1e-5)
        assert add_norm(given[0], None, given[2], EPS)[0] is given[0]

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (37,)], ids=str)
    @pytest.mark.parametrize("width", [1, 5, 64, 128])
    def test_a_weight_that_is_a_number(self, shape, width):
        (x,) = moved(drawn(shape, width, torch.float32)[:1])
        true = formula(x, None, 0.3)[1]
        slope = true.detach().cos()
        found = rms_norm(x, 0.3, EPS)
        assert_close(found, true, 1e-6)
        assert_all_close(torch.autograd.grad(found, x, slope), torch.autograd.grad(true, x, slope), 1e-5)

    @pytest.mark.parametrize("weight", [True, False])
    @pytest.mark.parametrize("parts", [(8, 8), (24, 40)], ids=str)
    def test_heads_of_a_part_of_something_wider(self, parts, weight, monkeypatch):
        """Groups of rows, evenly spaced, are read where they lie."""
        (mixed,) = moved([Draw(3).normal(2, 5, sum(parts)).float()])
        factors = moved([Draw(4).normal(8).float()])[0] if weight else 0.7
        learned = [mixed, factors] if weight else [mixed]
        heads = mixed.split(parts, -1)[1].unflatten(-1, (-1, 8))
        true = formula(heads, None, factors)[1]
        slope = true.detach().cos()
        expected = torch.autograd.grad(true, learned, slope, retain_graph=True)
        monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: x if x.is_contiguous() else pytest.fail("copied"))
        found = rms_norm(heads, factors, EPS)
        assert_close(found, true, 1e-6)
        assert_all_close(torch.autograd.grad(found, learned, slope), expected, 1e-5)

    @pytest.mark.parametrize("weight", [True, False])
    @pytest.mark.parametrize("view", VIEWS)
    def test_however_they_lie(self, view, weight):
        base = Draw(3).normal(2000).float().to(DEVICE)
        x = VIEWS[view](base).requires_grad_()
        factors = Draw(4).normal(x.shape[-1]).float().to(DEVICE).requires_grad_() if weight else 0.37
        learned = [x, factors] if weight else [x]
        found, true = rms_norm(x, factors, EPS), formula(x, None, factors)[1]
        assert_close(found, true, 1e-6)
        slope = true.detach().cos()
        assert_all_close(torch.autograd.grad(found, learned, slope), torch.autograd.grad(true, learned, slope), 1e-5)

    def test_a_view_of_any_length_needs_no_kernel_of_its_own(self, kernels, monkeypatch):
        monkeypatch.setenv("REBIND_SELF_CHECK", "0")  # it launches more kernels
        kinds = set()

        def noted(kernel, grid, tensors, numbers, **constants):
            kinds.add(kind_of_launch(kernel, tensors, constants))
            return launch(kernel, grid, tensors, numbers, **constants)

        launch = kernels.launch
        monkeypatch.setattr(kernels, "launch", noted)
        base = Draw(3).normal(2, 12, 16).float().to(DEVICE)
        for length in range(2, 11):
            rms_norm(base[:, :length], 0.5, EPS)
            rms_norm(base[:, -length:], 0.5, EPS)
        assert len(kinds) == 1

    @pytest.mark.parametrize("weight", [True, False])
    @pytest.mark.parametrize("read", [True, False])
    def test_gradients_of_gradients_are_the_formulas(self, read, weight):
        given = moved(drawn((2, 3), 4, torch.float32, read=read))
        given[2] = given[2] if weight else 0.37

        def second(call):
            total, out = call(*given)
            (first,) = torch.autograd.grad((out.square() * total).sum(), given[:1], create_graph=True)
            learned = [one for one in given if isinstance(one, torch.Tensor)]
            return torch.autograd.grad(first.square().sum(), learned)

        assert_all_close(second(lambda *given: add_norm(*given, EPS)), second(formula), 1e-4)

    def test_whoever_looks_through_it_gets_the_formula(self):
        given = [one.detach() for one in drawn((5,), 4)]

        def total(call):
            return lambda *given: sum(out.square().sum() for out in call(*given))

        found, true = (torch.func.grad(total(call))(*given) for call in (lambda *g: add_norm(*g, EPS), formula))
        assert_all_close(found, true, 1e-12)

    @pytest.mark.parametrize("apart", [True, False])
    @pytest.mark.parametrize("wrong", ["forward", "backward", "backward of a norm alone"])
    def test_kernels_that_are_wrong_are_not(self, kernels, monkeypatch, wrong, apart):
        name = wrong.split()[0]
        right = getattr(kernels, name)

        def negated(*given):
            found = right(*given)
            if "alone" in wrong and given[0] is not None:
                return found
            first = found[0] if name == "forward" else -found[0]  # the sum may be right
            return first, *(None if one is None else -one for one in found[1:])

        monkeypatch.setattr(kernels, name, negated)
        x, _, weight = (one.detach().to(DEVICE) for one in drawn((2,), 3, torch.float32))
        assert "differ from plain torch by" in compare_kernels(x, None, weight, torch.float32, apart)
        assert "differ from plain torch by" in compare_kernels(x, None, 0.3, torch.float32, apart)

    def test_what_is_checked_is_what_will_run(self, kernels, monkeypatch):
        """The same kernels, with the same constants, for rows of their own and for heads in something wider."""
        monkeypatch.setenv("REBIND_SELF_CHECK", "0")  # it is called here by hand
        ran = set()

        def noted(kernel, grid, tensors, numbers, **constants):
            ran.add(kind_of_launch(kernel, tensors, constants))

        monkeypatch.setattr(kernels, "launch", noted)
        wide = Draw(3).normal(2, 5, 48).float().to(DEVICE).requires_grad_()
        for x in (wide, wide[..., 16:].unflatten(-1, (2, 16))):
            for weight in (0.3, torch.ones(x.shape[-1], device=DEVICE)):
                ran.clear()
                compare_kernels(x, None, weight, torch.float32, kernels.is_grouped(x))
                checked = set(ran)
                ran.clear()
                rms_norm(x, weight, EPS).sum().backward()
                assert len(ran) == 2
                assert ran <= checked
