"""The ledger when the disk fails, the process dies or others write too: no edit is lost, none is half there."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from rebind import files
from rebind.edit.ledger import ledger as module
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.ledger.log import append_lines
from rebind.errors import InputError, LedgerError, LedgerWarning, RebindError, StorageError
from tests.edit.ledgers import MODEL, ids, log_of, opened, snapshot
from tests.edit.writes import new_edit


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


# Crashes


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


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_what_is_advised_about_a_damaged_line_helps(folder, damaged):
    ledger = opened(folder)
    for number in (1, 2, 3):
        ledger.append(new_edit(number))
    lines = log_of(folder).read_bytes().splitlines(keepends=True)
    lines[damaged - 1] = lines[damaged - 1].replace(b"e000", b"e900", 1)
    log_of(folder).write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=f"line {damaged} of .* delete that line and all after it"):
        opened(folder)
    log_of(folder).write_bytes(b"".join(lines[: damaged - 1]))
    again = opened(folder)
    assert ids(again.edits) == [f"e000{number}" for number in range(1, damaged)]
    again.append(new_edit(4))
    assert opened(folder).get(f"e000{damaged}").facts == new_edit(4).facts


def test_an_edit_whose_tensors_are_damaged_can_be_undone(folder):
    ledger = opened(folder)
    for number in (1, 2):
        ledger.append(new_edit(number))
    (folder / "edits" / "e0001.safetensors").write_bytes(b"nothing")
    again = opened(folder)
    with pytest.raises(LedgerError, match="restore the file from a copy, or undo edit e0001"):
        again.get("e0001").write(again.get("e0001").sites[0])
    again.undo("e0001")
    assert ids(opened(folder).active) == ["e0002"]


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
