"""Cross-entropy a row and its slope in place: the formula, what is left alone, extremes, and the kernel interpreted."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rebind.errors import ShapeError
from rebind.ops.entropy import IGNORED, bytes_of_logit, compare_kernels, row_losses
from rebind.ops.kernels import kernels_on_cpu
from tests.support import Draw, assert_close, raises

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 4096  # words that the kernel takes at a time
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WORDS = [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 100]
not_finite = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")  # numpy's
INF, NAN = float("inf"), float("nan")


def drawn(rows, words, dtype, scale=3.0):
    """Logits, and targets that are first, last, between and ignored."""
    logits = (scale * Draw(words).normal(rows, words)).to(dtype)
    targets = torch.arange(rows) * words // rows
    targets[-1] = words - 1
    targets[1::3] = IGNORED
    return logits, targets


def truth(logits, targets):
    """Losses and slopes in float64, by autograd."""
    wide = logits.detach().double().requires_grad_()
    losses = functional.cross_entropy(wide, targets, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), wide)[0]


def of_a_row(logits, target, dtype=torch.float32):
    """The loss and the slope of a single row."""
    row = torch.tensor([logits], dtype=dtype, device=DEVICE)
    losses = row_losses(row, torch.tensor([target], device=DEVICE), slope=True)
    return float(losses), row[0].cpu()


class Contract:
    """What the kernel and plain torch both do."""

    WIDE, NARROW = torch.float32, torch.float16

    @pytest.fixture(params=["wide", "narrow"])
    def dtype(self, request):
        return self.WIDE if request.param == "wide" else self.NARROW

    @pytest.mark.parametrize("words", WORDS)
    def test_losses_and_slopes_are_the_formulas(self, words, dtype):
        logits, targets = drawn(7, words, dtype)
        there = logits.to(DEVICE, copy=True)
        found = row_losses(there, targets.to(DEVICE), slope=True)
        losses, slopes = truth(logits, targets)
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        assert there.dtype == dtype
        assert_close(found.cpu(), losses, min(2e-6, ROUNDING[dtype]))  # sums are never narrow
        assert_close(there.cpu(), slopes, ROUNDING[dtype])
        assert not found[1::3].any()
        assert not there[1::3].any()

    def test_without_slope_logits_stay_as_they_are(self, dtype):
        logits, targets = (tensor.to(DEVICE) for tensor in drawn(5, 300, dtype))
        given = logits.clone()
        found = row_losses(given, targets, slope=False)
        assert torch.equal(given, logits)
        assert_close(row_losses(given, targets, slope=True), found, 1e-6)
        assert not torch.equal(given, logits)

    def test_nothing_asked_is_nothing(self, dtype):
        logits = torch.full((3, BLOCK + 5), NAN, dtype=dtype, device=DEVICE)
        found = row_losses(logits, torch.full((3,), IGNORED, device=DEVICE), slope=True)
        assert torch.equal(found, torch.zeros_like(found))
        assert torch.equal(logits, torch.zeros_like(logits))

    def test_large_logits(self, dtype):
        """Neither exponentials nor differences overflow, and no digit of a small difference is lost."""
        large = 6e4 if dtype == torch.float16 else 1e4
        logits = torch.full((4, BLOCK + 50), -large, dtype=dtype)
        logits[0, 3] = large
        logits[1, BLOCK + 3] = large
        logits[2] = large
        logits[3, 5], logits[3, BLOCK + 7] = large, large + (32 if dtype == torch.float16 else 0.5)
        targets = torch.tensor([3, 4, BLOCK + 2, 5])
        there = logits.to(DEVICE, copy=True)
        found = row_losses(there, targets.to(DEVICE), slope=True).cpu()
        losses, slopes = truth(logits, targets)
        assert found[0] == 0
        assert found[1] == 2 * float(logits[0, 3])
        assert_close(found[2:], losses[2:], 2e-6)
        assert_close(there.cpu(), slopes, ROUNDING[dtype])

    def test_words_may_be_ruled_out(self, dtype):
        """All of a first block, or all but the target."""
        logits, targets = drawn(3, 2 * BLOCK + 9, dtype)
        logits[0, : BLOCK + 1] = logits[2, :-1] = -INF
        targets[:] = torch.tensor([2 * BLOCK, 5, 2 * BLOCK + 8])
        there = logits.to(DEVICE, copy=True)
        found = row_losses(there, targets.to(DEVICE), slope=True)
        losses, slopes = truth(logits, targets)
        assert_close(found.cpu(), losses, 2e-6)
        assert_close(there.cpu(), slopes, ROUNDING[dtype])
        assert not there[0, : BLOCK + 1].any()

    def test_a_target_that_is_ruled_out(self, dtype):
        loss, slope = of_a_row([0.0, -INF, 0.0], 1, dtype)
        assert loss == INF
        assert slope.tolist() == [0.5, -1.0, 0.5]

    @not_finite
    @pytest.mark.parametrize("where", [0, 2, BLOCK + 4], ids=str)
    @pytest.mark.parametrize("wrong", [INF, NAN], ids=str)
    def test_logits_that_are_not_finite_have_no_loss(self, wrong, where, dtype):
        for target in (where, 1):
            logits = [0.5] * (BLOCK + 5)
            logits[where] = wrong
            loss, slope = of_a_row(logits, target, dtype)
            assert loss != loss
            assert slope.isnan().all()

    @not_finite
    def test_a_row_without_any_word_has_no_loss_and_leaves_others_alone(self, dtype):
        logits, targets = drawn(3, BLOCK + 9, dtype)
        targets[:] = 5
        logits[1] = -INF
        there = logits.to(DEVICE, copy=True)
        found = row_losses(there, targets.to(DEVICE), slope=True).cpu()
        losses, slopes = truth(logits[::2], targets[::2])
        assert found[1].isnan()
        assert there[1].isnan().all()
        assert_close(found[::2], losses, 2e-6)
        assert_close(there[::2].cpu(), slopes, ROUNDING[dtype])

    def test_rows_that_lie_apart(self, dtype):
        wider, targets = drawn(4, 20, dtype)
        logits = wider.to(DEVICE, copy=True)
        found = row_losses(logits[:, :13], targets.to(DEVICE).clamp(max=12), slope=True)
        losses, slopes = truth(wider[:, :13], targets.clamp(max=12))
        assert_close(found.cpu(), losses, 2e-6)
        assert_close(logits[:, :13].cpu(), slopes, ROUNDING[dtype])
        assert torch.equal(logits[:, 13:].cpu(), wider[:, 13:])

    @pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), ()], ids=str)
    def test_a_row_has_one_target(self, shape, dtype):
        with raises(ShapeError, "targets_do_not_match"):
            row_losses(drawn(4, 20, dtype)[0], torch.zeros(shape, dtype=torch.int64), slope=True)


class TestPlain(Contract):
    WIDE, NARROW = torch.float64, torch.bfloat16

    @pytest.fixture(autouse=True)
    def _on_a_cpu(self):
        if DEVICE == "cuda":
            pytest.skip("kernels run there")

    def test_no_rows(self):
        assert row_losses(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), slope=True).shape == (0,)

    def test_autocast_leaves_it_alone(self):
        logits, targets = drawn(5, 30, torch.float64)
        losses, slopes = truth(logits, targets)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_close(row_losses(logits, targets, slope=True), losses, 1e-13)
        assert_close(logits, slopes, 1e-13)

    def test_a_target_that_is_no_word(self):
        with pytest.raises(RuntimeError, match="out of bounds"):
            row_losses(torch.zeros(1, 3), torch.tensor([3]), slope=True)

    @pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 6), (torch.float32, 8), (torch.float64, 16)])
    def test_a_logit_takes_a_copy(self, dtype, size):
        assert bytes_of_logit(torch.empty(1, dtype=dtype)) == size


class TestKernel(Contract):
    """On a GPU, or in Triton's interpreter."""

    @pytest.fixture(autouse=True)
    def kernels(self):
        kernels = pytest.importorskip("rebind.ops.triton.entropy")
        assert kernels.BLOCK == BLOCK
        with kernels_on_cpu():
            yield kernels

    def test_it_is_the_kernel_that_runs(self, kernels, monkeypatch):
        monkeypatch.setattr(kernels, "row_losses", lambda logits, targets, slope: (logits, targets, slope))
        logits, targets = drawn(2, 3, torch.float32)
        assert row_losses(logits, targets, slope=True) == (logits, targets, True)

    @pytest.mark.parametrize("target", [-1, -101, 20, 2**32 + 1, -(2**40)])
    def test_a_target_that_is_no_word_has_no_loss(self, target):
        logits, targets = (tensor.to(DEVICE) for tensor in drawn(3, 20, torch.float32))
        targets[:] = torch.tensor([4, target, 5])
        expected = truth(logits[::2].cpu(), targets[::2].cpu())
        found = row_losses(logits, targets, slope=True)
        assert found[1].isnan()
        assert logits[1].isnan().all()
        for one, true in zip((found[::2], logits[::2]), expected, strict=True):
            assert_close(one.cpu(), true, 2e-6)

    @pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2), (torch.bfloat16, 2), (torch.float32, 4)])
    def test_a_logit_takes_itself(self, dtype, size):
        assert bytes_of_logit(torch.empty(1, dtype=dtype, device=DEVICE)) == size

    @pytest.mark.parametrize("wrong", ["losses", "losses alone", "slopes", "shares", "the rest", "ignored rows"])
    def test_a_kernel_that_is_wrong_is_not(self, kernels, monkeypatch, wrong, dtype):
        right = kernels.row_losses

        def broken(logits, targets, slope):
            losses = right(logits, targets, slope)
            if wrong == ("losses" if slope else "losses alone"):
                losses = 1.1 * losses
            elif slope and wrong == "slopes":
                logits.neg_()
            elif slope and wrong == "shares":
                logits.clamp_(max=0)
            elif slope and wrong == "the rest":
                logits[:, BLOCK:] *= 1.5
            elif slope and wrong == "ignored rows":
                logits[targets == IGNORED] = 0.01
            return losses

        monkeypatch.setattr(kernels, "row_losses", broken)
        assert "differ from plain torch by" in compare_kernels(torch.empty(2, 3, dtype=dtype, device=DEVICE))
