"""The change: what the edits added, in order, and refused where the weights are something else."""

from __future__ import annotations

import pytest
import torch

from rebind.edit.export.checkpoint import export_peft
from rebind.edit.export.delta import save_delta
from rebind.edit.export.low_rank_change import changes, rounding_errors
from rebind.edit.ledger.edit import fold
from rebind.errors import InputError, NumericalError, UnknownNameError
from rebind.memory.low_rank import LowRank
from tests.edit.edited import KINDS, Case, left_in, make_edit
from tests.families import HIDDEN, INNER
from tests.support import assert_close


@pytest.mark.parametrize("kind", KINDS)
def test_the_change_is_what_the_edits_added(kind):
    case = Case(kind)
    found = case.changes
    assert {site: change.rank for site, change in found.items()} == dict(zip(case.sites, (2, 5), strict=True))
    for site, change in found.items():
        assert change.left.dtype == torch.float64
        exact = fold(case.base[site].double(), site, case.edits) - case.base[site].double()
        assert_close(change.dense(), exact, 1e-12)
        assert float(exact.norm()) > 0.1  # else all of this compares nothing with nothing


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_edits_composes_in_order(llama, count):
    """Random writes do not commute: a wrong order anywhere shows."""
    site = llama.sites[0]
    edits = [make_edit(llama.model, [0], 1 + seed % 3, seed) for seed in range(count)]
    base = {site: llama.base[site].double()}
    edited = {site: fold(base[site], site, edits)}
    found = changes(base, edits, edited)[site]
    assert_close(found.dense(), edited[site] - base[site], 1e-12)
    if count > 1:
        backwards = fold(base[site], site, edits[::-1])
        assert float((backwards - edited[site]).norm() / found.dense().norm()) > 1e-2


def test_more_rows_than_the_weights_have_are_compacted(llama):
    site = llama.sites[0]
    edits = [make_edit(llama.model, [0], 30, seed) for seed in (1, 2)]
    base = {site: llama.base[site].double()}
    edited = {site: fold(base[site], site, edits)}
    found = changes(base, edits, edited)[site]
    assert found.rank == min(HIDDEN, INNER)
    assert_close(found.dense(), edited[site] - base[site], 1e-10)


def test_gains_that_depend_on_earlier_edits_are_asked_for(llama):
    def gain_at(site):
        return lambda edit, earlier: edit.write(site).gain / (1 + len(earlier))

    edited = {site: fold(llama.base[site], site, llama.edits, gain_at(site)) for site in llama.sites}
    found = changes(llama.base, llama.edits, edited, gain_at=gain_at)
    assert max(rounding_errors(llama.base, edited, found).values()) < 1e-6
    with pytest.raises(NumericalError, match="refresh the editor"):
        changes(llama.base, llama.edits, edited)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_that_are_not_base_and_edits_are_refused(dtype):
    """Also in bf16, where rounding alone moves the weights by a good part of the change."""
    case = Case("llama", dtype)
    assert case.changes
    site = case.sites[1]
    with pytest.raises(NumericalError, match=f"{site} .* expected less than 1e-3: .* refresh the editor"):
        changes(case.base, case.edits, {**case.edited, site: case.base[site]})
    with pytest.raises(NumericalError, match=site):
        changes(case.base, case.edits[:1], case.edited)


def test_a_faint_change_that_is_missing_is_noticed(llama):
    """Of a ten-thousandth of the weights, as a single fact's in a large model may be."""

    def gain_at(site):
        return lambda edit, earlier: 1e-4 * edit.write(site).gain

    edited = {site: fold(llama.base[site], site, llama.edits, gain_at(site)) for site in llama.sites}
    assert changes(llama.base, llama.edits, edited, gain_at=gain_at)
    with pytest.raises(NumericalError, match="refresh the editor"):
        changes(llama.base, llama.edits, llama.base, gain_at=gain_at)


def test_what_the_dtype_rounds_away_is_reported():
    for dtype, least, most in ((torch.float32, 1e-9, 1e-6), (torch.bfloat16, 1e-4, 0.05)):
        case = Case("llama", dtype)
        found = case.changes
        for site, error in rounding_errors(case.base, case.edited, found).items():
            dense = found[site].dense()
            moved = case.edited[site].double() - case.base[site].double()
            assert error == pytest.approx(float((moved - dense).norm() / dense.norm()))
            assert least < error < most


def test_no_edits_is_an_error(llama, tmp_path):
    with pytest.raises(InputError, match="got 0 edits .* expected at least one .*: write a fact first"):
        changes(llama.base, [], llama.edited)
    for nothing in ({}, {llama.sites[0]: LowRank(torch.zeros(HIDDEN, 0), torch.zeros(0, INNER))}):
        with pytest.raises(InputError, match="no changes .*: write a fact first"):
            export_peft(llama.model, nothing, tmp_path / "adapter", base_name="tiny")
        with pytest.raises(InputError, match="no changes .*: write a fact first"):
            save_delta(nothing, tmp_path / "delta.safetensors")
    assert left_in(tmp_path) == []


def test_a_site_without_weights_is_named(llama):
    first, second = llama.sites
    with pytest.raises(UnknownNameError, match=f"site of the base weights '{second}'"):
        changes({first: llama.base[first]}, llama.edits, llama.edited)
    with pytest.raises(UnknownNameError, match=f"site of the edited weights '{first}'"):
        changes(llama.base, llama.edits, {second: llama.edited[second]})
