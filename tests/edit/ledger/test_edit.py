"""An edit holds one write per site; folding edits is exact, in order, and casts once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rebind.errors import InputError, NumericalError, ShapeError, UnknownNameError
from tests.edit.writes import D_K, D_V, SITES, fold_edits, new_edit
from tests.support import Draw


def test_write_names_an_unknown_site_and_a_missing_tensor():
    with pytest.raises(UnknownNameError) as unknown:
        new_edit(1).write("model.layers.2.mlp.down")
    assert unknown.value.code == "unknown_site"
    with pytest.raises(InputError) as incomplete:
        new_edit(1, tensors={}).write(SITES[0])
    assert incomplete.value.code == "edit_incomplete"


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
    with pytest.raises(NumericalError) as caught:
        fold_edits(torch.zeros(1, 1, dtype=torch.float16), "s", [new_edit(0, sites=("s",), tensors=tensors)])
    assert caught.value.code == "weights_not_finite"
