"""A model that runs in pieces computes what the whole model does, in every family, and is not changed by it."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebind.models.caches import select_cache
from rebind.models.sites import find_sites, module_at
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk
from tests import tiny
from tests.families import FAMILIES, LAYERS
from tests.families import tokens as random_ids
from tests.support import assert_close

TOLERANCE = 1e-6  # the library computes norms, rotations and softmaxes in float32 whatever the model's dtype
PREFIXES = (0, 3, 1, 21)  # none, and one longer than the sliding windows and chunks of the families that have them
SUFFIXES = (5, 2, 4, 1)

families = pytest.mark.parametrize("name", list(FAMILIES))


@functools.cache
def _shared(name: str) -> Trunk:
    return tiny.trunk(FAMILIES[name](seed=1).double())


def _projections(trunk: Trunk) -> list[nn.Module]:
    return [module_at(trunk.model, site.name) for site in find_sites(trunk.model)]


@pytest.fixture
def trunk(name: str) -> Any:
    """A model that must be the same before and after the test."""
    shared = _shared(name)
    before = _state(shared.model)
    yield shared
    assert _state(shared.model) == before


def _state(model: nn.Module) -> list[Any]:
    """Return all that a run could change: the bytes of the weights, hooks, replaced methods, the mode."""
    state: list[Any] = [tiny.weights(model)]
    for path, module in model.named_modules():
        state.append((path, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)))
        state.append((path, "forward" in module.__dict__, module.training))
    return state


def _rows(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    return [random_ids(1, length, seed + index)[0].tolist() for index, length in enumerate(lengths)]


def _whole(ids: Tensor) -> Tokens:
    everywhere = torch.ones_like(ids)
    return Tokens(ids, everywhere, everywhere.cumsum(-1) - 1)


def _plain(model: Any, row: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([row]), use_cache=False).logits[0]


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@families
def test_outputs_of_blocks_and_inputs_of_modules_are_what_hooks_see(trunk, name):
    ids = random_ids(2, 9)
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    with ExitStack() as hooks, torch.no_grad():
        for block in trunk.blocks:
            hooks.enter_context(block.register_forward_hook(lambda _, __, out: outputs.append(_first(out))))
        for module in _projections(trunk):
            hooks.enter_context(module.register_forward_pre_hook(lambda _, args: inputs.append(args[0])))
        trunk.model(input_ids=ids, use_cache=False)
    for layer in (0, LAYERS - 2):
        assert_close(trunk.after(layer, _whole(ids)), outputs[layer], 1e-12)
    for got, expected in zip(trunk.inputs(_projections(trunk)[:2], _whole(ids)), inputs[:2], strict=True):
        assert_close(got, expected.reshape(2, 9, -1), 1e-12)  # some families flatten rows and tokens into one


@families
def test_left_padding_changes_nothing(trunk, name):
    rows = _rows((4, 9, 1), seed=3)
    padded = trunk.after(1, Tokens.left_padded(rows, torch.device("cpu")))[:, -1]
    for got, row in zip(padded, rows, strict=True):
        assert_close(got, trunk.after(1, _whole(torch.tensor([row])))[0, -1], TOLERANCE)


@families
def test_suffixes_behind_cached_prefixes_are_the_whole_rows(trunk, name):
    prefixes, suffixes = _rows(PREFIXES, seed=10), _rows(SUFFIXES, seed=20)
    past = Tokens.left_padded(prefixes, torch.device("cpu"))
    cache = trunk.cache(past)
    tokens = Tokens.following(past, suffixes)
    where = torch.tensor([(row, at) for row, suffix in enumerate(suffixes) for at in range(len(suffix))])
    expected = torch.cat(
        [_plain(trunk.model, [*before, *row])[len(before) :] for before, row in zip(prefixes, suffixes, strict=True)]
    )
    for _ in range(2):  # a run must not grow the cache it was lent
        assert_close(trunk.logits(tokens, where, cache=cache), expected, TOLERANCE)
    kept = torch.tensor([3, 1])
    got = trunk.logits(tokens.select(kept), torch.tensor([(1, 1)]), cache=select_cache(cache, kept))
    assert_close(got[0], _plain(trunk.model, [*prefixes[1], *suffixes[1]])[-1], TOLERANCE)


@families
def test_starting_late_is_the_plain_run(trunk, name):
    prefixes, suffixes = _rows(PREFIXES, seed=30), _rows(SUFFIXES, seed=40)
    past = Tokens.left_padded(prefixes, torch.device("cpu"))
    tokens, cache = Tokens.following(past, suffixes), trunk.cache(past)
    fresh = Trunk(trunk.model, trunk.blocks)  # one that has not run yet
    hidden = trunk.after(1, tokens, cache=cache)
    where = torch.tensor([(row, len(suffix) - 1) for row, suffix in enumerate(suffixes)])
    got = fresh.logits(tokens, where, cache=cache, resume=(1, hidden))
    assert_close(got, trunk.logits(tokens, where, cache=cache), 1e-12)
    late = trunk.after(2, tokens, cache=cache, resume=(1, hidden))
    real = tokens.mask[:, past.ids.shape[1] :].bool()
    assert_close(late[real], trunk.after(2, tokens, cache=cache)[real], 1e-12)


@families
@pytest.mark.parametrize("prefix", [0, 4])
def test_gradients_into_the_start_are_those_of_a_plain_run(trunk, name, prefix):
    row = random_ids(1, prefix + 5, seed=50)[0].tolist()
    past = Tokens.left_padded([row[:prefix]], torch.device("cpu"))
    tokens, cache = Tokens.following(past, [row[prefix:]]), trunk.cache(past)
    hidden = trunk.after(1, tokens, cache=cache)
    delta = 0.1 * torch.randn(hidden.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    wanted = torch.tensor(7)

    ours = delta.clone().requires_grad_()
    moved = torch.cat([hidden[:, :1] + ours, hidden[:, 1:]], dim=1)
    logits = trunk.logits(tokens, torch.tensor([(0, 4)]), cache=cache, resume=(1, moved))
    (got,) = torch.autograd.grad(-torch.log_softmax(logits[0], -1)[wanted], ours)

    theirs = delta.clone().requires_grad_()

    def add(_: nn.Module, __: Any, out: Any) -> Any:
        states = _first(out)
        place = torch.zeros(states.shape[1], 1, dtype=states.dtype)
        place[prefix] = 1
        return (states + place * theirs, *out[1:]) if isinstance(out, tuple) else states + place * theirs

    with trunk.blocks[1].register_forward_hook(add):
        plain = trunk.model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1]
    (expected,) = torch.autograd.grad(-torch.log_softmax(plain, -1)[wanted], theirs)
    assert float(expected.abs().max()) > 1e-6
    assert_close(logits[0], plain, TOLERANCE)
    assert_close(got / expected.abs().max(), expected / expected.abs().max(), 1e-5)


@families
def test_an_error_inside_leaves_the_model_as_it_was(trunk, name):
    tokens = _whole(random_ids(2, 4))
    hidden = trunk.after(0, tokens)
    where = torch.tensor([(0, 1)])

    def fail(*_: Any) -> None:
        raise RuntimeError("inside")

    with trunk.blocks[2].register_forward_pre_hook(fail):
        for run in (
            lambda: trunk.logits(tokens, where, resume=(0, hidden)),
            lambda: trunk.after(2, tokens, resume=(0, hidden)),
            lambda: trunk.inputs(_projections(trunk), tokens),
            lambda: trunk.cache(tokens),
        ):
            with pytest.raises(RuntimeError, match="inside"):
                run()
    assert_close(trunk.after(0, tokens), hidden, 0.0)


def test_a_block_with_a_forward_of_its_own_gets_it_back():
    """Accelerate's dispatch replaces `forward` on the instance: that replacement is not ours to drop."""
    shared = _shared("llama")
    shared.probe()  # runs the block, too
    block, calls = shared.blocks[0], []
    original = block.forward

    block.forward = own = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        tokens = _whole(random_ids(1, 4))
        hidden = shared.after(0, tokens)
        shared.logits(tokens, torch.tensor([(0, 3)]), resume=(0, hidden))
        assert block.__dict__["forward"] is own
        assert len(calls) == 1
    finally:
        del block.forward


def test_logits_are_never_narrower_than_float32_and_no_tokens_have_no_cache():
    trunk = tiny.trunk(FAMILIES["llama"]().to(torch.bfloat16))
    assert trunk.cache(Tokens.left_padded([(), ()], trunk.device)) is None
    assert trunk.logits(_whole(random_ids(1, 3)), torch.tensor([(0, 2)])).dtype == torch.float32
