"""A ledger when the disk fails, the process dies or others write too: no edit is lost and none is half there."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch

from rebind.edit.ledger.creation import is_unfinished
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.ledger.log import LedgerState
from rebind.edit.ledger.verify import verify_folder
from rebind.errors import InputError, LedgerError, RebindError, StorageError
from tests.edit.writes import ids, new_edit, open_ledger, snapshot
from tests.support import raises

# Crashes


def test_a_log_cut_in_its_last_line_opens_at_the_last_complete_state(folder):
    ledger = open_ledger(folder)
    ledger.append(new_edit(1))
    log = folder / "log.jsonl"
    complete = len(log.read_bytes())
    ledger.append(new_edit(2, rows=1))
    data = log.read_bytes()
    for cut in range(complete, len(data)):
        log.write_bytes(data[:cut])
        assert ids(open_ledger(folder).edits) == ["e0001"]
        assert log.stat().st_size == cut, "reading must change nothing"
    again = open_ledger(folder)
    assert any("unfinished" in problem for problem in again.verify())
    again.append(new_edit(3))
    assert again.verify() == []
    assert open_ledger(folder).get("e0002").facts == new_edit(3).facts


def test_an_open_ledger_follows_the_log_on_disk(folder):
    """An unfinished line of another process is ignored until it is complete; a shorter log is an error."""
    ledger = open_ledger(folder)
    ledger.append(new_edit(1))
    log = folder / "log.jsonl"
    before = log.read_bytes()
    open_ledger(folder).undo("e0001")
    after = log.read_bytes()
    log.write_bytes(after[:-5])
    assert ids(ledger.active) == ["e0001"]
    log.write_bytes(after)
    assert ledger.active == ()
    log.write_bytes(before)
    with raises(LedgerError, "ledger_damaged"):
        _ = ledger.active


OPERATIONS = {
    "append": lambda ledger: ledger.append(new_edit(4)),
    "switch": lambda ledger: ledger.switch(["e0001", "e0003"], on=False),
}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("operation", "owner", "name", "uses"),
    [
        ("append", os, "fsync", 3),  # of the tensors, their folder and the log
        ("append", Path, "replace", 1),
        ("append", os, "open", 2),
        ("switch", os, "fsync", 1),
        ("switch", os, "write", 1),
    ],
)
def test_a_failing_system_call_leaves_the_ledger_as_it_was(folder, monkeypatch, operation, owner, name, uses, error):
    """Fail the first use of the call, then the second, and so on, until the operation no longer notices."""
    ledger = open_ledger(folder)
    for seed in (1, 2, 3):
        ledger.append(new_edit(seed))
    ledger.undo("e0002")
    before = snapshot(folder)
    original = getattr(owner, name)
    for number in itertools.count(1):
        remaining = [number]

        def fail(*args, remaining=remaining, **options):
            remaining[0] -= 1
            if remaining[0] == 0:
                raise error
            return original(*args, **options)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt, RebindError):
            patch.setattr(owner, name, fail)
            OPERATIONS[operation](ledger)
            break
        assert snapshot(folder) == before
        assert ids(ledger.edits) == ["e0001", "e0002", "e0003"]
        assert ids(ledger.active) == ["e0001", "e0003"]
    assert number > uses
    assert ledger.verify() == []
    assert ids(open_ledger(folder).active) == ids(ledger.active) != ["e0001", "e0003"]


def test_an_interrupt_after_the_line_was_written_keeps_the_edit(folder, monkeypatch):
    ledger = open_ledger(folder)

    def interrupt(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(LedgerState, "read_line", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ledger.append(new_edit(1))
    assert ids(ledger.edits) == ["e0001"]
    assert ledger.verify() == []


def test_a_read_only_ledger_can_be_read(folder, monkeypatch):
    open_ledger(folder).append(new_edit(1))
    (folder / "lock").unlink(missing_ok=True)
    original = os.open

    def read_only(path, flags, *args, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return original(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", read_only)
    ledger = open_ledger(folder)
    assert torch.equal(ledger.get("e0001").tensors["targets"], new_edit(1).tensors["targets"])
    with raises(StorageError, "no_write_access"):
        ledger.undo("e0001")
    assert ids(ledger.active) == ["e0001"]


# Several writers

# A forked process need not import torch again, which takes seconds.
START = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"


def test_two_ledger_objects_see_each_others_writes(folder):
    one, two = open_ledger(folder), open_ledger(folder)
    one.append(new_edit(1))
    assert ids(two.edits) == ["e0001"]
    with two.locked(), two.locked():
        assert two.append(new_edit(2)).id == "e0002"
    one.undo("e0002")
    with pytest.raises(InputError):
        two.undo("e0002")
    assert one.verify() == two.verify() == []


def test_threads_read_while_others_append(folder):
    ledger = open_ledger(folder)
    problems = []

    def append(seed):
        for _ in range(5):
            ledger.append(new_edit(seed, rows=1))

    def read():
        while len(edits := ids(ledger.edits)) < 10:
            if edits != [f"e{number:04d}" for number in range(1, len(edits) + 1)]:
                problems.append(edits)

    threads = [threading.Thread(target=append, args=(seed,)) for seed in (1, 2)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert ids(ledger.edits) == [f"e{number:04d}" for number in range(1, 11)]
    assert ledger.verify() == []


def append_ten(folder, first):
    torch.set_num_threads(1)
    ledger = open_ledger(folder)
    for seed in range(first, first + 10):
        edit = ledger.append(new_edit(seed, rows=1))
        if seed % 5 == 0:
            ledger.undo(edit.id)


def append_forever(folder, connection):
    torch.set_num_threads(1)
    ledger = open_ledger(folder)
    with ledger.locked():
        for seed in itertools.count():
            connection.send(ledger.append(new_edit(seed, rows=1)).id)


def test_two_processes_create_and_fill_one_ledger(folder):
    context = multiprocessing.get_context(START)
    processes = [context.Process(target=append_ten, args=(folder, first)) for first in (100, 200)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    ledger = open_ledger(folder)
    assert ledger.verify() == []
    assert ids(ledger.edits) == [f"e{number:04d}" for number in range(1, 21)]
    facts = sorted(edit.facts[0].subject for edit in ledger.edits)
    assert facts == sorted(f"subject {seed}-0" for first in (100, 200) for seed in range(first, first + 10))
    undone = sorted(edit.facts[0].subject for edit in ledger.edits if not ledger.is_active(edit.id))
    assert undone == sorted(f"subject {seed}-0" for seed in (100, 105, 200, 205))


def test_a_killed_writer_leaves_complete_edits_and_no_lock(folder):
    context = multiprocessing.get_context(START)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=append_forever, args=(folder, sender))
    process.start()
    reported = [receiver.recv() for _ in range(5)]
    ledger = Ledger.open(folder)
    ledger.timeout = 0.0
    with raises(StorageError, "locked"):
        ledger.append(new_edit(1))
    process.kill()
    process.join(60)
    assert ids(ledger.edits)[:5] == reported
    new_id = ledger.append(new_edit(7)).id
    assert ids(open_ledger(folder).edits)[-1] == new_id
    assert ledger.verify() == []


def test_an_undo_of_several_edits_is_one_line(folder):
    """However much of the write reaches the disk before a crash, all of them are undone or none."""
    ledger = open_ledger(folder)
    for seed in range(3):
        ledger.append(new_edit(seed))
    log = folder / "log.jsonl"
    before = len(log.read_bytes())
    ledger.switch(["e0001", "e0003"], on=False)
    data = log.read_bytes()
    for cut in range(before, len(data) + 1):
        log.write_bytes(data[:cut])
        assert ids(open_ledger(folder).active) in (["e0001", "e0002", "e0003"], ["e0002"])


# Logs and creations that were cut short


def test_an_emptied_log_is_damage(folder):
    open_ledger(folder).append(new_edit(1))
    before = snapshot(folder)["edits/e0001.safetensors"]
    for rest in (b"", b'{"event":'):
        (folder / "log.jsonl").write_bytes(rest)
        for _ in range(2):
            with raises(LedgerError, "ledger_damaged"):
                open_ledger(folder).append(new_edit(2))
        assert verify_folder(folder)
    assert snapshot(folder)["edits/e0001.safetensors"] == before


def test_a_log_without_its_last_lines_loses_no_tensors(folder):
    ledger = open_ledger(folder)
    for seed in range(3):
        ledger.append(new_edit(seed))
    files = {name: data for name, data in snapshot(folder).items() if name.startswith("edits/")}
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "log.jsonl").write_bytes(b"".join(lines[:2]))
    with raises(LedgerError, "ledger_damaged"):
        open_ledger(folder).append(new_edit(9))
    assert {name: data for name, data in snapshot(folder).items() if name.startswith("edits/")} == files


@pytest.mark.parametrize("uses", [1, 2, 3, 4])
def test_a_creation_that_was_cut_short_can_be_repeated(folder, monkeypatch, uses):
    """Killed at each of the calls that flush the log and the header."""
    remaining, original = [uses], os.fsync

    def fail(handle):
        remaining[0] -= 1
        if remaining[0] == 0:
            raise KeyboardInterrupt
        original(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(KeyboardInterrupt):
            open_ledger(folder)
    assert (folder / "ledger.json").exists() or is_unfinished(folder)
    assert open_ledger(folder).append(new_edit(1)).id == "e0001"
    assert not is_unfinished(folder)


def test_temporaries_of_killed_writers_are_removed(folder):
    open_ledger(folder).append(new_edit(1))
    leftover = folder / f".rebind-{'0' * 12}.tmp"
    leftover.write_bytes(b"half")
    open_ledger(folder).undo("e0001")
    assert not leftover.exists()
