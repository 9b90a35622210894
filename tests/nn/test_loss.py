"""The loss of a head without all of its logits in memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.parts.dense import MAX_BYTES, head_loss
from rebind.ops.entropy import IGNORED
from rebind.ops.kernels import kernels_on_cpu
from tests.support import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOGIT_BYTES = 2 * 8  # of a logit in float64, with its copy


def _problem(dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 6).to(dtype), torch.randn(11, 6).to(dtype)
    targets = torch.randint(11, (2, 9))
    targets[0, :4] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _plain(hidden, weight, targets):
    logits = (hidden @ weight.mT).flatten(0, 1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide), targets.flatten(), reduction="sum")


def _assert_same(loss, expected, leaves, tolerance):
    """Compare two losses and their gradients."""
    assert_close(loss, expected, tolerance)
    gradients = torch.autograd.grad(3 * expected, leaves)
    for one, true in zip(torch.autograd.grad(3 * loss, leaves), gradients, strict=True):
        assert_close(one, true, 10 * tolerance)


def _model():
    torch.manual_seed(0)
    config = RebindConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    return RebindForCausalLM(config).double(), torch.randint(30, (2, 12))


class PieceWatcher(TorchFunctionMode):
    """Notes the rows of every piece of logits, and that the piece before it was released."""

    def __init__(self):
        super().__init__()
        self.rows, self.pieces = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_product = func in (torch.Tensor.matmul, torch.Tensor.__matmul__) and args[1].shape == (6, 11)
        if is_product:
            assert not any(piece() is not None for piece in self.pieces)
        out = func(*args, **(kwargs or {}))
        if is_product:
            self.rows.append(len(out))
            self.pieces.append(weakref.ref(out))
        return out


@pytest.mark.parametrize(
    ("max_bytes", "rows"),
    [
        (1, [1] * 18),
        (4 * 11 * LOGIT_BYTES - 1, [3] * 6),
        (5 * 11 * LOGIT_BYTES, [5, 5, 5, 3]),
        (MAX_BYTES, [18]),
    ],
    ids=["one token", "three tokens", "a rest", "all"],
)
def test_pieces_give_the_loss_of_the_whole(max_bytes, rows):
    hidden, weight, targets = _problem()
    with PieceWatcher() as watcher:
        loss = head_loss(hidden, weight, targets, max_bytes=max_bytes)
    assert watcher.rows == rows
    _assert_same(loss, _plain(hidden, weight, targets), (hidden, weight), 1e-14)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_tensors_have_no_gradient(frozen):
    leaves = list(_problem()[:2])
    leaves[frozen].requires_grad_(False)
    head_loss(*leaves, _problem()[2]).backward()
    assert leaves[frozen].grad is None
    assert leaves[1 - frozen].grad is not None


def test_products_follow_autocast():
    hidden, weight, targets = _problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, expected = head_loss(hidden, weight, targets), _plain(hidden, weight, targets)
        assert head_loss(*_problem()).dtype == torch.float64
    assert loss.dtype == torch.float32
    assert_close(loss, expected, 1e-6)  # of the same products, rounded the same way
    gradients = torch.autograd.grad(expected, (hidden, weight))
    for one, true in zip(torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True):
        assert one.dtype == torch.float32
        assert_close(one, true, 1e-2)


def test_without_gradients_none_are_computed(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: calls.append(args))
    with torch.no_grad():
        head_loss(*_problem())
    assert not calls


def test_ignored_targets_cost_nothing():
    hidden, weight, targets = _problem()
    total = head_loss(hidden, weight, torch.full_like(targets, IGNORED))
    total.backward()
    assert total == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_it_compiles_whole():
    hidden, weight, targets = _problem(torch.float32)
    compiled = torch.compile(head_loss, fullgraph=True, backend="aot_eager")
    _assert_same(compiled(hidden, weight, targets), _plain(hidden, weight, targets), (hidden, weight), 1e-6)


@pytest.mark.parametrize("argument", ["labels", "shift_labels"])
def test_a_model_without_logits_has_the_same_loss(argument):
    lm, ids = _model()
    labels = {argument: ids.masked_fill(torch.arange(12) < 4, IGNORED)}
    whole, pieces = lm(ids, **labels), lm(ids, return_logits=False, **labels)
    assert pieces.logits is None
    assert whole.logits.shape == (2, 12, 30)
    _assert_same(pieces.loss, whole.loss, list(lm.parameters()), 1e-11)


def test_a_head_with_hooks_is_called():
    lm, ids = _model()
    lm.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    assert_close(lm(ids, labels=ids, return_logits=False).loss, lm(ids, labels=ids).loss, 1e-6)


class TestKernel:
    """On a GPU, or in Triton's interpreter."""

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch):
        """The rows that the kernel got, call by call, and whether with gradients."""
        pytest.importorskip("triton")
        from rebind.ops.triton import entropy as kernels

        original, calls = kernels.row_losses, []

        def spy(logits, targets, slope):
            calls.append((len(logits), slope))
            return original(logits, targets, slope)

        monkeypatch.setattr(kernels, "row_losses", spy)
        monkeypatch.setenv("REBIND_SELF_CHECK", "0")  # its calls are not counted
        with kernels_on_cpu():
            yield calls

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_the_loss_and_its_gradients_are_the_plain_ones(self, dtype, calls):
        tolerance = 1e-6 if dtype == torch.float32 else 3e-3
        hidden, weight, targets = _problem(dtype)
        leaves = [tensor.detach().to(DEVICE).requires_grad_() for tensor in (hidden, weight)]
        loss = head_loss(*leaves, targets.to(DEVICE), max_bytes=5 * 11 * dtype.itemsize)  # the logits without a copy
        assert calls == [(5, True), (5, True), (5, True), (3, True)]
        assert loss.dtype == torch.float32
        true = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
        expected = _plain(*true, targets)
        assert_close(loss.cpu(), expected, tolerance)
        gradients = torch.autograd.grad(3 * expected, true)
        for one, gradient in zip(torch.autograd.grad(3 * loss, leaves), gradients, strict=True):
            assert one.dtype == dtype
            assert_close(one.cpu(), gradient, tolerance)

    def test_without_gradients_and_with_strided_targets(self, calls):
        hidden, weight, targets = (tensor.detach().to(DEVICE) for tensor in _problem(torch.float32))
        for variant in (targets, targets.mT.contiguous().mT, targets[:1, 4:5].expand(2, 9)):
            assert_close(head_loss(hidden, weight, variant), _plain(hidden, weight, variant), 1e-6)
        assert calls == [(18, False)] * 3
