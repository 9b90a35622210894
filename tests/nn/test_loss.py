"""The loss of a head without its logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rebind.nn import RebindConfig, RebindForCausalLM, loss
from rebind.nn.loss import IGNORED, head_loss
from tests.support import assert_close


def _problem(dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 6).to(dtype), torch.randn(11, 6).to(dtype)
    targets = torch.randint(11, (2, 9))
    targets[0, :4] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _plain(hidden, weight, targets):
    return functional.cross_entropy((hidden @ weight.mT).flatten(0, 1).float(), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("room", [1, 33, 2**26], ids=["a token", "three tokens", "all"])
def test_pieces_are_the_whole(room, monkeypatch):
    monkeypatch.setattr(loss, "ROOM", room)
    hidden, weight, targets = _problem()
    logits = (hidden @ weight.mT).flatten(0, 1)
    expected = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    found = head_loss(hidden, weight, targets)
    assert_close(found, expected, 1e-14)
    slopes = torch.autograd.grad(3 * expected, (hidden, weight))
    for one, true in zip(torch.autograd.grad(3 * found, (hidden, weight)), slopes, strict=True):
        assert_close(one, true, 1e-13)


def test_slopes_are_those_of_differences():
    hidden, weight, targets = _problem()
    assert torch.autograd.gradcheck(lambda h, w: head_loss(h, w, targets), (hidden, weight))


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_has_no_slope(frozen):
    leaves = list(_problem()[:2])
    leaves[frozen].requires_grad_(False)
    head_loss(*leaves, _problem()[2]).backward()
    assert leaves[frozen].grad is None
    assert leaves[1 - frozen].grad is not None


def test_autocast_is_obeyed():
    hidden, weight, targets = _problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = head_loss(hidden, weight, targets), _plain(hidden, weight, targets)
    assert found.dtype == torch.float32
    assert_close(found, expected, 1e-6)  # of the same products, rounded the same way
    slopes = torch.autograd.grad(expected, (hidden, weight))
    for one, true in zip(torch.autograd.grad(found, (hidden, weight)), slopes, strict=True):
        assert one.dtype == torch.float32
        assert_close(one, true, 1e-2)


def test_float64_stays_float64_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head_loss(*_problem()).dtype == torch.float64


def test_without_gradients_none_are_made(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: made.append(args))
    with torch.no_grad():
        head_loss(*_problem())
    assert not made


def test_a_head_that_is_more_than_its_weight_is_asked_itself():
    lm = RebindForCausalLM(RebindConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    lm.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
    ids = torch.randint(30, (1, 9))
    assert_close(lm(ids, labels=ids, return_logits=False).loss, lm(ids, labels=ids).loss, 1e-6)


def test_nothing_asked_is_nothing():
    hidden, weight, targets = _problem()
    total = head_loss(hidden, weight, torch.full_like(targets, IGNORED))
    total.backward()
    assert total == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("given", ["labels", "shift_labels"])
def test_a_model_without_logits_has_the_same_loss(given):
    torch.manual_seed(0)
    lm = RebindForCausalLM(RebindConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
    lm = lm.double()
    ids = torch.randint(30, (2, 12))
    asked = {given: ids.masked_fill(torch.arange(12) < 4, IGNORED)}
    whole, pieces = lm(ids, **asked), lm(ids, return_logits=False, **asked)
    assert pieces.logits is None
    assert whole.logits.shape == (2, 12, 30)
    assert_close(pieces.loss, whole.loss, 1e-12)
    slopes = torch.autograd.grad(whole.loss, lm.parameters(), retain_graph=True)
    for one, true in zip(torch.autograd.grad(pieces.loss, lm.parameters()), slopes, strict=True):
        assert_close(one, true, 1e-10)


def test_the_mean_may_be_over_more_tokens_than_these():
    lm = RebindForCausalLM(RebindConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    ids = torch.randint(30, (1, 9))
    assert_close(lm(ids, labels=ids, num_items_in_batch=16).loss, lm(ids, labels=ids).loss / 2, 1e-6)
