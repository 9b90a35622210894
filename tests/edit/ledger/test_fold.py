"""Folding continues where it stopped, and the bits are those of folding everything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rebind.edit.ledger import fold as fold_module
from rebind.edit.ledger.fold import MAX_PARTIAL_BYTES, EditedWeights
from tests.edit.writes import D_K, D_V, SITES, fold_edits, new_edit


def edited_weights(**options):
    """Weights of a model with both sites, in bfloat16: a partial fold must not be rounded."""
    torch.manual_seed(0)
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(nn.Module() for _ in range(4))
    for layer in model.model.layers:
        layer.mlp = nn.Module()
        layer.mlp.down_proj = nn.Linear(D_K, D_V, bias=False, dtype=torch.bfloat16)
    return EditedWeights(model, moments=None, **options)


@pytest.fixture
def applied(monkeypatch):
    """How many edits were applied, over all sites."""
    counts = []
    original = fold_module.apply_edits

    def count(weights, site, edits, *rest):
        counts.append(len(edits))
        return original(weights, site, edits, *rest)

    monkeypatch.setattr(fold_module, "apply_edits", count)
    return counts


def assert_folded(weights, edits):
    folded = weights.fold(edits)
    assert set(folded) == set(weights.base)
    for site, base in weights.base.items():
        assert torch.equal(folded[site], fold_edits(base, site, edits))
        assert folded[site].dtype == base.dtype
        assert folded[site].data_ptr() != base.data_ptr()


@pytest.mark.parametrize("max_bytes", [MAX_PARTIAL_BYTES, 0])
def test_however_edits_come_and_go(max_bytes):
    weights = edited_weights(max_partial_bytes=max_bytes)
    first, second, third, other = (new_edit(seed) for seed in range(4))
    elsewhere = new_edit(5, sites=SITES[1:])
    for edits in (
        [first],
        [first, second],
        [],
        [first, second, third],
        [first, second, other],  # another edit instead of a rejected one
        [first, second, other, elsewhere],
        [first, second],  # undone
        [second],
        [first, second, third, elsewhere],
        [third, second, first],
    ):
        assert_folded(weights, edits)


def test_a_site_that_comes_later():
    weights = edited_weights()
    early, late = new_edit(0, sites=SITES[:1]), new_edit(1)
    assert_folded(weights, [early, new_edit(2, sites=SITES[:1])])
    assert_folded(weights, [early, late, new_edit(3)])


def test_edits_of_another_ledger_with_the_same_ids_are_other_edits():
    weights = edited_weights()
    for seed in (0, 3):
        assert_folded(weights, [new_edit(seed + index, id=f"e000{index}") for index in range(3)])


def test_one_more_edit_does_not_apply_all_of_them_again(applied):
    weights = edited_weights()
    edits = [new_edit(seed, sites=SITES[:1]) for seed in range(30)]
    for count in range(1, 31):
        weights.fold(edits[:count])
        weights.fold([])
    assert sum(applied) <= 2 * 30


def test_a_partial_fold_that_is_too_large_is_not_kept(applied):
    weights = edited_weights(max_partial_bytes=2 * D_K * D_V * 8 - 1)
    edits = [new_edit(seed) for seed in range(3)]
    weights.fold(edits)
    applied.clear()
    weights.fold(edits)
    assert sum(applied) == 2 * 3


def test_growth_is_relative_to_the_base():
    weights = edited_weights()
    weights.remember_base(SITES)
    with torch.no_grad():
        weights.model.get_submodule(SITES[1]).weight.mul_(1.75)
    assert weights.growth() == pytest.approx({SITES[0]: 0.0, SITES[1]: 0.75}, rel=0.01)
