"""Folding edits is exact, in order, casts once, and continues where it stopped."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rebind.edit.ledger.fold import MAX_PARTIAL_BYTES, EditedWeights
from rebind.edit.methods import Gram
from rebind.edit.moments import OldKeys
from rebind.errors import NumericalError, ShapeError, UnknownNameError
from rebind.memory.closed_form import null_space, ridge
from rebind.memory.write import Write
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
    """The writes that were applied, over all sites."""
    writes = []
    original = Write.apply

    def record(write, memory):
        writes.append(write)
        return original(write, memory)

    monkeypatch.setattr(Write, "apply", record)
    return writes


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
    assert len(applied) <= 2 * 30


def test_a_partial_fold_that_is_too_large_is_not_kept(applied):
    weights = edited_weights(max_partial_bytes=2 * D_K * D_V * 8 - 1)
    edits = [new_edit(seed) for seed in range(3)]
    weights.fold(edits)
    applied.clear()
    weights.fold(edits)
    assert len(applied) == 2 * 3


def test_growth_is_relative_to_the_base():
    weights = edited_weights()
    weights.remember_base(SITES)
    with torch.no_grad():
        weights.model.get_submodule(SITES[1]).weight.mul_(1.75)
    assert weights.growth() == pytest.approx({SITES[0]: 0.0, SITES[1]: 0.75}, rel=0.01)


# Gains that depend on earlier edits

MOMENTS = SimpleNamespace(source={"corpus": "made up", "tokens": 7})


def remembering_weights(**options):
    """Weights with old keys, and edits by several methods, in which the gains of some depend on those before."""
    weights = edited_weights(**options)
    weights.moments = MOMENTS
    weights.old_keys = {site: OldKeys(Draw(index).moment(D_K)) for index, site in enumerate(SITES)}
    methods = ["memit", "recursive", "recursive", "memit", "alphaedit", "recursive", "alphaedit"]
    sites = [SITES, SITES[:1], SITES, SITES[1:], SITES, SITES, SITES[:1]]
    settings = {"layers": [2, 3], "lam": 0.3, "moments": MOMENTS.source}
    edits = [
        new_edit(seed, method=method, sites=own, settings=settings)
        for seed, (method, own) in enumerate(zip(methods, sites, strict=True))
    ]
    return weights, edits


def test_remembering_methods_protect_the_keys_of_all_earlier_edits():
    """Compared with the formulas, which stack the keys of the earlier edits."""
    weights, edits = remembering_weights()
    folded = weights.fold(edits)
    for site in SITES:
        expected, earlier = weights.base[site].double(), torch.zeros(0, D_K).double()
        for edit in (edit for edit in edits if site in edit.sites):
            keys, values, gain = (tensor.double() for tensor in edit.write(site).tensors())
            old_keys = weights.old_keys[site]
            if edit.method == "recursive":
                gain = ridge(keys, 0.3 * old_keys.moment + earlier.mT @ earlier).value
            elif edit.method == "alphaedit":
                gain = null_space(keys, old_keys.null_space, previous=earlier, lam=0.3).value
            expected = expected + (values - keys @ expected.mT).mT @ gain.float().double()
            earlier = torch.cat([earlier, keys])
        torch.testing.assert_close(folded[site].double(), expected, rtol=2**-7, atol=1e-5)


def test_remembering_methods_fold_alike_however_they_are_reached():
    weights, edits = remembering_weights()
    for chosen in (
        edits[:3],
        edits,
        edits[:5],
        [],
        edits[2:],
        [edits[0], *edits[3:]],
        edits[:1],
        edits[:1] + edits[2:],
    ):
        fresh, _ = remembering_weights(max_partial_bytes=0)
        folded, expected = weights.fold(chosen), fresh.fold(chosen)
        assert all(torch.equal(folded[site], expected[site]) for site in expected)


def test_a_recursive_edit_costs_the_same_whatever_is_before_it(monkeypatch):
    """Every key is added to the moment once: the number of products does not grow with the square of the edits."""
    weights, (_, edit, *_) = remembering_weights()
    edits = [replace(edit, facts=new_edit(seed).facts) for seed in range(40)]
    count, original = [0], Gram.plus

    def plus(gram, keys):
        count[0] += len(keys)
        return original(gram, keys)

    monkeypatch.setattr(Gram, "plus", plus)
    weights.fold(edits)
    assert count[0] == 2 * 39
