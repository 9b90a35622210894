"""The ledger: any edit can be taken back exactly, and no crash, rival or vandal gets at it unnoticed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import shutil
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rebind import files
from rebind.edit import ledger as module
from rebind.edit.edits import Edit, fold
from rebind.edit.ledger import Ledger, verify_folder
from rebind.edit.log import append_lines, new_header
from rebind.errors import (
    InputError,
    LedgerError,
    LedgerWarning,
    RebindError,
    ShapeError,
    StorageError,
    UnknownNameError,
)
from tests.edit.writes import D_K, D_V, SITES, new_edit
from tests.support import Draw

MODEL, OTHER = "a" * 64, "b" * 64


@pytest.fixture(params=["folder", "memory"])
def ledger(request, tmp_path):
    if request.param == "memory":
        return Ledger.in_memory(MODEL, "tiny")
    return Ledger.open(tmp_path / "ledger", MODEL, model_name="tiny")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


def opened(folder):
    return Ledger.open(folder, MODEL, model_name="tiny")


def ids(edits):
    return [edit.id for edit in edits]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def weights(ledger, base, site=SITES[0]):
    return fold(base, site, ledger.active)


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


def test_a_folder_without_a_ledger(tmp_path):
    with pytest.raises(LedgerError, match="no ledger in"):
        Ledger.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="holds thesis.tex and no ledger"):
        opened(tmp_path)
    assert snapshot(tmp_path) == {"thesis.tex": b"precious"}
    with pytest.raises(StorageError, match="thesis.tex"):
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


# Crashes


def log_of(folder):
    return folder / "log.jsonl"


def test_a_log_cut_anywhere_in_its_last_line_opens_at_the_last_good_state(folder, tmp_path):
    ledger = opened(folder)
    ledger.append(new_edit(1))
    whole = len(log_of(folder).read_bytes())
    ledger.append(new_edit(2, rows=1))
    data = log_of(folder).read_bytes()
    for cut in range(whole, len(data)):
        log_of(folder).write_bytes(data[:cut])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = opened(folder)
            assert ids(again.edits) == ids(again.active) == ["e0001"]
        assert [w.category for w in caught] == ([LedgerWarning] if cut > whole else [])
        assert log_of(folder).stat().st_size == cut, "looking must change nothing"
    with pytest.warns(LedgerWarning, match="unfinished line of .* bytes"):
        again = opened(folder)
    assert any("unfinished" in problem for problem in again.verify())
    again.append(new_edit(3))
    assert again.verify() == []
    assert ids(opened(folder).edits) == ["e0001", "e0002"]
    assert opened(folder).get("e0002").facts == new_edit(3).facts


def test_zeros_left_by_a_power_cut_are_dropped(folder):
    ledger = opened(folder)
    ledger.append(new_edit(1))
    with log_of(folder).open("ab") as log:
        log.write(b"\0" * 512)
    with pytest.warns(LedgerWarning):
        ledger.undo("e0001")
    assert opened(folder).active == ()
    assert ledger.verify() == []


def test_an_open_ledger_outlives_anothers_crash(folder):
    """Its own view stays good while a rival's line is half there, and goes on when it is mended."""
    ledger = opened(folder)
    ledger.append(new_edit(1))
    before = log_of(folder).read_bytes()
    opened(folder).undo("e0001")
    after = log_of(folder).read_bytes()
    log_of(folder).write_bytes(after[:-5])
    with pytest.warns(LedgerWarning):
        assert ids(ledger.active) == ["e0001"]
    assert ids(ledger.active) == ["e0001"]  # and says so once
    log_of(folder).write_bytes(after)
    assert ledger.active == ()
    log_of(folder).write_bytes(before)
    with pytest.raises(LedgerError, match="shorter than when it was last read"):
        _ = ledger.active


class Failing:
    """A system call that fails at its n-th use from now, and works again afterwards."""

    def __init__(self, function, number, error):
        self.function, self.left, self.error = function, number, error

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*args, **kwargs)


OPERATIONS = {
    "append": lambda ledger: ledger.append(new_edit(4)),
    "undo": lambda ledger: ledger.undo("e0001"),
    "redo": lambda ledger: ledger.redo("e0002"),
    "switch": lambda ledger: ledger.switch(["e0001", "e0003"], on=False),
}
ERRORS = {
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "read-only": OSError(errno.EROFS, "Read-only file system"),
    "forbidden": PermissionError(errno.EACCES, "Permission denied"),
    "interrupted": KeyboardInterrupt(),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("operation", "owner", "name", "uses"),
    [
        ("append", os, "fsync", 3),  # of the tensors, their folder and the log
        ("append", Path, "replace", 1),
        ("append", os, "open", 2),
        ("append", Path, "open", 3),
        ("undo", os, "fsync", 1),
        ("undo", os, "open", 1),
        ("undo", Path, "open", 2),
        ("redo", os, "fsync", 1),
        ("switch", os, "fsync", 1),
    ],
)
def test_a_failing_disk_leaves_the_ledger_as_it_was(folder, monkeypatch, operation, owner, name, uses, error):
    """Whichever use of the call it is that fails."""
    ledger = opened(folder)
    for seed in (1, 2, 3):
        ledger.append(new_edit(seed))
    ledger.undo("e0002")
    before = snapshot(folder)
    for number in itertools.count(1):
        failing = Failing(getattr(owner, name), number, ERRORS[error])
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt, RebindError):
            patch.setattr(owner, name, lambda *args, failing=failing, **kwargs: failing(*args, **kwargs))
            OPERATIONS[operation](ledger)
            break  # the call was not used that often: the operation went through
        assert snapshot(folder) == before
        assert ids(ledger.edits) == ["e0001", "e0002", "e0003"]
        assert ids(ledger.active) == ["e0001", "e0003"]
    assert number > uses
    assert snapshot(folder) != before
    assert ledger.verify() == []
    assert ids(opened(folder).active) == ids(ledger.active)


def test_a_full_disk_in_the_middle_of_a_line(folder, monkeypatch):
    """Half the line is written when space runs out: the half goes again."""
    ledger = opened(folder)
    ledger.append(new_edit(1))
    before = snapshot(folder)
    original = Path.open

    class Filling:
        def __init__(self, file):
            self.file, self.written = file, 0

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if self.written:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.written = self.file.write(bytes(data)[:40])
            return self.written

    def open_log(path, mode="r", *args, **kwargs):
        file = original(path, mode, *args, **kwargs)
        return Filling(file) if path.name == "log.jsonl" and "+" in mode else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_log)
        with pytest.raises(StorageError, match="log.jsonl .No space left.*the ledger is as it was: free") as caught:
            ledger.append(new_edit(2))
    assert caught.value.errno == errno.ENOSPC
    assert snapshot(folder) == before
    assert ledger.append(new_edit(2)).id == "e0002"
    assert ledger.verify() == []


def test_a_line_that_comes_in_pieces_is_written_whole(folder, monkeypatch):
    """The system may take fewer bytes than it was given."""
    ledger = opened(folder)
    pieces = []
    original = Path.open

    def open_log(path, mode="r", *args, **kwargs):
        file = original(path, mode, *args, **kwargs)
        if path.name != "log.jsonl" or "+" not in mode:
            return file

        class Slow:
            __enter__ = lambda self: self
            __exit__ = lambda self, *problem: file.close()
            __getattr__ = lambda self, name: getattr(file, name)

            def write(self, data):
                pieces.append(file.write(bytes(data)[:100]))
                return pieces[-1]

        return Slow()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_log)
        ledger.append(new_edit(1))
    assert len(pieces) > 2
    assert ids(opened(folder).edits) == ["e0001"]


def test_a_ledger_can_be_read_where_nothing_can_be_written(folder, monkeypatch):
    ledger = opened(folder)
    ledger.append(new_edit(1))
    with log_of(folder).open("ab") as log:
        log.write(b"{torn")
    original = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.warns(LedgerWarning):
        reading = opened(folder)
    assert torch.equal(reading.get("e0001").tensors["targets"], new_edit(1).tensors["targets"])
    with pytest.raises(StorageError, match="Read-only"):
        reading.undo("e0001")
    assert ids(reading.active) == ["e0001"]


def test_a_crash_before_the_line_leaves_tensors_nobody_names(folder, monkeypatch):
    """Killed between the two writes: the file is replaced by the next edit of that number."""
    ledger = opened(folder)
    with monkeypatch.context() as patch:
        patch.setattr(module, "append_lines", Failing(None, 1, KeyboardInterrupt()))
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)  # the process is no more
        with pytest.raises(KeyboardInterrupt):
            ledger.append(new_edit(1))
    assert opened(folder).edits == ()
    assert opened(folder).verify() == ["edits/e0001.safetensors is in no line of log.jsonl"]
    ledger.append(new_edit(2))
    assert ledger.verify() == []
    assert torch.equal(ledger.get("e0001").tensors["targets"], new_edit(2).tensors["targets"])


def test_an_interrupt_after_the_line_keeps_the_edit(folder, monkeypatch):
    """Once the line is there the edit is there, tensors and all, even if the caller never heard of it."""
    ledger = opened(folder)

    def interrupted(*args):
        append_lines(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "append_lines", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.append(new_edit(1))
    assert ids(ledger.edits) == ["e0001"]
    assert ledger.verify() == []


# Tampering


def tampered(folder):
    """Every file of a ledger with one thing changed, one at a time."""
    for file in sorted(f for f in folder.rglob("*") if f.is_file() and f.name != "lock"):
        data = file.read_bytes()
        name = str(file.relative_to(folder))
        for place in range(0, len(data), max(1, len(data) // 40)):
            yield f"{name} flipped at {place}", file, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        yield f"{name} emptied", file, b""
        yield f"{name} removed", file, None


def test_tampering_with_any_file_is_found(folder):
    ledger = opened(folder)
    ledger.append(new_edit(1))
    ledger.append(new_edit(2))
    ledger.undo("e0001")
    assert ledger.verify() == verify_folder(folder) == []
    count = 0
    for what, file, data in list(tampered(folder)):
        original = file.read_bytes()
        file.unlink() if data is None else file.write_bytes(data)
        assert verify_folder(folder), what
        file.write_bytes(original)
        count += 1
    assert count > 150
    assert verify_folder(folder) == []


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (1, 2), (0, 0, 1, 2)])
def test_lines_reordered_dropped_or_doubled_are_found(folder, order):
    ledger = opened(folder)
    ledger.append(new_edit(1))
    ledger.append(new_edit(2))
    ledger.undo("e0001")
    lines = log_of(folder).read_bytes().splitlines(keepends=True)
    log_of(folder).write_bytes(b"".join(lines[number] for number in order))
    assert verify_folder(folder)
    with pytest.raises(LedgerError, match="line . of .*log.jsonl was altered or damaged"):
        opened(folder)


def test_an_altered_event_is_named_and_nothing_is_changed(folder):
    ledger = opened(folder)
    for seed in (1, 2, 3):
        ledger.append(new_edit(seed))
    text = log_of(folder).read_text("utf-8")
    log_of(folder).write_text(text.replace("subject 2-0", "subject 9-0"), "utf-8")
    before = snapshot(folder)
    with pytest.raises(LedgerError, match="line 2 of .*altered.*restore"):
        opened(folder)
    assert verify_folder(folder) == ["line 2 of log.jsonl was altered, or the line before it was"]
    assert snapshot(folder) == before


def test_altered_tensors_are_not_folded(folder):
    base = Draw(9, torch.float32).normal(D_V, D_K)
    ledger = opened(folder)
    ledger.append(new_edit(1))
    ledger.append(new_edit(2))
    file = folder / "edits" / "e0001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    again = opened(folder)
    with pytest.raises(LedgerError, match="e0001.safetensors was altered.*undo edit e0001"):
        weights(again, base)
    again.undo("e0001")
    assert torch.equal(weights(again, base), fold(base, SITES[0], [new_edit(2)]))
    file.unlink()
    with pytest.raises(LedgerError, match="e0001.safetensors cannot be read"):
        opened(folder).get("e0001").write(SITES[0])


def test_tensors_of_the_wrong_shape_are_found_though_every_digest_fits(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Edit, "write", lambda self, site: None)  # a writer without checks
        opened(folder).append(new_edit(1, tensors={f"{SITES[0]}/keys": torch.zeros(1, 1)}))
    assert "edit e0001: edit e0001 has no tensor" in opened(folder).verify()[0]


def test_a_ledger_moved_or_copied_is_still_good(folder, tmp_path):
    opened(folder).append(new_edit(1))
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    copy = opened(tmp_path / "copy")
    assert copy.verify() == []
    copy.get("e0001").write(SITES[0])


def test_a_log_without_its_header_is_no_place_for_a_new_ledger(folder):
    opened(folder).append(new_edit(1))
    (folder / "ledger.json").unlink()
    before = log_of(folder).read_bytes()
    with pytest.raises(LedgerError, match="has a log but no ledger.json"):
        opened(folder)
    assert log_of(folder).read_bytes() == before


# Others at work


def test_what_another_wrote_is_seen_at_the_next_look(folder):
    one, two = opened(folder), opened(folder)
    one.append(new_edit(1))
    assert ids(two.edits) == ["e0001"]
    assert two.append(new_edit(2)).id == "e0002"
    one.undo("e0002")
    assert not two.is_active("e0002")
    with pytest.raises(InputError, match="undone already"):
        two.undo("e0002")
    assert one.verify() == two.verify() == []


def test_locks_nest(folder):
    ledger = opened(folder)
    with ledger.locked(), ledger.locked():
        ledger.append(new_edit(1))
    opened(folder).append(new_edit(2))
    assert ids(ledger.edits) == ["e0001", "e0002"]


def test_a_lock_held_elsewhere_is_waited_for_then_named(folder):
    holder, waiter = opened(folder), Ledger.open(folder, MODEL, timeout=0.1)
    with holder.locked():
        began = time.monotonic()
        with pytest.raises(LedgerError, match=rf"held by process {os.getpid()}, waited 0.1 s: let it finish"):
            waiter.append(new_edit(1))
        assert 0.1 <= time.monotonic() - began < 5
        assert waiter.edits == ()  # reading needs no lock
    waiter.append(new_edit(1))
    with pytest.raises(RuntimeError, match="inside"), holder.locked():
        raise RuntimeError("inside")
    waiter.append(new_edit(2))


def test_a_line_being_written_is_no_crash(folder):
    """Another process is in the middle of its line: no warning, and the line is seen when it is whole."""
    one, two = opened(folder), opened(folder)
    one.append(new_edit(1))
    whole = log_of(folder).read_bytes()
    one.undo("e0001")
    rest = log_of(folder).read_bytes()[len(whole) :]
    with one.locked():
        log_of(folder).write_bytes(whole + rest[:10])
        assert ids(two.active) == ["e0001"]
        log_of(folder).write_bytes(whole + rest)
    assert two.active == ()


def test_threads_take_turns(folder):
    ledger = opened(folder)
    threads = [threading.Thread(target=lambda: [ledger.append(new_edit(s, rows=1)) for s in range(5)]) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ids(ledger.edits) == [f"e{n:04d}" for n in range(1, 11)]
    assert ledger.verify() == []


def append_ten(folder, first):
    torch.set_num_threads(1)
    ledger = opened(folder)
    for seed in range(first, first + 10):
        edit = ledger.append(new_edit(seed, rows=1))
        if seed % 5 == 0:
            ledger.undo(edit.id)


def killed_while_holding(folder, ready):
    with opened(folder).locked():
        ready.set()
        time.sleep(600)


def test_two_processes_append_to_one_ledger(folder):
    """Both also race to make it."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=append_ten, args=(folder, first)) for first in (100, 200)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    ledger = opened(folder)
    assert ledger.verify() == []
    assert ids(ledger.edits) == [f"e{n:04d}" for n in range(1, 21)]
    facts = sorted(edit.facts[0].subject for edit in ledger.edits)
    assert facts == sorted(f"subject {seed}-0" for first in (100, 200) for seed in range(first, first + 10))
    undone = sorted(edit.facts[0].subject for edit in ledger.edits if not ledger.is_active(edit.id))
    assert undone == sorted(f"subject {seed}-0" for seed in (100, 105, 200, 205))


def test_a_killed_holder_leaves_no_lock(folder):
    opened(folder)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=killed_while_holding, args=(folder, ready))
    process.start()
    assert ready.wait(120)
    with pytest.raises(LedgerError, match=f"held by process {process.pid}"):
        Ledger.open(folder, MODEL, timeout=0.0).append(new_edit(1))
    process.kill()
    process.join(60)
    assert Ledger.open(folder, MODEL, timeout=5.0).append(new_edit(1)).id == "e0001"


def test_the_cache_writes_atomically_for_us():
    """The fault tests above rely on it."""
    assert module.write_atomically is files.write_atomically
