"""The change is exactly what the edits added, and is refused where the weights are something else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rebind.edit.export.adapter import export_peft
from rebind.edit.export.change import compute_changes, save_delta
from rebind.edit.ledger.fold import stored_writes_at
from rebind.errors import InputError, NumericalError
from rebind.memory.low_rank import LowRank
from tests.edit.edited import KINDS, Case, make_edit, names_in
from tests.edit.writes import fold_edits
from tests.families import HIDDEN, INNER
from tests.support import assert_close, raises


@pytest.mark.parametrize("kind", KINDS)
def test_the_change_is_what_the_edits_added(kind):
    case = Case(kind)
    changes = case.changes
    assert {site: change.rank for site, change in changes.items()} == dict(zip(case.sites, (2, 5), strict=True))
    for site, change in changes.items():
        assert change.left.dtype == torch.float64
        exact = fold_edits(case.base[site].double(), site, case.edits) - case.base[site].double()
        assert_close(change.dense(), exact, 1e-12)
        assert float(exact.norm()) > 0.1, "otherwise the test compares nothing with nothing"


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_edits_composes_in_order(llama, count):
    """Random writes do not commute, so a wrong order shows."""
    site = llama.sites[0]
    edits = [make_edit(llama.model, [0], 1 + seed % 3, seed) for seed in range(count)]
    base = {site: llama.base[site].double()}
    edited = {site: fold_edits(base[site], site, edits)}
    change = compute_changes(base, edits, edited)[site]
    assert_close(change.dense(), edited[site] - base[site], 1e-12)
    if count > 1:
        backwards = fold_edits(base[site], site, edits[::-1])
        assert float((backwards - edited[site]).norm() / change.dense().norm()) > 1e-2


def test_the_change_has_at_most_as_many_rows_as_the_weights(llama):
    site = llama.sites[0]
    edits = [make_edit(llama.model, [0], 30, seed) for seed in (1, 2)]
    base = {site: llama.base[site].double()}
    edited = {site: fold_edits(base[site], site, edits)}
    change = compute_changes(base, edits, edited)[site]
    assert change.rank == min(HIDDEN, INNER)
    assert_close(change.dense(), edited[site] - base[site], 1e-10)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_gains_that_depend_on_earlier_edits(llama, scale):
    """A scale of 1e-4 makes the change as faint as that of one fact in a large model: it must not go unnoticed."""

    def writes_at(site, edits, like):
        for earlier, write in enumerate(stored_writes_at(site, edits, like)):
            yield replace(write, gain=scale * write.gain / (1 + earlier))

    edited = {}
    for site in llama.sites:
        wide = llama.base[site].double()
        for write in writes_at(site, llama.edits, wide):
            wide = write.apply(wide)
        edited[site] = wide.to(llama.base[site].dtype)
    for site, change in compute_changes(llama.base, llama.edits, edited, writes_at=writes_at).items():
        dense = change.dense()
        assert_close(edited[site].double() - llama.base[site].double(), dense, 1e-6)
    for wrong in (llama.edited, llama.base):
        with pytest.raises(NumericalError):
            compute_changes(llama.base, llama.edits, wrong, writes_at=writes_at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_other_than_base_and_edits_are_refused(dtype):
    """Also in bfloat16, where rounding alone moves the weights by a good part of the change."""
    case = Case("llama", dtype)
    assert case.changes
    site = case.sites[1]
    for edits, edited in ((case.edits, {**case.edited, site: case.base[site]}), (case.edits[:1], case.edited)):
        with raises(NumericalError, "weights_not_explained") as caught:
            compute_changes(case.base, edits, edited)
        assert site in str(caught.value)


def test_there_must_be_a_change_to_export(llama, tmp_path):
    nothing = {llama.sites[0]: LowRank(torch.zeros(HIDDEN, 0), torch.zeros(0, INNER))}
    for export in (
        lambda: compute_changes(llama.base, [], llama.edited),
        lambda: export_peft(llama.model, nothing, tmp_path / "adapter", base_name="tiny"),
        lambda: save_delta({}, tmp_path / "delta.safetensors"),
    ):
        with raises(InputError, "no_changes"):
            export()
    assert names_in(tmp_path) == []
