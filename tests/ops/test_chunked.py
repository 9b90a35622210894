"""What is particular to the chunked backend: groups of waves, and what it saves."""

from __future__ import annotations

import pytest
import torch

from rebind.ops import scan
from rebind.ops.chunked import CHUNKED, Chunked
from rebind.ops.chunked.layout import layout_of
from rebind.ops.chunked.plain import gradients
from rebind.ops.inputs import ScanInputs
from rebind.ops.reference import recurrence
from tests.ops.problems import CHANNELS, COEFFICIENTS, compare, problem, tolerance_of

TOLERANCE = tolerance_of(torch.float64)


@pytest.mark.parametrize("group_size", [1, 700, 1500])
@pytest.mark.parametrize("lengths", [None, (40, 3, 70, 0, 71, 16), (100,)], ids=str)
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, CHANNELS], ids=["gated", "channels"])
def test_groups_do_not_matter(group_size, lengths, coefficients):
    case = problem(77, lengths=lengths, chunk=8, heads=4, key_heads=2, coefficients=coefficients)
    inputs = ScanInputs(**case.tensors, **case.options, keep=True)
    assert len(layout_of(inputs, 8, group_size).groups) > 1, "too large a group to test anything"

    backend, (out, final) = Chunked(group_size), recurrence(inputs)
    slopes = out.cos(), final.sin()
    expected = (out, final, *(grad.detach() for grad in gradients(inputs, *slopes) if grad is not None))
    *results, saved = backend.forward(inputs)
    got = (*results, *(grad for grad in backend.backward(inputs, saved, *slopes) if grad is not None))
    compare(dict(enumerate(got)), dict(enumerate(expected)), TOLERANCE)


def test_waves():
    """The picture in the module's docstring."""
    x = torch.arange(20.0).reshape(1, 20, 1, 1)
    inputs = ScanInputs(x, x, x, cu_seqlens=torch.tensor([0, 10, 14, 20]))
    cut = layout_of(inputs, 2)
    (group,) = cut.groups
    assert group.waves == (3, 3, 2, 1, 1)
    chunks = cut.load(x, group, torch.empty(10, 2, 1)).squeeze(-1)
    assert chunks[:, 0].tolist() == [0, 14, 10, 2, 16, 12, 4, 18, 6, 8]
    states = torch.arange(3.0).reshape(3, 1, 1, 1)
    assert cut.in_waves(states).flatten().tolist() == [0, 2, 1]
    assert torch.equal(cut.in_order(cut.in_waves(states)), states)


def test_it_saves_what_it_says():
    """One state, U and T per chunk; nothing if no gradient is wanted."""
    case = problem(70, 6, 5, chunk=16)
    tensors = [case.tensors.get(name) for name in ("q", "k", "v", "log_decay", "erase", "write", "probe", "state")]
    for lengths in (None, [0, 10, 40, 40, 70]):
        rows = tensors if lengths is None else [None if x is None else x[:1] for x in tensors]
        bounds = None
        if lengths is not None:
            bounds = torch.tensor(lengths)
            rows[7] = case.tensors["state"][:1].repeat(4, 1, 1, 1)
        inputs = ScanInputs(*rows, cu_seqlens=bounds, chunk=16, keep=True)
        _, _, saved = CHUNKED.forward(inputs)
        like = CHUNKED.saved_like(inputs)
        assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in like]
        chunks = 2 * 5 if lengths is None else 70 // 16 + 4
        heads = 3
        shapes = [(5, 6), (16, 5), (16, 16)]
        assert [tuple(x.shape) for x in saved] == [(chunks * heads, *shape) for shape in shapes]
    assert CHUNKED.forward(ScanInputs(*tensors))[2] == []


def test_saved_tensors_are_freed_with_the_graph():
    """No reference cycle through the graph: outputs die when they are dropped."""
    import gc
    import weakref

    case = problem(70)
    q = case.tensors["q"].requires_grad_()
    gc.collect()
    gc.disable()
    try:
        out, final = scan(q, case.tensors["k"], case.tensors["v"])
        alive = weakref.ref(out), weakref.ref(final)
        del out, final
        assert all(reference() is None for reference in alive)
    finally:
        gc.enable()
