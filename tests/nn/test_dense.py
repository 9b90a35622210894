"""Projections, norms and MLPs: the shortcuts give the same numbers, and modules with hooks are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rebind.nn import FastWeight, RebindConfig, RebindForCausalLM
from rebind.nn.parts.dense import RMSNorm, SwiGlu, add_and_norm, project_jointly
from rebind.ops.kernels import kernels_on_cpu
from tests.nn.layers import DIM, LAYERS, build
from tests.support import Draw, assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class ProductCounter(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "mm"
        return func(*args, **(kwargs or {}))


def three(dim: int = 4) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(dim, width, bias=False).double() for width in (3, 5, 1)]


def separately(x, projections):
    return torch.cat([project(x) for project in projections], dim=-1)


# Joint projections


@pytest.mark.parametrize("shape", [(4,), (3, 4), (1, 3, 4), (2, 9, 4)])
def test_joint_products_are_the_separate_ones_with_their_gradients(shape):
    projections, x = three(), Draw(0).normal(*shape).requires_grad_()
    weights = Draw(1).normal(*shape[:-1], 9)
    leaves = [x, *(project.weight for project in projections)]
    expected = separately(x, projections)
    slopes = torch.autograd.grad((expected * weights).sum(), leaves)
    out = project_jointly(x, *projections)
    assert_close(out, expected, 1e-14)
    for gradient, slope in zip(torch.autograd.grad((out * weights).sum(), leaves), slopes, strict=True):
        assert_close(gradient, slope, 1e-14)


@pytest.mark.parametrize(("tokens", "products"), [(4, 1), (3, 3)])
def test_weights_are_joined_where_there_are_enough_tokens(tokens, products):
    """On a CPU copying the weights for a few tokens would cost as much as the products do."""
    projections, x = three(), torch.zeros(tokens, 4, dtype=torch.float64)
    with ProductCounter() as counter:
        project_jointly(x, *projections)
    assert counter.count == products


@pytest.mark.parametrize("name", [name for name in LAYERS if isinstance(build(name), FastWeight)])
def test_a_step_with_joint_weights_is_one_without(name):
    """As many sequences as they are wide are projected by one product, a single one by several."""
    layer, x = build(name), Draw(5).normal(DIM, DIM)
    with ProductCounter() as joint:
        out, state = layer.step(x, layer.initial_state(DIM))
    with ProductCounter() as separate:
        row, end = layer.step(x[3:4], layer.initial_state(1))
    assert joint.count < separate.count
    assert_close(out[3:4], row, 1e-12)
    assert_close(state.memory[3:4], end.memory, 1e-12)


def biased(project):
    project.bias = nn.Parameter(Draw(2).normal(project.out_features))


def hooked(project):
    project.register_forward_hook(lambda module, args, out: 2 * out)


def prepared(project):
    project.register_forward_pre_hook(lambda module, args: (3 * args[0],))


def parametrized(project):
    nn.utils.parametrizations.orthogonal(project)


def replaced(project):
    """Replace forward, as tools do that load a weight on demand."""
    before = project.forward
    project.forward = lambda x: 2 * before(x)


@pytest.mark.parametrize("change", [biased, hooked, prepared, parametrized, replaced])
def test_a_projection_that_is_more_than_a_matrix_is_called(change):
    projections, x = three(), Draw(3).normal(9, 4)
    before = project_jointly(x, *projections)
    change(projections[1])
    out = project_jointly(x, *projections)
    assert_close(out, separately(x, projections), 1e-14)
    assert (out - before).abs().max() > 0.01

    mlp, x = SwiGlu(4, 8).double(), Draw(5).normal(9, 4)
    before = mlp(x)
    change(mlp.down_proj)
    assert_close(mlp(x), mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)), 1e-14)
    assert (mlp(x) - before).abs().max() > 0.01

    layer, x, reads = FastWeight(4, 2, rule="delta", output_gate="silu").double(), Draw(6).normal(1, 9, 4), []
    before, _ = layer(x)
    layer.norm.register_forward_hook(lambda module, args, out: reads.append(out))
    change(layer.o_proj)
    out, _ = layer(x)
    assert_close(out, layer.o_proj(reads[0].flatten(-2) * nn.functional.silu(layer.g_proj(x))), 1e-12)
    assert (out - before).abs().max() > 1e-3


@pytest.mark.parametrize("hook", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_hook_on_all_modules_sees_every_projection(hook):
    modules, mlp, x = [], SwiGlu(4, 8), torch.randn(3, 4, requires_grad=True)
    handle = getattr(nn.modules.module, f"register_module_{hook}_hook")(lambda module, *args: modules.append(module))
    try:
        mlp(x).sum().backward()
    finally:
        handle.remove()
    assert mlp.down_proj in modules


# Norms


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_its_formula_in_all_dtypes(dtype, weights):
    """Entries near 1e4 have squares that half precision cannot represent."""
    norm, x = RMSNorm(64).to(weights), (10_000 * Draw(6).normal(3, 64)).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * Draw(7).normal(64))
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.to(dtype).double()
    assert norm(x).dtype == dtype
    assert_close(norm(x).double(), expected, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_keeps_its_dtype_under_autocast(dtype):
    norm = RMSNorm(8)
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(Draw(8).normal(2, 8).to(dtype).requires_grad_())
    assert out.dtype == dtype
    out.sum().backward()
    assert norm.weight.grad.dtype == torch.float32


def test_adding_and_norming_is_both_in_turn():
    norm, draw = RMSNorm(8).double(), Draw(8)
    x, update = draw.normal(2, 3, 8), draw.normal(2, 3, 8)
    for more, expected in ((update, x + update), (None, x)):
        total, normed = add_and_norm(norm, x, more)
        assert torch.equal(total, expected)
        assert torch.equal(normed, norm(expected))
    norm, x = RMSNorm(8), x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, normed = add_and_norm(norm, x, x.bfloat16())
        expected = norm(x + x.bfloat16())
    assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(normed, expected.bfloat16())


def test_norms_with_hooks_and_other_norms_are_called():
    norm, x, inputs = RMSNorm(8), Draw(10).normal(3, 8).float(), []
    norm.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    total, _ = add_and_norm(norm, x, x)
    assert len(inputs) == 1
    assert torch.equal(inputs[0], total)
    norm = nn.LayerNorm(8)
    total, normed = add_and_norm(norm, x, x)
    assert torch.equal(normed, norm(total))


@pytest.mark.parametrize("kind", ["delta", "attention"])
def test_a_model_with_kernels_is_the_model_without(kind):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs on a CPU")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = RebindForCausalLM(RebindConfig(**sizes, layer_kinds=kind, intermediate_size=24))
    ids = torch.randint(50, (2, 9))

    def train():
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = train()
    with kernels_on_cpu():
        results = train()
    for one, true in zip(results, expected, strict=True):
        assert_close(one, true, 1e-5)
