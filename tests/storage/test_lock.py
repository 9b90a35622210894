"""One writer at a time."""

from __future__ import annotations

import threading
import time

import pytest

from rebind.errors import StorageError
from rebind.storage import lock
from tests.storage.processes import running, start
from tests.support import raises

HOLD = """
with lock(folder / "lock", 0):
    print("held", flush=True)
    signal.pause()
"""


def is_locked(path):
    try:
        with lock(path, 0):
            return False
    except StorageError as problem:
        return problem.code == "locked"


def test_another_process_waits_and_a_kill_releases(tmp_path):
    with running(HOLD, tmp_path):
        begin = time.monotonic()
        with raises(StorageError, "locked") as caught, lock(tmp_path / "lock", 0.1):
            pass
        assert caught.value.errno
        assert str(tmp_path) in caught.value.problem
        assert 0.1 <= time.monotonic() - begin < 5
    assert not is_locked(tmp_path / "lock")


def test_taking_it_again_in_the_same_thread_is_harmless(tmp_path):
    with lock(tmp_path / "lock", 0):
        with lock(tmp_path / "lock", 0), lock(str(tmp_path / "lock"), 1):
            pass
        with start(
            "try:\n    lock(folder / 'lock', 0).__enter__()\nexcept OSError:\n    sys.exit(7)", tmp_path
        ) as other:
            assert other.wait(timeout=60) == 7
    assert not is_locked(tmp_path / "lock")


def test_another_thread_waits(tmp_path):
    results = []
    with lock(tmp_path / "lock", 0):
        thread = threading.Thread(target=lambda: results.append(is_locked(tmp_path / "lock")))
        thread.start()
        thread.join()
    assert results == [True]


def test_it_is_released_and_errors_of_the_body_pass(tmp_path):
    with pytest.raises(FileNotFoundError), lock(tmp_path / "deep" / "lock", 0):
        raise FileNotFoundError(2, "of the body")
    assert not is_locked(tmp_path / "deep" / "lock")


def test_writers_take_turns(tmp_path):
    code = """
import time
for _ in range(10):
    with lock(folder / "lock", 30):
        count = int((folder / "count").read_text())
        time.sleep(0.002)
        (folder / "count").write_text(str(count + 1))
"""
    (tmp_path / "count").write_text("0")
    processes = [start(code, tmp_path) for _ in range(3)]
    for process in processes:
        with process:
            assert process.wait(timeout=60) == 0
    assert (tmp_path / "count").read_text() == "30"


@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_a_link_is_neither_followed_nor_written(tmp_path, target):
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "lock").symlink_to(tmp_path / target)
    with raises(StorageError, "symbolic_link"), lock(tmp_path / "lock", 0):
        pass
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "lock"]
    assert (tmp_path / "lock").is_symlink()


def test_filelock_itself_refuses_links(tmp_path):
    from filelock import FileLock

    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic"):
        FileLock(tmp_path / "lock").acquire(timeout=0)
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_read_only_folder_has_no_lock(read_only):
    with raises(StorageError, "no_write_access"), lock(read_only / "lock", 0):
        pass
