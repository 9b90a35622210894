"""Batches hold every item once, and shrink when memory runs out."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import MemoryWarning, OutOfMemoryError
from rebind.models.batching import CPU_TOKENS, GPU_TOKENS, run_in_batches, tokens_that_fit
from rebind.models.trunk import Trunk
from tests import tiny

SIZES = [(1, 5, 2), (3, 1, 1), (2, 9, 4), (1, 1, 1)]


def run_failing_above(tokens: int, order: list[int], budget: int) -> list[list[int]]:
    """Return the batches that ran, where memory runs out above so many tokens."""

    def run(batch: list[int]) -> list[int]:
        rows, *widths = zip(*(SIZES[index] for index in batch), strict=True)
        if sum(rows) * sum(max(width) for width in widths) > tokens:
            raise torch.OutOfMemoryError("no memory left")
        return batch

    return [result for _, result in run_in_batches(SIZES, order, budget, run)]


def test_batches_hold_every_item_once_in_order():
    assert run_failing_above(1000, [3, 1, 0, 2], budget=20) == [[3, 1], [0], [2]]


def test_batches_shrink_when_memory_runs_out():
    with pytest.warns(MemoryWarning, match="continuing with"):
        batches = run_failing_above(26, [3, 1, 0, 2], budget=1000)
    assert [index for batch in batches for index in batch] == [3, 1, 0, 2]
    assert max(len(batch) for batch in batches) < 4


@pytest.mark.filterwarnings("ignore::rebind.errors.MemoryWarning")
def test_an_item_that_does_not_fit_is_an_error():
    with pytest.raises(OutOfMemoryError) as caught:
        run_failing_above(20, [3, 1, 0, 2], budget=1000)
    assert caught.value.code == "item_too_large"


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="other"):
        list(run_in_batches(SIZES, [0], 10, lambda batch: (_ for _ in ()).throw(RuntimeError("other"))))


def test_a_cpu_has_a_fixed_budget():
    assert tokens_that_fit(tiny.trunk(tiny.llama())) == CPU_TOKENS


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU with (free, total) bytes."""
    monkeypatch.setattr(Trunk, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)

    def budget(free: int, total: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
        return tokens_that_fit(tiny.trunk(tiny.llama()))

    return budget


def test_the_budget_of_a_gpu_follows_its_free_memory(gpu):
    one = gpu(8 << 20, 80 << 30)
    assert abs(gpu(16 << 20, 80 << 30) - 2 * one) <= 1
    assert 1 < one < CPU_TOKENS


def test_a_gpu_that_nobody_else_uses_has_the_same_budget_in_every_run(gpu):
    budgets = {gpu(free << 20, 40 << 20) for free in (40, 39, 35)}
    assert len(budgets) == 1
    assert 1 < budgets.pop() < GPU_TOKENS
