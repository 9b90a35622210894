"""The ledger: what it keeps comes back as it was, and any edit can be taken back exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rebind.edit.ledger import ledger as module
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.ledger.log import new_header
from rebind.errors import InputError, LedgerError, ShapeError, StorageError, UnknownNameError
from tests.edit.ledgers import MODEL, OTHER, ids, log_of, opened, snapshot, weights
from tests.edit.writes import D_K, D_V, SITES, new_edit
from tests.support import Draw


@pytest.fixture(params=["folder", "memory"])
def ledger(request, tmp_path):
    if request.param == "memory":
        return Ledger.in_memory(MODEL, "tiny")
    return Ledger.open(tmp_path / "ledger", MODEL, model_name="tiny")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


# What is kept


def test_an_edit_comes_back_as_it_was(ledger):
    given = new_edit(1, forced=True, created="2024-01-01T00:00:00+00:00")
    kept = ledger.append(given)
    again = kept if ledger.path is None else opened(ledger.path).get("e0001")
    for edit in (kept, again, ledger.get("e0001")):
        assert edit.id == "e0001"
        for name in ("facts", "method", "sites", "settings", "scores", "versions", "created", "forced"):
            assert getattr(edit, name) == getattr(given, name), name
        assert set(edit.tensors) == set(given.tensors)
        for name, tensor in given.tensors.items():
            assert edit.tensors[name].dtype == tensor.dtype
            assert torch.equal(edit.tensors[name], tensor), name
        assert torch.equal(edit.write(SITES[1]).gain, given.tensors[f"{SITES[1]}/gain"])
        assert edit.digest == given.digest
    assert ledger.verify() == []


def test_the_ledger_keeps_its_own_copy(ledger):
    """What the caller does to the tensors afterwards is no part of the edit."""
    given = new_edit(1)
    kept = ledger.append(given)
    before = given.tensors["targets"].clone()
    given.tensors["targets"].zero_()
    assert torch.equal(kept.tensors["targets"], before)


def test_ids_count_up_and_the_time_is_filled_in(ledger):
    assert ids(ledger.append(new_edit(seed, id="mine")) for seed in range(3)) == ["e0001", "e0002", "e0003"]
    assert all(edit.created.endswith("+00:00") for edit in ledger.edits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_keep_their_dtype_and_may_share_memory(folder, dtype):
    given = new_edit(1)
    tensors = {name: tensor.to(dtype) for name, tensor in given.tensors.items()}
    tensors[f"{SITES[0]}/gain"] = tensors[f"{SITES[0]}/keys"]  # one tensor, two names
    tensors["targets"] = tensors["targets"].mT  # not contiguous
    opened(folder).append(replace(given, tensors=tensors))
    kept = opened(folder).get("e0001")
    for name, tensor in tensors.items():
        assert kept.tensors[name].dtype == dtype
        assert torch.equal(kept.tensors[name], tensor)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"facts": ()}, InputError, "0 facts at 2 sites"),
        ({"sites": ()}, InputError, "2 facts at 0 sites"),
        ({"sites": ("elsewhere",)}, InputError, "no tensor 'elsewhere/keys'"),
        ({"scores": {"loss": float("nan")}}, InputError, "as JSON"),
        ({"settings": {"f": torch.nn.Linear}}, InputError, "as JSON"),
        ({"settings": {"name": "\ud800"}}, InputError, "as JSON"),
    ],
)
def test_what_cannot_be_kept_is_refused(ledger, changes, error, message):
    ledger.append(new_edit(1))
    before = snapshot(ledger.path) if ledger.path else None
    with pytest.raises(error, match=message):
        ledger.append(replace(new_edit(2), **changes))
    assert ids(ledger.edits) == ["e0001"]
    assert before is None or snapshot(ledger.path) == before


def test_tensors_that_make_no_write_are_refused(ledger):
    given = new_edit(1)
    name = f"{SITES[0]}/gain"
    with pytest.raises(ShapeError, match="gain"):
        ledger.append(replace(given, tensors={**given.tensors, name: torch.zeros(2, D_K + 1)}))
    with pytest.raises(InputError, match="NaN"):
        ledger.append(replace(given, tensors={**given.tensors, name: torch.full((2, D_K), torch.nan)}))
    assert ledger.edits == ()


# Finding edits


def test_unique_prefixes_are_enough(ledger):
    for seed in range(11):
        ledger.append(new_edit(seed, rows=1))
    assert ledger.get("e0011").id == ledger.get("e0011").id == "e0011"
    assert ledger.get("e0003").id == "e0003"
    with pytest.raises(UnknownNameError, match="'e001' begins e0010, e0011, expected one of them"):
        ledger.get("e001")
    with pytest.raises(UnknownNameError, match="begins e0001, .* and 6 more"):
        ledger.get("e")
    with pytest.raises(UnknownNameError, match="no edit 'e0099'.*did you mean"):
        ledger.get("e0099")
    with pytest.raises(UnknownNameError, match="no edit 'xyz'.*the ledger has e0001"):
        ledger.get("xyz")
    with pytest.raises(UnknownNameError, match="no edit ''"):
        ledger.get("")


def test_a_whole_id_is_not_a_prefix(ledger):
    ledger._state.edits.update({f"e{n:04d}": new_edit(1, id=f"e{n:04d}") for n in (1000, 10000)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "_refresh", lambda self: None)
        assert ledger.get("e1000").id == "e1000"
        assert ledger.get("e10000").id == "e10000"


def test_an_empty_ledger_says_so(ledger):
    with pytest.raises(UnknownNameError, match="no edit 'e0001'.*no edits"):
        ledger.undo("e0001")
    assert ledger.active == ledger.edits == ()


# Undo


def test_undo_and_redo_move_an_edit_out_and_back_to_its_place(ledger):
    for seed in range(3):
        ledger.append(new_edit(seed))
    assert ledger.undo("e0002").id == "e0002"
    assert ids(ledger.active) == ["e0001", "e0003"]
    assert ids(ledger.edits) == ["e0001", "e0002", "e0003"]
    assert not ledger.is_active("e0002")
    assert ledger.is_active("e0003")
    ledger.redo("e0002")
    assert ids(ledger.active) == ["e0001", "e0002", "e0003"]
    assert ledger.verify() == []


def test_nothing_is_undone_or_redone_twice(ledger):
    ledger.append(new_edit(1))
    with pytest.raises(InputError, match="e0001 is active.*nothing to redo"):
        ledger.redo("e0001")
    ledger.undo("e0001")
    with pytest.raises(InputError, match="e0001 is undone already: redo"):
        ledger.undo("e0001")
    ledger.redo("e0001")
    assert ids(ledger.active) == ["e0001"]


def test_several_edits_are_switched_together(ledger):
    for seed in range(4):
        ledger.append(new_edit(seed))
    assert ids(ledger.switch(["e0003", "e0001", "e0003"], on=False)) == ["e0003", "e0001"]
    assert ids(ledger.active) == ["e0002", "e0004"]
    for wrong, error in (("e0003", InputError), ("e0009", UnknownNameError)):
        with pytest.raises(error):
            ledger.switch(["e0002", wrong], on=False)
    with pytest.raises(InputError, match="e0004 is active"):
        ledger.switch(["e0001", "e0004"], on=True)
    assert ids(ledger.active) == ["e0002", "e0004"], "none of them"
    assert ledger.switch([], on=True) == ()
    ledger.switch(["e0001", "e0003"], on=True)
    assert ids(ledger.active) == ["e0001", "e0002", "e0003", "e0004"]
    assert ledger.verify() == []
    if ledger.path is not None:
        assert ids(opened(ledger.path).active) == ids(ledger.active)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.lists(st.integers(0, 3), max_size=8))
def test_any_undoing_equals_never_having_done_it(dtype, toggles):
    """Edits 0..3, each undone and redone at will: the weights are those of the edits left, bit for bit."""
    ledger, base = Ledger.in_memory(MODEL), Draw(9, dtype).normal(D_V, D_K)
    kept = [ledger.append(new_edit(seed)) for seed in range(4)]
    left = {0, 1, 2, 3}
    for number in toggles:
        (ledger.undo if number in left else ledger.redo)(kept[number].id)
        left ^= {number}
    fresh = Ledger.in_memory(MODEL)
    for number in sorted(left):
        fresh.append(new_edit(number))
    for site in SITES:
        assert torch.equal(weights(ledger, base, site), weights(fresh, base, site))


def test_undoing_on_disk_equals_a_ledger_that_never_had_it(tmp_path):
    base = Draw(9, torch.float32).normal(D_V, D_K)
    ledger, fresh = opened(tmp_path / "one"), opened(tmp_path / "two")
    for seed in range(3):
        ledger.append(new_edit(seed))
    for seed in (0, 2):
        fresh.append(new_edit(seed))
    all_three = weights(ledger, base)
    ledger.undo("e0002")
    assert torch.equal(weights(opened(tmp_path / "one"), base), weights(fresh, base))
    ledger.redo("e0002")
    assert torch.equal(weights(ledger, base), all_three)
    assert not torch.equal(weights(fresh, base), all_three)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_undoing_everything_is_the_base(ledger, dtype):
    base = Draw(9, dtype).normal(D_V, D_K)
    for seed in range(2):
        ledger.append(new_edit(seed))
        ledger.undo(f"e000{seed + 1}")
    assert torch.equal(weights(ledger, base), base)
    assert weights(ledger, base).data_ptr() != base.data_ptr()


# Diff


def test_diff_tells_edits_by_what_they_are(tmp_path):
    here, there = opened(tmp_path / "here"), Ledger.in_memory(OTHER)
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


def test_a_ledger_refuses_another_model(folder):
    opened(folder).append(new_edit(1))
    before = snapshot(folder)
    with pytest.raises(InputError, match=r"made for tiny \(aaaaaaaaaaaa…\), this model is big \(bbbbbbbbbbbb…\)"):
        Ledger.open(folder, OTHER, model_name="big")
    assert snapshot(folder) == before
    looked_at = Ledger.open(folder)
    assert (looked_at.model, looked_at.model_name) == (MODEL, "tiny")
    assert ids(looked_at.edits) == ["e0001"]


def test_a_ledger_knows_the_place_and_the_dtype_of_its_model(folder):
    def half(model, **known):
        return Ledger.open(folder, model, model_name="tiny", **known)

    half(MODEL, place="/models/tiny", dtype="bfloat16").append(new_edit(1))
    header = json.loads((folder / "ledger.json").read_text())
    assert (header["place"], header["dtype"]) == ("/models/tiny", "bfloat16")
    assert ids(half(MODEL, place="/elsewhere", dtype="bfloat16").edits) == ["e0001"], "the weights say whose it is"
    told = (
        r"made for tiny in bfloat16 \(aaaaaaaaaaaa…\), this model is tiny in float32 \(bbbbbbbbbbbb…\): load it in bf"
    )
    with pytest.raises(InputError, match=told):
        half(OTHER, dtype="float32")
    for unexplained in ({}, {"dtype": "bfloat16"}):
        with pytest.raises(InputError, match="load the model it was made for"):
            half(OTHER, **unexplained)
    with pytest.raises(InputError, match="load the model it was made for"):
        Ledger.open(folder, OTHER, model_name="big", dtype="float32")


def test_a_header_keeps_what_is_known_of_the_weights(folder):
    known = {"place": "/models/tiny", "dtype": "float32", "stamp": "0123"}
    ledger = Ledger.open(folder, MODEL, model_name="tiny", **known)
    assert json.loads((folder / "ledger.json").read_bytes()).items() >= known.items()
    assert ledger.verify() == []


def test_a_ledger_of_an_earlier_version_goes_on(folder):
    """Its header has no place, dtype or stamp, and stays as it is."""
    opened(folder).append(new_edit(1))
    before = (folder / "ledger.json").read_bytes()
    assert set(json.loads(before)) == {"format", "model", "model_name", "created", "digest"}
    ledger = Ledger.open(folder, MODEL, model_name="tiny", place="/models/tiny", dtype="float32", stamp="01")
    ledger.append(new_edit(2))
    assert ids(opened(folder).edits) == ["e0001", "e0002"]
    assert ledger.verify() == []
    assert (folder / "ledger.json").read_bytes() == before
    with pytest.raises(
        InputError, match=r"made for tiny \(aaaaaaaaaaaa…\), this model is tiny \(bbbbbbbbbbbb…\): load the"
    ):
        Ledger.open(folder, OTHER, model_name="tiny", dtype="float32")


def test_a_folder_without_a_ledger(tmp_path):
    with pytest.raises(LedgerError, match="no ledger in"):
        Ledger.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "none").write_text("")
    with pytest.raises(LedgerError, match="none is a file, expected a ledger's folder"):
        Ledger.open(tmp_path / "none")
    (tmp_path / "none").unlink()
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="holds thesis.tex and no ledger"):
        opened(tmp_path)
    assert snapshot(tmp_path) == {"thesis.tex": b"precious"}
    with pytest.raises(StorageError, match="thesis.tex is a file, expected a folder"):
        opened(tmp_path / "thesis.tex")


def test_who_comes_second_to_make_a_ledger_leaves_the_first_ones(folder):
    opened(folder)
    before = snapshot(folder)
    module._create(folder, new_header(OTHER, "big"), 1.0)
    assert snapshot(folder) == before


def test_the_work_folder_is_there(folder):
    assert opened(folder).work_folder.is_dir()
    assert Ledger.in_memory(MODEL).work_folder is None
    assert repr(opened(folder)).endswith("0 of 0 active)")


def test_a_newer_format_is_refused(folder):
    opened(folder)
    header = json.loads((folder / "ledger.json").read_text())
    (folder / "ledger.json").write_text(json.dumps({**header, "format": "rebind-ledger-9"}))
    with pytest.raises(LedgerError, match="'rebind-ledger-9', expected 'rebind-ledger-1'"):
        opened(folder)


def test_a_log_without_its_header_is_no_place_for_a_new_ledger(folder):
    opened(folder).append(new_edit(1))
    (folder / "ledger.json").unlink()
    before = log_of(folder).read_bytes()
    with pytest.raises(LedgerError, match="has a log but no ledger.json"):
        opened(folder)
    assert log_of(folder).read_bytes() == before


def test_only_what_was_forced_is_told_so(ledger):
    for number in range(2):
        ledger.append(new_edit(number))
    ledger.switch(["e0001", "e0002"], on=False)
    redone = ledger.switch(["e0001", "e0002"], on=True, forced=["e0002"])
    assert [edit.forced for edit in redone] == [False, True]
    assert ledger.verify() == []
