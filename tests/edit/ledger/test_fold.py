"""Folding edits is exact, in order, casts once, and continues where it stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rebind.edit.ledger import fold as fold_module
from rebind.edit.ledger.fold import MAX_PARTIAL_BYTES, EditedWeights
from rebind.errors import NumericalError, ShapeError, UnknownNameError
from tests.edit.writes import D_K, D_V, SITES, fold_edits, new_edit
from tests.support import Draw, raises

# Edits


def test_write_names_an_unknown_site():
    with raises(UnknownNameError, "unknown_site"):
        new_edit(1).write("model.layers.2.mlp.down")


def test_digest_identifies_facts_method_and_settings():
    edit = new_edit(1)
    assert replace(edit, settings={**edit.settings, "lam": 0.3}).digest != edit.digest
    assert replace(edit, method="rome").digest != edit.digest
    assert replace(edit, facts=edit.facts[:1]).digest != edit.digest
    assert replace(edit, settings=dict(reversed(edit.settings.items())), scores={}).digest == edit.digest


def test_fold_applies_the_writes_in_order():
    base = Draw(9).normal(D_V, D_K)
    edits = [new_edit(seed, id=f"e{seed}") for seed in range(3)]
    expected = base
    for edit in edits:
        K, V, G = (tensor.double() for tensor in edit.write(SITES[0]).tensors())
        expected = expected + (V - K @ expected.mT).mT @ G
    torch.testing.assert_close(fold_edits(base, SITES[0], edits), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(fold_edits(base, SITES[0], edits[::-1]), expected)


def test_fold_in_half_precision_casts_once():
    """Each of these edits is below the resolution of bfloat16; all of them together are not."""
    base = torch.ones(1, 1, dtype=torch.bfloat16)
    step = torch.full((1, 1), 0.001)
    tensors = {"s/keys": torch.zeros(1, 1), "s/values": torch.ones(1, 1), "s/gain": step}
    edits = [new_edit(seed, sites=("s",), tensors=tensors) for seed in range(20)]
    assert float(fold_edits(base, "s", edits[:1])) == 1.0
    assert float(fold_edits(base, "s", edits)) == float(torch.tensor(1.02, dtype=torch.bfloat16)) != 1.0
    assert fold_edits(base, "s", edits).dtype == torch.bfloat16


def test_fold_leaves_other_sites_and_the_base_alone():
    base = Draw(9, torch.float32).normal(D_V, D_K)
    before = base.clone()
    edits = [new_edit(0, sites=SITES[:1]), new_edit(1, sites=SITES[1:])]
    folded = fold_edits(base, SITES[0], edits)
    assert torch.equal(folded, fold_edits(base, SITES[0], edits[:1]))
    assert torch.equal(fold_edits(base, "elsewhere", edits), before)
    assert torch.equal(base, before)


def test_a_gain_may_depend_on_earlier_edits():
    base = Draw(9).normal(D_V, D_K)
    edits = [new_edit(0), new_edit(1, sites=SITES[1:]), new_edit(2), new_edit(3)]
    calls = []

    def halving(edit, earlier):
        calls.append((edits.index(edit), [edits.index(one) for one in earlier]))
        return edit.write(SITES[0]).gain / 2 ** len(earlier)

    got = fold_edits(base, SITES[0], edits, halving)
    assert calls == [(0, []), (2, [0]), (3, [0, 2])]
    scaled = []
    for edit, power in zip([edits[0], edits[2], edits[3]], [1, 2, 4], strict=True):
        name = f"{SITES[0]}/gain"
        scaled.append(replace(edit, tensors={**edit.tensors, name: edit.tensors[name] / power}))
    assert torch.equal(got, fold_edits(base, SITES[0], scaled))


def test_fold_refuses_wrong_shapes_and_infinite_weights():
    with pytest.raises(ShapeError):
        fold_edits(torch.zeros(D_K, D_V), SITES[0], [new_edit(0)])
    tensors = {"s/keys": torch.zeros(1, 1), "s/values": torch.full((1, 1), 1e6), "s/gain": torch.ones(1, 1)}
    with raises(NumericalError, "weights_not_finite"):
        fold_edits(torch.zeros(1, 1, dtype=torch.float16), "s", [new_edit(0, sites=("s",), tensors=tensors)])


# The weights of a model


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
