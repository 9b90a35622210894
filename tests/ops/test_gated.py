"""W (silu(g) · u): the formula, what is kept, gradients of every order, and the kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rebind.ops import gated_linear
from rebind.ops.kernels import kernels_on_cpu
from tests.support import Draw, assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(), (3,), (2, 5), (2, 3, 4), (0,), (2, 0)]


def plain(gate, up, weight):
    return functional.linear(functional.silu(gate) * up, weight)


def drawn(shape, width, out, dtype=torch.float64):
    draw = Draw(3)
    tensors = draw.normal(*shape, width), draw.normal(*shape, width), draw.normal(out, width)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_formula_with_its_gradients(shape):
    tensors = drawn(shape, 6, 4)
    slope = Draw(4).normal(*shape, 4)
    found, expected = gated_linear(*tensors), plain(*tensors)
    assert_close(found, expected, 1e-14)
    for one, true in zip(
        torch.autograd.grad(found, tensors, slope), torch.autograd.grad(expected, tensors, slope), strict=True
    ):
        assert_close(one, true, 1e-14)


def test_gradients_of_gradients():
    tensors = drawn((2, 3), 4, 3)
    assert torch.autograd.gradcheck(gated_linear, tensors)
    assert torch.autograd.gradgradcheck(gated_linear, tensors)


def test_a_weight_that_does_not_learn_gets_none():
    gate, up, weight = drawn((2, 3), 4, 3)
    gated_linear(gate, up, weight.detach()).sum().backward()
    assert weight.grad is None
    assert gate.grad.shape == up.grad.shape == gate.shape


def test_under_autocast_the_weight_is_taken_in_the_others_dtype():
    gate, up, weight = drawn((2, 3), 4, 3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gated_linear(gate.bfloat16(), up.bfloat16(), weight)
        wide = gated_linear(gate, up, weight)
    assert (out.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    (out.float() + wide).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert_close(out.double(), plain(gate, up, weight).double(), 2e-2)


def test_without_it_dtypes_must_agree():
    gate, up, weight = drawn((2, 3), 4, 3, torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        gated_linear(gate.bfloat16(), up.bfloat16(), weight)


def test_a_backward_pass_inside_autocast():
    gate, up, weight = drawn((2, 3), 4, 3, torch.float32)
    out = gated_linear(gate, up, weight).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.backward()
    assert gate.grad.dtype == up.grad.dtype == weight.grad.dtype == torch.float32


def test_whoever_looks_through_it_gets_the_formula():
    tensors = [tensor.detach() for tensor in drawn((5, 2), 4, 3)]

    def total(*given):
        return gated_linear(*given).square().sum()

    def expected(*given):
        return plain(*given).square().sum()

    assert_close(torch.func.grad(total)(*tensors), torch.func.grad(expected)(*tensors), 1e-12)
    each = (0, 0, None)
    found, true = (torch.vmap(torch.func.grad(one), in_dims=each)(*tensors) for one in (total, expected))
    assert_close(found, true, 1e-12)
    assert_close(
        torch.func.jvp(total, tuple(tensors), tuple(tensors))[1],
        torch.func.jvp(expected, tuple(tensors), tuple(tensors))[1],
        1e-12,
    )
    learned = [tensor.requires_grad_() for tensor in tensors]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(learned[0], torch.ones_like(learned[0]))
        assert torch.autograd.forward_ad.unpack_dual(total(dual, *learned[1:])).tangent is not None
    many = torch.autograd.functional.jacobian(gated_linear, tuple(learned), vectorize=True)
    for one, true in zip(many, torch.autograd.functional.jacobian(plain, tuple(learned)), strict=True):
        assert_close(one, true, 1e-12)


def saved_sizes(*tensors):
    """Return the size and dtype of the tensors saved for the backward pass."""
    saved = []

    def noted(tensor):
        saved.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        gated_linear(*tensors)
    return sorted(saved, key=str)


def test_only_gate_and_up_are_saved():
    gate, up, weight = drawn((40, 50), 64, 3, torch.float32)
    sizes = [(weight.numel(), torch.float32), (gate.numel(), torch.float32), (gate.numel(), torch.float32)]
    assert saved_sizes(gate, up, weight) == sorted(sizes, key=str)


def test_under_autocast_the_weight_itself_is_saved_and_no_narrow_copy():
    gate, up, weight = drawn((40, 50), 64, 3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = saved_sizes(gate.bfloat16(), up.bfloat16(), weight)
    assert (weight.numel(), torch.float32) in found
    assert (weight.numel(), torch.bfloat16) not in found


def test_where_the_weight_alone_learns_the_product_is_saved():
    gate, up, weight = drawn((40, 50), 64, 3, torch.float32)
    assert saved_sizes(gate.detach(), up.detach(), weight) == [(gate.numel(), torch.float32)]


def test_it_compiles_whole():
    tensors = drawn((2, 3), 4, 3, torch.float32)
    compiled = torch.compile(gated_linear, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*tensors), plain(*tensors)
    assert_close(found, expected, 1e-6)
    for one, true in zip(
        torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        assert_close(one, true, 1e-6)


class TestKernels:
    """On a GPU, or in Triton's interpreter."""

    @pytest.fixture(autouse=True)
    def kernels(self):
        kernels = pytest.importorskip("rebind.ops.triton.gated")
        # A backward pass that begins with a product would be the first to use cuBLAS in autograd's own thread.
        with kernels_on_cpu(), torch.autograd.set_multithreading_enabled(False):
            yield kernels

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("width", [1, 7, 1024, 1500])
    @pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
    def test_they_are_the_formula(self, shape, width, dtype):
        tensors = drawn(shape, width, 5, dtype)
        there = [tensor.detach().to(DEVICE).requires_grad_() for tensor in tensors]
        slope = Draw(4).normal(*shape, 5).to(dtype)
        found = gated_linear(*there)
        got = [found, *torch.autograd.grad(found, there, slope.to(DEVICE))]
        wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
        expected = plain(*wide)
        truth = [expected, *torch.autograd.grad(expected, wide, slope.double())]
        for one, true in zip(got, truth, strict=True):
            assert one.dtype == dtype
            assert_close(one.cpu().double(), true, 1e-5 if dtype == torch.float32 else 5e-3)

    def test_parts_of_a_wider_tensor(self, kernels):
        gate, up = Draw(5).normal(2, 3, 50).float().to(DEVICE).split([20, 30], dim=-1)
        turned, up = Draw(6).normal(3, 2, 20).float().to(DEVICE).transpose(0, 1), up[..., :20]
        for first in (gate, turned):
            product = kernels.forward(first, up)
            assert_close(product, functional.silu(first) * up, 1e-6)
            assert product.is_contiguous()

    def test_gates_that_are_wide_open(self, kernels):
        """silu is the identity there, and its slope 1."""
        gate = torch.full((1, 3), 3e7, device=DEVICE)
        d_gate, d_up, product = kernels.backward(torch.ones_like(gate), gate, torch.ones_like(gate))
        assert torch.equal(d_gate, torch.ones_like(gate))
        assert torch.equal(d_up, gate)
        assert torch.equal(product, gate)

    def test_many_gradients_at_once(self):
        tensors = [tensor.detach().to(DEVICE).requires_grad_() for tensor in drawn((2, 3), 4, 3, torch.float32)]
        slopes = Draw(4).normal(5, 2, 3, 3).float().to(DEVICE)
        got, true = (
            torch.autograd.grad(call(*tensors), tensors, slopes, is_grads_batched=True)
            for call in (gated_linear, plain)
        )
        for one, expected in zip(got, true, strict=True):
            assert_close(one, expected, 1e-5)

    def test_without_gradients(self):
        gate, up, weight = (tensor.detach().to(DEVICE) for tensor in drawn((2, 3), 6, 4, torch.float32))
        with torch.no_grad():
            assert_close(gated_linear(gate, up, weight), plain(gate, up, weight), 1e-5)

    def test_gradients_of_gradients_are_the_formulas(self):
        tensors = [tensor.detach().to(DEVICE).requires_grad_() for tensor in drawn((2, 3), 4, 3, torch.float32)]

        def second(call):
            (first,) = torch.autograd.grad(call(*tensors).square().sum(), tensors[:1], create_graph=True)
            return torch.autograd.grad(first.square().sum(), tensors)

        for one, true in zip(second(gated_linear), second(plain), strict=True):
            assert_close(one, true, 1e-4)
