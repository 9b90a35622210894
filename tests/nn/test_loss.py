"""The loss of a head without its logits."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.parts import loss
from rebind.nn.parts.loss import head_loss
from rebind.ops import entropy
from rebind.ops.entropy import IGNORED, row_losses
from tests.support import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _problem(dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 6).to(dtype), torch.randn(11, 6).to(dtype)
    targets = torch.randint(11, (2, 9))
    targets[0, :4] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _plain(hidden, weight, targets):
    return functional.cross_entropy((hidden @ weight.mT).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def _noted_pieces(monkeypatch):
    """The rows of each piece, as they come."""
    pieces = []

    def noted(logits, targets, *, slope):
        pieces.append(len(logits))
        return row_losses(logits, targets, slope=slope)

    monkeypatch.setattr(loss, "row_losses", noted)
    return pieces


WORD = 2 * 8  # bytes of a logit in float64, with a copy


@pytest.mark.parametrize(
    ("room", "sizes"),
    [(1, [1] * 18), (4 * 11 * WORD - 1, [3] * 6), (5 * 11 * WORD, [5, 5, 5, 3]), (loss.ROOM, [18])],
    ids=["a token", "three tokens", "a rest", "all"],
)
def test_pieces_are_the_whole(room, sizes, monkeypatch):
    monkeypatch.setattr(loss, "ROOM", room)
    pieces = _noted_pieces(monkeypatch)
    hidden, weight, targets = _problem()
    logits = (hidden @ weight.mT).flatten(0, 1)
    expected = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    found = head_loss(hidden, weight, targets)
    assert pieces == sizes
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


def test_a_piece_is_forgotten_before_the_next_is_made(monkeypatch):
    monkeypatch.setattr(loss, "ROOM", 1)
    pieces = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            makes_logits = func in (torch.Tensor.matmul, torch.Tensor.__matmul__) and args[1].shape == (6, 11)
            if makes_logits:
                assert not any(piece() is not None for piece in pieces)
            found = func(*args, **(kwargs or {}))
            if makes_logits:
                pieces.append(weakref.ref(found))
            return found

    with Watch():
        head_loss(*_problem())
    assert len(pieces) == 18


def test_it_compiles_whole():
    hidden, weight, targets = _problem(torch.float32)
    compiled = torch.compile(head_loss, fullgraph=True, backend="aot_eager")
    found, expected = compiled(hidden, weight, targets), _plain(hidden, weight, targets)
    assert_close(found, expected, 1e-6)
    slopes = torch.autograd.grad(expected, (hidden, weight))
    for one, true in zip(torch.autograd.grad(found, (hidden, weight)), slopes, strict=True):
        assert_close(one, true, 1e-6)


class TestKernel:
    """On a GPU, or in Triton's interpreter."""

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch):
        """The rows that the kernel got, call by call."""
        pytest.importorskip("triton")
        from rebind.ops.triton import entropy as kernels

        right, found = kernels.row_losses, []

        def noted(logits, targets, slope):
            found.append((len(logits), slope))
            return right(logits, targets, slope)

        monkeypatch.setattr(kernels, "row_losses", noted)
        monkeypatch.setattr(entropy, "_has_kernels", lambda logits: True)
        return found

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_the_loss_and_its_gradients_are_the_plain_ones(self, dtype, calls, monkeypatch):
        tolerance = 1e-6 if dtype == torch.float32 else 3e-3
        monkeypatch.setattr(loss, "ROOM", 5 * 11 * dtype.itemsize)  # the logits and no copy
        hidden, weight, targets = _problem(dtype)
        leaves = [tensor.detach().to(DEVICE).requires_grad_() for tensor in (hidden, weight)]
        found = head_loss(*leaves, targets.to(DEVICE))
        assert calls == [(5, True), (5, True), (5, True), (3, True)]
        assert found.dtype == torch.float32
        true = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
        expected = functional.cross_entropy((true[0] @ true[1].mT).flatten(0, 1), targets.flatten(), reduction="sum")
        assert_close(found.cpu(), expected, tolerance)
        slopes = torch.autograd.grad(3 * expected, true)
        for one, slope in zip(torch.autograd.grad(3 * found, leaves), slopes, strict=True):
            assert one.dtype == dtype
            assert_close(one.cpu(), slope, tolerance)

    def test_without_gradients_no_slope_is_asked_for(self, calls):
        hidden, weight, targets = (tensor.detach().to(DEVICE) for tensor in _problem(torch.float32))
        assert_close(head_loss(hidden, weight, targets), _plain(hidden, weight, targets), 1e-6)
        assert calls == [(18, False)]

    def test_targets_may_lie_apart(self, calls):
        hidden, weight, targets = (tensor.detach().to(DEVICE) for tensor in _problem(torch.float32))
        apart = targets.mT.contiguous().mT
        assert_close(head_loss(hidden, weight, apart), _plain(hidden, weight, targets), 1e-6)
        same = targets[:1, 4:5].expand(2, 9)
        assert_close(head_loss(hidden, weight, same), _plain(hidden, weight, same), 1e-6)
