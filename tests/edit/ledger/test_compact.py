"""Compaction: old edits take less room, the model keeps every bit, and a kill at any moment loses nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from rebind.edit.ledger.compact import Compaction
from rebind.errors import InputError, LedgerError, StorageError, UnknownNameError
from tests.edit.ledger.test_snapshots import Process, assert_same, consolidation, dense_edit, weight_edit
from tests.edit.writes import ids, new_edit, open_ledger
from tests.support import raises


def filled(folder: Path) -> Process:
    """Return a ledger of 16 edits of all kinds, of which some are undone, with a consolidation in the middle."""
    process = Process(folder)
    ledger = process.ledger
    for seed in range(1, 4):
        for method in ("memit", "recursive", "alphaedit"):
            ledger.append(weight_edit(seed, method))
        ledger.append(dense_edit(seed, list(ledger.active)))
    ledger.append(consolidation(2, list(ledger.active)))
    ledger.append(dense_edit(9, list(ledger.active)))
    ledger.append(new_edit(20))
    ledger.append(new_edit(21))
    ledger.switch(["e0002", "e0009", "e0016"], on=False)
    ledger.redo("e0009", forced=True)
    return process


def test_compacting_keeps_every_bit_and_says_what_it_cost(tmp_path):
    process = filled(tmp_path / "ledger")
    before, digests = process.fold(), {edit.id: edit.digest for edit in process.ledger.edits}
    planned = process.ledger.compact(before="e0012", dry_run=True)
    assert process.ledger.sealed == ()
    done = process.ledger.compact(before="e0012")
    active = tuple(id for id in (f"e{number:04d}" for number in range(1, 12)) if id != "e0002")
    assert planned == Compaction(active, ("e0002",), done.bytes_before)
    assert (done.sealed, done.dropped) == (active, ("e0002",))
    assert done.bytes_after < done.bytes_before
    assert sum(file.stat().st_size for file in (tmp_path / "ledger" / "sealed").iterdir()) < done.bytes_after
    for opened in (process, Process(tmp_path / "ledger"), Process(tmp_path / "ledger", snapshots=False)):
        assert_same(opened.fold(), before)
        ledger = opened.ledger
        assert ledger.edits.ids == [*active, *(f"e{number:04d}" for number in range(12, 17))]
        assert ledger.sealed.ids == list(active)
        assert not ledger.is_active("e0016")
        assert {edit.id: edit.digest for edit in ledger.edits}.items() <= digests.items()
        assert ledger.get("e0009").forced
        assert ledger.verify() == ledger.verify(full=True) == []


def test_what_is_compacted_stays_and_what_is_not_can_be_undone(tmp_path):
    process = filled(tmp_path / "ledger")
    process.ledger.compact(keep_last=5)
    for on, id in ((False, "e0001"), (True, "e0001")):
        with raises(InputError, "sealed_edit"):
            process.ledger.switch([id], on=on)
    with pytest.raises(UnknownNameError):
        process.ledger.redo("e0002")
    process.ledger.switch(["e0013", "e0014"], on=False)
    process.ledger.redo("e0016")
    assert process.ledger.append(new_edit(30)).id == "e0017"
    assert_same(process.fold(), Process(tmp_path / "ledger", snapshots=False).fold())
    assert process.ledger.compact(keep_last=0).sealed == ("e0012", "e0015", "e0016", "e0017")
    assert_same(process.fold(), Process(tmp_path / "ledger", snapshots=False).fold())
    assert process.ledger.append(new_edit(31)).id == "e0018"
    assert open_ledger(tmp_path / "ledger").verify() == []
    assert [file.name for file in sorted((tmp_path / "ledger" / "edits").iterdir())] == ["e0018.safetensors"]
    assert len(list((tmp_path / "ledger" / "sealed").iterdir())) == 1


def test_ids_are_not_given_twice(tmp_path):
    ledger = open_ledger(tmp_path / "ledger")
    for seed in range(3):
        ledger.append(new_edit(seed))
    ledger.switch(["e0002", "e0003"], on=False)
    ledger.compact(keep_last=0)
    assert ledger.edits.ids == ["e0001"]
    assert ledger.append(new_edit(4)).id == "e0004"


def test_other_readers_and_writers_notice(tmp_path):
    ledger, other = filled(tmp_path / "ledger").ledger, Process(tmp_path / "ledger")
    before = other.fold()
    ledger.compact(keep_last=2)
    assert_same(other.fold(), before)
    assert other.ledger.append(new_edit(40)).id == "e0017"
    assert ledger.edits.ids[-1] == "e0017"
    with raises(InputError, "sealed_edit"):
        other.ledger.undo("e0001")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, "compact_range"),
        ({"before": "e0003", "keep_last": 1}, "compact_range"),
        ({"keep_last": -1}, "compact_range"),
        ({"keep_last": 99}, "nothing_to_compact"),
        ({"before": "e0001"}, "nothing_to_compact"),
        ({"before": "e0077"}, "unknown_edit"),
    ],
)
def test_what_cannot_be_compacted(tmp_path, arguments, code):
    ledger = filled(tmp_path / "ledger").ledger
    with pytest.raises((InputError, UnknownNameError)) as caught:
        ledger.compact(**arguments)
    assert caught.value.code == code


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "open")])
def test_a_kill_at_any_call_leaves_the_old_ledger_or_the_new_one(tmp_path, owner, name):
    """Kill a compaction at its first use of a call, then at its second, and so on, until it comes to its end."""
    before = filled(tmp_path / "ledger").fold()
    for number in itertools.count(1):
        folder = shutil.copytree(tmp_path / "ledger", tmp_path / str(number))
        child = os.fork()
        if child == 0:
            _compact_and_die(folder, owner, name, number)
        _, status = os.waitpid(child, 0)
        opened = Process(folder)
        assert_same(opened.fold(), before)
        compacted = bool(opened.ledger.sealed)
        assert opened.ledger.edits.ids == [f"e{n:04d}" for n in range(1, 17) if not (compacted and n == 2)]
        assert opened.ledger.verify() == []
        opened.ledger.append(new_edit(50))
        assert opened.ledger.verify() == []
        kept = {path.name for path in folder.rglob("*") if path.is_file() and "snapshots" not in path.parts}
        assert not any(file.endswith(".tmp") for file in kept)
        assert sum(file.endswith(".pack") for file in kept) == compacted
        assert ("e0001.safetensors" in kept) is not compacted
        if os.waitstatus_to_exitcode(status) == 0:
            assert compacted
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert number > 1


def _compact_and_die(folder: Path, owner: object, name: str, number: int) -> None:
    try:
        ledger, uses, original = open_ledger(folder), itertools.count(1), getattr(owner, name)

        def die(*arguments, **options):
            if next(uses) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, die)
        ledger.compact(keep_last=3)
        os._exit(0)
    finally:
        os._exit(7)


def test_sealed_tensors_are_checked(tmp_path):
    process = filled(tmp_path / "ledger")
    process.ledger.compact(keep_last=0)
    (pack,) = (tmp_path / "ledger" / "sealed").iterdir()
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    assert len(process.ledger.verify()) == 1
    with raises(LedgerError, "ledger_damaged"):
        Process(tmp_path / "ledger", snapshots=False).fold()


def test_no_symbolic_link_to_sealed_tensors_is_followed(tmp_path):
    process, victim = filled(tmp_path / "ledger"), tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "ledger" / "sealed").symlink_to(victim)
    with raises(StorageError, "symbolic_link"):
        process.ledger.compact(keep_last=0)
    assert list(victim.iterdir()) == []
    (tmp_path / "ledger" / "sealed").unlink()
    process.ledger.compact(keep_last=0)
    (tmp_path / "ledger" / "sealed").rename(victim / "sealed")
    (tmp_path / "ledger" / "sealed").symlink_to(victim / "sealed")
    with raises(LedgerError, "ledger_damaged"):
        Process(tmp_path / "ledger", snapshots=False).fold()


def test_facts_of_compacted_edits_are_found(tmp_path):
    ledger = filled(tmp_path / "ledger").ledger
    ledger.compact(keep_last=0)
    assert ids(ledger.active.with_facts_like(new_edit(20).facts)) == ["e0015"]
    assert torch.equal(ledger.get("e0015").tensors["model.layers.2.mlp.down_proj/keys"], _keys(20))
    assert "targets" not in ledger.get("e0015").tensors


def _keys(seed: int) -> torch.Tensor:
    return new_edit(seed).tensors["model.layers.2.mlp.down_proj/keys"]
