"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rebind.errors import InputError, StorageError
from rebind.storage import (
    check_writable,
    create_folder,
    make_folders,
    path_inside,
    storage_errors,
    write_file,
    write_json,
)
from tests.storage.processes import output_of, running, small_disk
from tests.support import raises

TEMPORARY = ".rebind-0123456789ab.tmp"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def filler(**files):
    """Return a function that fills a folder with these files."""

    def fill(folder):
        for name, content in files.items():
            (folder / name).write_bytes(content)

    return fill


# Files


def test_a_file_is_written_with_its_folders_and_replaced(tmp_path):
    for content in (b"one", b""):
        write_file(tmp_path / "a" / "b" / "file", content)
        assert (tmp_path / "a" / "b" / "file").read_bytes() == content
    assert names(tmp_path / "a" / "b") == ["file"]


def test_json_is_readable_and_finite(tmp_path):
    write_json(tmp_path / "file.json", {"name": "é", "n": [1]})
    assert (tmp_path / "file.json").read_text(encoding="utf-8") == '{\n "name": "é",\n "n": [\n  1\n ]\n}\n'
    for value in (float("nan"), {1, 2}):
        with raises(InputError, "not_json"):
            write_json(tmp_path / "file.json", value)
    assert b"name" in (tmp_path / "file.json").read_bytes()


@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_a_link_is_replaced_and_its_target_stays(tmp_path, target):
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    write_file(tmp_path / "link", b"new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == b"new"
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert names(tmp_path) == ["file", "folder", "link"]
    assert names(tmp_path / "folder") == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_decides_who_can_read(tmp_path, umask, mode):
    def fill(folder):
        (folder / "private").touch(mode=0o600)  # as safetensors does

    old = os.umask(umask)
    try:
        write_file(tmp_path / "file", b"x")
        create_folder(tmp_path / "folder", fill)
    finally:
        os.umask(old)
    for file in (tmp_path / "file", tmp_path / "folder" / "private"):
        assert file.stat().st_mode & 0o777 == mode


def test_a_killed_writer_leaves_the_old_or_the_new_content(tmp_path):
    code = """
for round in range(10**6):
    write_file(folder / "file", bytes([round % 251]) * 300_000)
    create_folder(folder / f"made-{round}", lambda made: [(made / name).write_bytes(b"x" * 50_000) for name in "ab"])
    print(round, flush=True)
"""
    for _ in range(3):
        with running(code, tmp_path):
            time.sleep(random.random() * 0.1)
        content = (tmp_path / "file").read_bytes()
        assert len(content) == 300_000
        assert len(set(content)) == 1
        for made in tmp_path.glob("made-*"):
            assert [(made / name).stat().st_size for name in "ab"] == [50_000, 50_000]


def test_writers_at_the_same_time_leave_one_of_their_contents(tmp_path):
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write_file, args=(tmp_path / "file", content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in contents
    assert names(tmp_path) == ["file"]


def test_temporaries_of_killed_processes_are_removed_after_a_day(tmp_path):
    outside = tmp_path / "outside"
    make_folders(outside / "kept")
    folder = tmp_path / "folder"
    make_folders(folder / TEMPORARY / "deep")
    (folder / ".rebind-aaaaaaaaaaaa.tmp").write_bytes(b"half")
    (folder / ".rebind-bbbbbbbbbbbb.tmp").symlink_to(outside)
    (folder / ".rebind-cccccccccccc.tmp").write_bytes(b"being written")
    (folder / ".mine.tmp").write_bytes(b"of somebody else")
    for path in folder.iterdir():
        if "cccc" not in path.name:
            os.utime(path, (0, 0), follow_symlinks=False)
    write_file(folder / "file", b"x")
    assert names(folder) == [".mine.tmp", ".rebind-cccccccccccc.tmp", "file"]
    assert names(outside) == ["kept"]


# What goes wrong


def test_what_lies_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    for path, code in (("file/below", "file_in_the_way"), ("folder", "folder_in_the_way")):
        with raises(StorageError, code) as caught:
            write_file(tmp_path / path, b"x")
        assert caught.value.errno
        assert str(tmp_path / path.split("/")[0]) in caught.value.problem
    for path in ("file", "file/below"):
        with raises(StorageError, "file_in_the_way"):
            create_folder(tmp_path / path, filler(a=b"x"))
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize(
    ("problem", "code", "number"),
    [
        (OSError(errno.ENOSPC, "full"), "disk_full", errno.ENOSPC),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "disk_full", errno.ENOSPC),
        (Exception("No space left on device (os error 28)"), "disk_full", errno.ENOSPC),  # as tokenizers has it
        (OSError(errno.EROFS, "read-only"), "no_write_access", errno.EROFS),
        (OSError(errno.EIO, "broken"), "storage_failure", errno.EIO),
    ],
)
def test_errors_of_the_system_have_codes_and_leave_nothing(tmp_path, problem, code, number):
    def fill(folder):
        (folder / "a").write_bytes(b"x")
        raise problem

    with pytest.raises(StorageError) as caught:
        create_folder(tmp_path / "folder", fill)
    assert (caught.value.code, caught.value.errno) == (code, number)
    assert names(tmp_path) == []


def test_errors_that_are_not_of_the_system_pass(tmp_path):
    for problem in (OSError("of a library"), SafetensorError("no tensors"), ValueError("x"), KeyboardInterrupt()):
        with pytest.raises(type(problem)) as caught, storage_errors(tmp_path):
            raise problem
        assert caught.value is problem


def test_a_full_disk_leaves_the_old_file(tmp_path):
    code = """
write_file(folder / "file", b"old")
for write in (
    lambda: write_file(folder / "file", b"x" * 200_000),
    lambda: create_folder(folder / "made", lambda made: (made / "a").write_bytes(b"x" * 200_000)),
    lambda: JsonLines(folder / "rows").append({"x": "x" * 200_000}),
):
    try:
        write()
    except RebindError as error:
        print(error.code, error.errno)
print((folder / "file").read_bytes(), sorted(os.listdir(folder)), (folder / "rows").stat().st_size)
"""
    printed = output_of(code, tmp_path, *small_disk(tmp_path)).splitlines()
    assert printed[:3] == [f"disk_full {errno.ENOSPC}"] * 3
    assert printed[3] == "b'old' ['file', 'rows'] 0"


def test_a_file_larger_than_the_limit_is_not_written(tmp_path):
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_file(folder / "file", b"x" * 2000)
except RebindError as error:
    print(error.code)
"""
    (tmp_path / "file").write_bytes(b"old")
    assert output_of(code, tmp_path) == "disk_full"
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_read_only_folder_is_reported(read_only):
    for write in (lambda path: write_file(path, b"x"), check_writable, make_folders):
        with raises(StorageError, "no_write_access"):
            write(read_only / "place")


# Asking first


def test_a_folder_that_can_be_made_is_writable_and_not_made(tmp_path):
    for path in (tmp_path, tmp_path / "a" / "b"):
        check_writable(path)
    assert names(tmp_path) == []


def test_a_file_or_a_dangling_link_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for path in ("file", "file/below", "link/below"):
        with raises(InputError, "file_in_the_way"):
            check_writable(tmp_path / path)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that even root cannot write")
def test_a_folder_of_the_system_is_not_writable():
    with pytest.raises(StorageError):
        check_writable("/proc/place")


# Places below a folder


def test_a_place_inside_is_never_reached_through_a_link(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    make_folders(root / "folder")
    make_folders(outside)
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "alias").symlink_to(root)  # how the user reaches the folder is the user's choice
    assert path_inside(tmp_path / "alias", "folder/file") == tmp_path / "alias" / "folder" / "file"
    assert path_inside(root, "new/deep/file") == root / "new" / "deep" / "file"
    for name in ("link/file", "link/deep/file", "dangling/file"):
        with raises(StorageError, "symbolic_link"):
            path_inside(root, name)
    for name in ("../outside/file", "folder/../../file", "/etc/passwd", ""):
        with raises(InputError, "path_outside"):
            path_inside(root, name)


# Folders


def test_a_folder_that_exists_is_not_filled_again(tmp_path):
    create_folder(tmp_path / "deep" / "folder", filler(a=b"first"))
    create_folder(tmp_path / "deep" / "folder", lambda folder: pytest.fail("filled again"))
    assert (tmp_path / "deep" / "folder" / "a").read_bytes() == b"first"


def test_a_folder_that_another_process_finished_first_stays(tmp_path):
    def fill(folder):
        filler(a=b"mine")(folder)
        create_folder(tmp_path / "folder", filler(a=b"theirs"))

    create_folder(tmp_path / "folder", fill)
    assert (tmp_path / "folder" / "a").read_bytes() == b"theirs"
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path, target):
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    with raises(StorageError, "symbolic_link"):
        create_folder(tmp_path / "link", filler(a=b"x"))
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert names(tmp_path) == ["file", "folder", "link"]


def test_text_that_is_not_unicode_is_refused_before_anything_is_written(tmp_path):
    with raises(InputError, "not_unicode"):
        write_json(tmp_path / "config.json", {"data": "\udcff"})
    assert not list(tmp_path.iterdir())
