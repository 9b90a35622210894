"""A ledger returns edits exactly as they were stored, and any edit can be undone exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rebind.edit.ledger.ledger import Ledger
from rebind.errors import InputError, LedgerError, ShapeError, StorageError, UnknownNameError
from tests.edit.writes import D_K, D_V, MODEL, OTHER, SITES, ids, new_edit, open_ledger, snapshot, weights
from tests.support import Draw, raises


@pytest.fixture(params=["folder", "memory"])
def ledger(request, folder):
    return Ledger.in_memory(MODEL, "tiny") if request.param == "memory" else open_ledger(folder)


# Storing edits


def test_an_edit_comes_back_as_it_was(ledger):
    edit = new_edit(1, forced=True, created="2024-01-01T00:00:00+00:00")
    targets = edit.tensors["targets"].clone()
    appended = ledger.append(edit)
    reopened = appended if ledger.path is None else open_ledger(ledger.path).get("e0001")
    edit.tensors["targets"].zero_()  # the ledger has its own copy
    for stored in (appended, reopened, ledger.get("e0001")):
        assert stored.id == "e0001"
        for name in ("facts", "method", "sites", "settings", "scores", "versions", "created", "forced", "digest"):
            assert getattr(stored, name) == getattr(edit, name), name
        assert set(stored.tensors) == set(edit.tensors)
        for name, tensor in {**edit.tensors, "targets": targets}.items():
            assert stored.tensors[name].dtype == tensor.dtype
            assert torch.equal(stored.tensors[name], tensor), name
    assert ledger.verify() == []


def test_the_ledger_assigns_ids_and_fills_in_the_time(ledger):
    assert ids(ledger.append(new_edit(seed, id="mine")) for seed in range(3)) == ["e0001", "e0002", "e0003"]
    assert all(edit.created.endswith("+00:00") for edit in ledger.edits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_keep_their_dtype_and_may_share_memory(folder, dtype):
    edit = new_edit(1)
    tensors = {name: tensor.to(dtype) for name, tensor in edit.tensors.items()}
    tensors[f"{SITES[0]}/gain"] = tensors[f"{SITES[0]}/keys"]  # one tensor, two names
    tensors["targets"] = tensors["targets"].mT  # not contiguous
    open_ledger(folder).append(replace(edit, tensors=tensors))
    stored = open_ledger(folder).get("e0001")
    for name, tensor in tensors.items():
        assert stored.tensors[name].dtype == dtype
        assert torch.equal(stored.tensors[name], tensor)


GAIN = f"{SITES[0]}/gain"


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"scores": {"loss": float("nan")}}, InputError, "not_json"),
        ({"settings": {"f": torch.nn.Linear}}, InputError, "not_json"),
        ({"settings": {"name": "\ud800"}}, InputError, "not_json"),
        ({"tensors": {**new_edit(2).tensors, GAIN: torch.zeros(2, D_K + 1)}}, ShapeError, None),
        ({"tensors": {**new_edit(2).tensors, GAIN: torch.full((2, D_K), torch.nan)}}, InputError, None),
    ],
)
def test_an_edit_that_cannot_be_stored_is_refused(ledger, changes, error, code):
    ledger.append(new_edit(1))
    before = snapshot(ledger.path) if ledger.path else None
    with pytest.raises(error) as caught:
        ledger.append(replace(new_edit(2), **changes))
    assert code is None or caught.value.code == code
    assert ids(ledger.edits) == ["e0001"]
    assert before is None or snapshot(ledger.path) == before


def test_get_accepts_the_beginning_of_an_id(ledger):
    with pytest.raises(UnknownNameError):
        ledger.get("e0001")
    for seed in range(11):
        ledger.append(new_edit(seed, rows=1))
    assert ledger.get("e0003").id == "e0003"
    assert ledger.get("e0011").id == "e0011"
    for id, code in (("e001", "ambiguous_edit"), ("e", "ambiguous_edit"), ("e0099", "unknown_edit")):
        with raises(UnknownNameError, code):
            ledger.get(id)
    with pytest.raises(UnknownNameError):
        ledger.get("")


# Undo


def test_undo_and_redo_move_an_edit_out_and_back_to_its_position(ledger):
    for seed in range(3):
        ledger.append(new_edit(seed))
    assert ledger.undo("e0002").id == "e0002"
    assert ids(ledger.active) == ["e0001", "e0003"]
    assert ids(ledger.edits) == ["e0001", "e0002", "e0003"]
    assert not ledger.is_active("e0002")
    with raises(InputError, "already_undone"):
        ledger.undo("e0002")
    ledger.redo("e0002")
    with raises(InputError, "already_active"):
        ledger.redo("e0002")
    assert ids(ledger.active) == ["e0001", "e0002", "e0003"]
    assert ledger.verify() == []


def test_several_edits_are_switched_together_or_not_at_all(ledger):
    for seed in range(4):
        ledger.append(new_edit(seed))
    assert ids(ledger.switch(["e0003", "e0001", "e0003"], on=False)) == ["e0003", "e0001"]
    for wrong, error in (("e0003", InputError), ("e0009", UnknownNameError)):
        with pytest.raises(error):
            ledger.switch(["e0002", wrong], on=False)
    with pytest.raises(InputError):
        ledger.switch(["e0001", "e0004"], on=True)
    assert ids(ledger.active) == ["e0002", "e0004"]
    assert ledger.switch([], on=True) == ()
    redone = ledger.switch(["e0001", "e0003"], on=True, forced=["e0003"])
    assert [edit.forced for edit in redone] == [False, True]
    assert ids(ledger.active) == ["e0001", "e0002", "e0003", "e0004"]
    assert ledger.verify() == []
    if ledger.path is not None:
        assert ids(open_ledger(ledger.path).active) == ids(ledger.active)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.lists(st.integers(0, 3), max_size=8))
def test_undoing_an_edit_equals_never_having_made_it(dtype, toggles):
    """Edits 0 to 3 are undone and redone in any order: the weights are those of the remaining edits, bit for bit."""
    ledger, base = Ledger.in_memory(MODEL), Draw(9, dtype).normal(D_V, D_K)
    edits = [ledger.append(new_edit(seed)) for seed in range(4)]
    remaining = {0, 1, 2, 3}
    for number in toggles:
        (ledger.undo if number in remaining else ledger.redo)(edits[number].id)
        remaining ^= {number}
    fresh = Ledger.in_memory(MODEL)
    for number in sorted(remaining):
        fresh.append(new_edit(number))
    for site in SITES:
        assert torch.equal(weights(ledger, base, site), weights(fresh, base, site))


def test_undoing_on_disk_equals_a_ledger_that_never_had_the_edit(tmp_path):
    base = Draw(9, torch.float32).normal(D_V, D_K)
    ledger, fresh = open_ledger(tmp_path / "one"), open_ledger(tmp_path / "two")
    for seed in range(3):
        ledger.append(new_edit(seed))
    for seed in (0, 2):
        fresh.append(new_edit(seed))
    ledger.undo("e0002")
    assert torch.equal(weights(open_ledger(tmp_path / "one"), base), weights(fresh, base))
    ledger.switch(["e0001", "e0003"], on=False)
    assert torch.equal(weights(ledger, base), base)


def test_diff_compares_edits_by_content(tmp_path):
    here, there = open_ledger(tmp_path / "here"), Ledger.in_memory(OTHER)
    for seed in (1, 2, 3, 3):
        here.append(new_edit(seed))
    for seed in (2, 4, 3):
        there.append(replace(new_edit(seed), scores={}, versions={}))
    diff = here.diff(there)
    assert ids(diff.both) == ["e0002", "e0003"]
    assert ids(diff.only_here) == ["e0001", "e0004"]
    assert ids(diff.only_there) == ["e0002"]
    here.undo("e0002")
    assert ids(here.diff(there).only_there) == ["e0001", "e0002"]
    assert there.diff(there).only_here == there.diff(there).only_there == ()


# Opening


def test_the_header_names_the_model(folder):
    Ledger.open(folder, MODEL, model_name="tiny", dtype="bfloat16").append(new_edit(1))
    header = json.loads((folder / "ledger.json").read_text())
    assert set(header) == {"format", "model", "model_name", "dtype", "created", "digest"}
    assert (header["model"], header["model_name"], header["dtype"]) == (MODEL, "tiny", "bfloat16")
    ledger = Ledger.open(folder)
    assert (ledger.model, ledger.model_name) == (MODEL, "tiny")
    assert repr(ledger).endswith("1 of 1 active)")


def test_a_ledger_refuses_another_model(folder):
    Ledger.open(folder, MODEL, model_name="tiny", dtype="bfloat16").append(new_edit(1))
    before = snapshot(folder)
    with raises(InputError, "ledger_of_other_model") as caught:
        Ledger.open(folder, OTHER, model_name="tiny", dtype="float32")
    assert caught.value.settings == {"dtype": "bfloat16"}
    assert snapshot(folder) == before


def test_a_folder_without_a_ledger(tmp_path):
    with raises(LedgerError, "no_ledger"):
        Ledger.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "thesis.tex").write_text("precious")
    with raises(InputError, "not_a_ledger_folder"):
        open_ledger(tmp_path)
    with raises(StorageError, "file_in_the_way"):
        open_ledger(tmp_path / "thesis.tex")
    assert snapshot(tmp_path) == {"thesis.tex": b"precious"}


def test_a_log_without_its_header_is_not_overwritten(folder):
    open_ledger(folder).append(new_edit(1))
    (folder / "ledger.json").unlink()
    before = snapshot(folder)
    with raises(LedgerError, "ledger_damaged"):
        open_ledger(folder)
    assert snapshot(folder) == before


def test_another_format_is_refused(folder):
    open_ledger(folder)
    header = json.loads((folder / "ledger.json").read_text())
    (folder / "ledger.json").write_text(json.dumps({**header, "format": "rebind-ledger-9"}))
    with raises(LedgerError, "ledger_damaged"):
        open_ledger(folder)


# Symbolic links in a ledger that comes from somebody else


@pytest.mark.parametrize("name", ["lock", "log.jsonl", "edits", "work"])
def test_no_symbolic_link_is_followed(folder, tmp_path, name):
    open_ledger(folder).append(new_edit(1))
    (folder / "work").mkdir()
    victim = tmp_path / "victim"
    (folder / name).rename(victim) if name != "lock" else victim.write_text("precious")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(victim)
    before = snapshot(tmp_path)
    if name == "log.jsonl":
        with raises(LedgerError, "ledger_damaged"):
            open_ledger(folder)
    else:
        ledger = open_ledger(folder)
        assert ids(ledger.edits) == ["e0001"]
        with raises(StorageError, "symbolic_link"):
            _ = ledger.work_folder if name == "work" else ledger.append(new_edit(2))
    if name == "edits":
        with raises(LedgerError, "ledger_damaged"):
            _ = ledger.get("e0001").tensors["targets"]
    assert snapshot(tmp_path) == before


def test_no_snapshot_is_stored_through_a_symbolic_link(folder, tmp_path):
    open_ledger(folder)
    victim = tmp_path / "victim"
    victim.mkdir()
    (folder / "snapshots").symlink_to(victim)
    ledger = open_ledger(folder)
    ledger.snapshots.worth_seconds = 0.0
    ledger.append(new_edit(1))
    assert list(victim.iterdir()) == []
    (folder / "snapshots").unlink()
    ledger.append(new_edit(2))
    assert list((folder / "snapshots").iterdir()), "without the link a snapshot is stored"
