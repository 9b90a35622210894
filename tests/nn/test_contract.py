"""The contract of every sequence layer: forward, segments and steps agree, and padding leaves no trace."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import InputError, ShapeError
from rebind.nn import State
from tests.nn.layers import DIM, LAYERS, build
from tests.support import Draw, assert_close, raises

EVERY = pytest.mark.parametrize("name", LAYERS)


def assert_same_state(state: State, expected: State, tolerance: float = 1e-10) -> None:
    for one, other in zip(state.tensors, expected.tensors, strict=True):
        assert_close(one, other, tolerance)


@EVERY
@pytest.mark.parametrize("length", [1, 7, 70])
def test_forward_is_step_by_step(name, length):
    layer, x = build(name), Draw(1).normal(2, length, DIM)
    out, end = layer(x)
    state, steps = layer.initial_state(2), []
    for token in x.unbind(1):
        y, state = layer.step(token, state)
        steps.append(y)
    assert_close(torch.stack(steps, dim=1), out)
    assert_same_state(state, end)


@EVERY
@pytest.mark.parametrize("cuts", [(10,), (4, 4, 12), (1, 2, 3, 64)])
def test_carried_state_is_one_long_pass(name, cuts):
    layer, x = build(name), Draw(2).normal(2, sum(cuts) + 3, DIM)
    out, end = layer(x)
    state, pieces = None, []
    for piece in x.split([*cuts, 3], dim=1):
        y, state = layer(piece, state)
        pieces.append(y)
    assert_close(torch.cat(pieces, dim=1), out)
    assert_same_state(state, end)


@EVERY
def test_the_memory_of_a_state_does_not_depend_on_the_length(name):
    """A state must not be a view that keeps the whole sequence in memory."""
    layer, sizes = build(name), []
    for length in (20, 200):
        _, state = layer(Draw(7).normal(1, length, DIM))
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.tensors}
        sizes.append(sum(storages.values()))
    assert layer.grows or sizes[0] == sizes[1]


@EVERY
def test_the_size_of_a_state_is_known_before(name):
    layer = build(name)
    _, state = layer(Draw(8).normal(1, 20, DIM))
    extra = state.size - layer.size_after(20)  # a denominator's row, a convolution's window, a mini-batch
    assert extra == 0 if layer.grows else extra >= 0


@EVERY
def test_it_is_causal(name):
    layer, x = build(name), Draw(3).normal(1, 9, DIM)
    changed = x.clone()
    changed[:, 5:] += 1
    assert_close(layer(changed)[0][:, :5], layer(x)[0][:, :5])


MASKS = {"left": "0011111", "right": "1111100", "between": "1011011", "everything": "0000000"}


@EVERY
@pytest.mark.parametrize("pattern", MASKS.values(), ids=MASKS.keys())
def test_padding_leaves_no_trace(name, pattern):
    """Padding of NaN in one row of two; the state after it continues as if there had been none."""
    layer, draw = build(name), Draw(4)
    x, after = draw.normal(2, len(pattern), DIM), draw.normal(2, 6, DIM)
    real = torch.tensor([bit == "1" for bit in pattern])
    x[0, ~real] = float("nan")
    mask = torch.stack([real, torch.ones_like(real)])
    out, state = layer(x, mask=mask)
    later, _ = layer(after, state)
    for row, tokens in ((0, x[:1, real]), (1, x[1:])):
        alone, own = layer(tokens) if tokens.shape[1] else (tokens, layer.initial_state(1))
        assert_close(out[row, mask[row]], alone[0])
        assert_close(later[row], layer(after[row : row + 1], own)[0][0])
    assert torch.isfinite(out).all()


@EVERY
@pytest.mark.parametrize("lengths", [(5,), (1, 7, 40, 2), (3, 3)], ids=str)
def test_packed_documents_do_not_see_each_other(name, lengths):
    """Outputs, states and gradients are those of the documents one by one; so is what follows them."""
    layer, draw = build(name), Draw(20)
    x, slope = draw.normal(1, sum(lengths), DIM).requires_grad_(), draw.normal(1, sum(lengths), DIM)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out, states = layer(x, cu_seqlens=bounds)
    packed = torch.autograd.grad((out * slope).sum(), [x, *layer.parameters()])
    alone = [layer(document) for document in x.split(lengths, dim=1)]
    expected = torch.cat([y for y, _ in alone], dim=1)
    assert_close(out, expected)
    for one, other in zip(packed, torch.autograd.grad((expected * slope).sum(), [x, *layer.parameters()]), strict=True):
        assert_close(one, other)
    after = draw.normal(len(lengths), 3, DIM)
    continued, _ = layer(after, states)
    ends = torch.arange(len(lengths) + 1) * 3
    packed_again, _ = layer(after.flatten(0, 1)[None], states, cu_seqlens=ends)
    for row, (_, state) in enumerate(alone):
        later, _ = layer(after[row : row + 1], state)
        assert_close(continued[row], later[0])
        assert_close(packed_again[0, 3 * row : 3 * row + 3], later[0])


@EVERY
def test_a_masked_step_changes_nothing(name):
    layer, draw = build(name), Draw(5)
    _, state = layer(draw.normal(2, 5, DIM))
    token, after = draw.normal(2, DIM), draw.normal(2, 4, DIM)
    _, stepped = layer.step(token, state.clone(), torch.tensor([False, True]))
    out, _ = layer(after, stepped)
    assert_close(out[0], layer(after, state)[0][0])
    _, read = layer(token.unsqueeze(1), state)
    assert_close(out[1], layer(after, read)[0][1])


@EVERY
def test_gradients_reach_every_parameter_and_go_through_the_state(name):
    layer, x = build(name), Draw(6).normal(2, 9, DIM).requires_grad_()
    weights = Draw(7).normal(2, 9, DIM)
    (layer(x)[0] * weights).sum().backward()
    for parameter, tensor in [*layer.named_parameters(), ("x", x)]:
        assert tensor.grad is not None, f"no gradient for {parameter}"
        assert torch.isfinite(tensor.grad).all(), f"the gradient of {parameter} is not finite"
        assert tensor.grad.abs().max() > 0, f"the gradient of {parameter} is 0"
    whole, x.grad = x.grad, None
    first, state = layer(x[:, :4])
    second, _ = layer(x[:, 4:], state)
    (torch.cat([first, second], dim=1) * weights).sum().backward()
    assert_close(x.grad, whole)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_near(name, dtype):
    layer, x = build(name), Draw(10).normal(2, 40, DIM)
    expected, _ = layer(x)
    low = build(name, dtype)
    out, state = low(x.to(dtype))
    assert out.dtype == dtype
    assert_close(out.double(), expected, 1e-5 if dtype == torch.float32 else 0.1)
    assert low.step(x[:, 0].to(dtype), state)[0].dtype == dtype


@pytest.mark.parametrize(
    "name", ["delta, dpfp", "gated_delta, published", "kda", "rwkv7", "ttt-mlp", "attention, gated", "latent"]
)
def test_it_compiles_as_one_graph(name):
    torch.compiler.reset()
    layer, x = build(name), Draw(0).normal(2, 9, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def outcome(call):
        tokens = x.clone().requires_grad_()
        out, _ = call(tokens)
        return out, torch.autograd.grad((out * Draw(1).normal(*out.shape)).sum(), tokens)[0]

    for got, expected in zip(outcome(compiled), outcome(layer), strict=True):
        assert_close(got, expected, 1e-11)


@EVERY
def test_states_are_selected_repeated_and_detached(name):
    layer, draw = build(name), Draw(11)
    x, after = draw.normal(3, 5, DIM), draw.normal(3, 4, DIM)
    _, state = layer(x)
    rows = torch.tensor([2, 0, 2])
    assert_close(layer(after, state.select(rows))[0], layer(after, layer(x[rows])[1])[0])
    twice = after.repeat_interleave(2, dim=0)
    assert_close(layer(twice, state.repeat(2))[0], layer(after, state)[0].repeat_interleave(2, dim=0))
    assert all(not tensor.requires_grad for tensor in state.detach().tensors)


@EVERY
def test_bad_input_is_refused(name):
    layer, x = build(name), Draw(13).normal(2, 5, DIM)
    mask = torch.ones(2, 5, dtype=torch.bool)
    _, state = layer(x)
    calls = [
        (ShapeError, "wrong_sequence_shape", lambda: layer(x[:, 0])),
        (ShapeError, "wrong_sequence_shape", lambda: layer.step(x, state)),
        (ShapeError, "wrong_sequence_shape", lambda: layer(x[..., :-1])),
        (ShapeError, "wrong_sequence_shape", lambda: layer(x[:, :0])),
        (InputError, "invalid_mask", lambda: layer(x, mask=torch.ones(2, 5, dtype=torch.long))),
        (InputError, "invalid_mask", lambda: layer(x, mask=torch.ones(2, 4, dtype=torch.bool))),
        (ShapeError, "documents_need_one_row", lambda: layer(x, cu_seqlens=torch.tensor([0, 5]))),
        (InputError, "invalid_boundaries", lambda: layer(x[:1], cu_seqlens=torch.tensor([0, 4]))),
        (InputError, "invalid_boundaries", lambda: layer(x[:1], cu_seqlens=torch.tensor([0, 4, 3, 5]))),
        (ShapeError, "invalid_boundaries", lambda: layer(x[:1], cu_seqlens=torch.tensor([[0, 5]]))),
        (InputError, "mask_with_documents", lambda: layer(x, mask=mask, cu_seqlens=torch.tensor([0, 5]))),
        (InputError, "state_of_other_layer", lambda: layer(x, State())),
        (ShapeError, "state_of_other_batch", lambda: layer(x[:1], state)),
    ]
    for error, code, call in calls[: None if state.tensors else -2]:  # a layer without memory takes any state
        with raises(error, code):
            call()
