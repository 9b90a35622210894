"""Batches hold every item once, and shrink when memory runs out."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import MemoryWarning, OutOfMemoryError
from rebind.models.batching import CPU_TOKENS, GPU_TOKENS, padded_lengths, run_in_batches, tokens_that_fit
from rebind.models.trunk import Trunk
from tests import tiny
from tests.support import raises

SIZES = [(1, 5, 2), (3, 1, 1), (2, 9, 4), (1, 1, 1)]


def run_failing_above(tokens: int, order: list[int], budget: int) -> list[list[int]]:
    """Return the batches that ran, where memory runs out above so many tokens."""

    def run(batch: list[int]) -> list[int]:
        rows, *widths = zip(*(SIZES[index] for index in batch), strict=True)
        if sum(rows) * sum(max(width) for width in widths) > tokens:
            raise torch.OutOfMemoryError("no memory left")
        return batch

    return [result for _, result in run_in_batches(SIZES, order, budget, run)]


def test_batches_hold_every_item_once_and_shrink_when_memory_runs_out():
    assert run_failing_above(1000, [3, 1, 0, 2], budget=20) == [[3, 1], [0], [2]]
    with pytest.warns(MemoryWarning, match="continuing with"):
        batches = run_failing_above(26, [3, 1, 0, 2], budget=1000)
    assert [index for batch in batches for index in batch] == [3, 1, 0, 2]
    assert max(len(batch) for batch in batches) < 4


@pytest.mark.filterwarnings("ignore::rebind.errors.MemoryWarning")
def test_an_item_that_does_not_fit_is_an_error_and_other_errors_pass():
    with raises(OutOfMemoryError, "item_too_large"):
        run_failing_above(20, [3, 1, 0, 2], budget=1000)

    with pytest.raises(RuntimeError, match="other"):
        list(run_in_batches(SIZES, [0], 10, lambda batch: (_ for _ in ()).throw(RuntimeError("other"))))


def test_the_budget_of_a_device(monkeypatch):
    """A CPU has a fixed one; that of a GPU follows its free memory, up to a share of all of it."""
    assert tokens_that_fit(tiny.trunk(tiny.llama())) == CPU_TOKENS
    monkeypatch.setattr(Trunk, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)

    def gpu(free: int, total: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
        return tokens_that_fit(tiny.trunk(tiny.llama()))

    one = gpu(8 << 20, 80 << 30)
    assert abs(gpu(16 << 20, 80 << 30) - 2 * one) <= 1
    assert 1 < one < CPU_TOKENS

    budgets = {gpu(free << 20, 40 << 20) for free in (40, 39, 35)}
    assert len(budgets) == 1
    assert 1 < budgets.pop() < GPU_TOKENS


@pytest.mark.parametrize(
    ("overhead", "expected"),
    [(0.5, {2: 2, 3: 3, 8: 8, 9: 9}), (5.0, {2: 3, 3: 3, 8: 9, 9: 9}), (1e6, {2: 9, 3: 9, 8: 9, 9: 9})],
)
def test_rows_of_similar_length_run_together_where_padding_costs_less_than_a_batch(overhead, expected):
    assert padded_lengths([2] * 4 + [3] * 10 + [8] * 3 + [9], overhead) == expected
    assert padded_lengths([], overhead) == {}
