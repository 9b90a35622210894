"""Folding goes on where it ended, and the bits are those of folding everything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rebind.edit.ledger import fold as weights_module
from rebind.edit.ledger.edit import fold
from rebind.edit.ledger.fold import Weights
from tests.edit.writes import D_K, D_V, SITES, new_edit


@pytest.fixture
def weights():
    """Of a model with both sites, in bfloat16: what is kept must not be rounded."""
    torch.manual_seed(0)
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(nn.Module() for _ in range(4))
    for layer in model.model.layers:
        layer.mlp = nn.Module()
        layer.mlp.down_proj = nn.Linear(D_K, D_V, bias=False, dtype=torch.bfloat16)
    return Weights(model, lambda places: {}, dict)


@pytest.fixture
def applied(monkeypatch):
    """How many edits were added up, over all sites."""
    counts = []
    own = weights_module.summed

    def noted(given, site, edits, *rest):
        counts.append(len(edits))
        return own(given, site, edits, *rest)

    monkeypatch.setattr(weights_module, "summed", noted)
    return counts


def assert_folded(weights, edits):
    found = weights.folded(edits)
    assert set(found) == set(weights.base)
    for site, base in weights.base.items():
        assert torch.equal(found[site], fold(base, site, edits))
        assert found[site].dtype == base.dtype
        assert found[site].data_ptr() != base.data_ptr()


@pytest.mark.parametrize("kept", [2**30, 0])
def test_however_edits_come_and_go(weights, monkeypatch, kept):
    monkeypatch.setattr(weights_module, "KEPT", kept)
    first, second, third, other = (new_edit(seed) for seed in range(4))
    elsewhere = new_edit(5, sites=SITES[1:])
    for edits in (
        [first],
        [first, second],
        [],
        [first, second, third],
        [first, second, other],  # tried, and another in its place
        [first, second, other, elsewhere],
        [first, second],  # undone
        [second],  # and the first
        [first, second, third, elsewhere],
        [third, second, first],
    ):
        assert_folded(weights, edits)


def test_a_site_that_comes_later(weights):
    early, late = new_edit(0, sites=SITES[:1]), new_edit(1)
    assert_folded(weights, [early, new_edit(2, sites=SITES[:1])])
    assert_folded(weights, [early, late, new_edit(3)])


def test_the_same_edits_again_are_other_edits(weights):
    """As another ledger has them, with the same names."""
    assert_folded(weights, [new_edit(0, id="e0001"), new_edit(1, id="e0002"), new_edit(2, id="e0003")])
    assert_folded(weights, [new_edit(3, id="e0001"), new_edit(4, id="e0002"), new_edit(5, id="e0003")])


def test_one_more_edit_is_not_all_of_them_again(weights, applied):
    edits = [new_edit(seed, sites=SITES[:1]) for seed in range(30)]
    for count in range(1, 31):
        weights.folded(edits[:count])
        weights.folded([])
    assert sum(applied) <= 2 * 30


def test_large_sums_are_not_kept(weights, applied, monkeypatch):
    monkeypatch.setattr(weights_module, "KEPT", 2 * D_K * D_V * 8 - 1)
    edits = [new_edit(seed) for seed in range(3)]
    weights.folded(edits)
    applied.clear()
    weights.folded(edits)
    assert sum(applied) == 2 * 3
    assert not weights._begun.sums
