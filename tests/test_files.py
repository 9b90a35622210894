"""Files and folders that are whole or absent, whatever the disk or the user does meanwhile."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from rebind import files
from rebind.errors import InputError, RebindError, StorageError
from rebind.files import (
    is_file,
    require_writable,
    require_writable_beside,
    write_atomically,
    write_folder_atomically,
)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_with(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_is_written_and_replaced(tmp_path):
    target = tmp_path / "deep" / "er" / "file"
    for data in (b"first", b"second", b""):
        write_atomically(target, data)
        assert target.read_bytes() == data
    assert names_in(target.parent) == ["file"]
    (tmp_path / "plain").touch()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode  # readable as any other file


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path):
    for place in (tmp_path, tmp_path / "deep" / "er"):
        require_writable(place, "name another")
    assert names_in(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file, expected a folder: name another"):
        require_writable(tmp_path / "file" / "in", "name another")


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_leaves_the_old_file(tmp_path, monkeypatch, step, number):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    monkeypatch.setattr(step, fail_with(number))
    with pytest.raises(StorageError, match=r"cannot write .*file .*free some space") as caught:
        write_atomically(target, b"new")
    assert isinstance(caught.value, RebindError)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == number
    assert os.strerror(number) in str(caught.value)
    assert target.read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


def test_an_interrupt_leaves_the_old_file(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


def test_the_bytes_are_on_disk_before_the_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr("os.fsync", lambda handle: (done.append("sync"), fsync(handle))[1])
    monkeypatch.setattr("pathlib.Path.replace", lambda a, b: (done.append("rename"), replace(a, b))[1])
    write_atomically(tmp_path / "file", b"new")
    assert done == ["sync", "rename", "sync"]


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    for place in ("inside", "inside/deep"):
        with pytest.raises(InputError, match="file is a file, expected a folder: choose another name"):
            write_atomically(tmp_path / "file" / place, b"x")
        with pytest.raises(StorageError, match=f"cannot write .*{place}"):  # for whoever goes on without a cache
            write_atomically(tmp_path / "file" / place, b"x")


def test_a_folder_in_a_files_place(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="there is a folder, expected a file: choose another name"):
        write_atomically(tmp_path / "there", b"x")
    assert names_in(tmp_path) == ["there"]


def put(name, data):
    return lambda folder: (folder / name).write_bytes(data) and None


def test_a_folder_appears_when_it_is_full(tmp_path):
    target = tmp_path / "deep" / "folder"

    def fill(folder):
        assert folder.parent == target.parent  # the same file system
        assert not target.exists()
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_bytes(b"a")

    write_folder_atomically(target, fill)
    assert (target / "sub" / "a").read_bytes() == b"a"
    assert names_in(target.parent) == ["folder"]


def test_a_folder_that_is_there_is_kept(tmp_path):
    target = tmp_path / "folder"
    write_folder_atomically(target, put("a", b"first"))
    write_folder_atomically(target, lambda folder: pytest.fail("filled again"))
    assert (target / "a").read_bytes() == b"first"


def test_a_folder_that_another_process_finished_first_is_kept(tmp_path):
    target = tmp_path / "folder"

    def fill(folder):
        write_folder_atomically(target, put("a", b"theirs"))
        (folder / "a").write_bytes(b"ours")

    write_folder_atomically(target, fill)
    assert (target / "a").read_bytes() == b"theirs"
    assert names_in(tmp_path) == ["folder"]


@pytest.mark.parametrize("raised", [RuntimeError("no"), KeyboardInterrupt(), InputError("no"), OSError("a library's")])
def test_a_fill_that_fails_leaves_nothing(tmp_path, raised):
    def fill(folder):
        (folder / "half").write_bytes(b"x")
        raise raised

    with pytest.raises(type(raised)) as caught:
        write_folder_atomically(tmp_path / "folder", fill)
    assert caught.value is raised
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.rename"])
def test_a_full_disk_leaves_no_folder(tmp_path, monkeypatch, step):
    monkeypatch.setattr(step, fail_with(errno.ENOSPC))
    with pytest.raises(StorageError, match="cannot write .*folder .No space left on device") as caught:
        write_folder_atomically(tmp_path / "folder", put("a", b"x"))
    assert caught.value.errno == errno.ENOSPC
    assert names_in(tmp_path) == []


def test_a_file_in_a_folder_s_place(tmp_path):
    (tmp_path / "folder").write_bytes(b"mine")
    with pytest.raises(InputError, match="folder is a file, expected a folder: choose another name"):
        write_folder_atomically(tmp_path / "folder", put("a", b"x"))
    assert (tmp_path / "folder").read_bytes() == b"mine"
    assert names_in(tmp_path) == ["folder"]


def test_what_a_killed_process_left_is_removed_once_old(tmp_path):
    old, young, other = (tmp_path / name for name in (".folder.1.tmp", ".folder.2.tmp", ".else.1.tmp"))
    for left in (old, young, other):
        left.mkdir()
        (left / "half").touch()
    long_ago = time.time() - files.STALE_AFTER - 60
    for left in (old, other):
        os.utime(left, (long_ago, long_ago))
    write_folder_atomically(tmp_path / "folder", put("a", b"x"))
    assert names_in(tmp_path) == [".else.1.tmp", ".folder.2.tmp", "folder"]


def test_a_folder_that_is_put_in_its_place_needs_room_beside_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "require_writable", lambda path, step: asked.append(path))
    (tmp_path / "there").mkdir()
    for name in ("there", "new/deep"):
        require_writable_beside(tmp_path / name, "name another")
    assert asked == [tmp_path, tmp_path / "new"]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file, expected a folder: name another"):
        require_writable_beside(tmp_path / "file", "name another")


def test_a_text_too_long_for_a_name_is_no_file(tmp_path):
    assert not is_file("word " * 80)
    (tmp_path / "file").touch()
    assert is_file(tmp_path / "file")
    assert not is_file(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="has other modes")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_of_a_folder_have_the_mode_that_the_umask_says(tmp_path, umask):
    outside = tmp_path / "outside"
    outside.touch(0o600)

    def fill(folder):
        (folder / "sub").mkdir()
        (folder / "sub" / "private").touch(0o600)
        (folder / "program").touch(0o777)
        (folder / "link").symlink_to(outside)

    before = os.umask(umask)
    try:
        write_folder_atomically(tmp_path / "folder", fill)
    finally:
        os.umask(before)
    modes = {name: (tmp_path / "folder" / name).stat().st_mode & 0o777 for name in ("sub/private", "program")}
    assert modes == {"sub/private": 0o666 & ~umask, "program": 0o777 & ~umask}
    assert outside.stat().st_mode & 0o777 == 0o600, "what a link leads to is not ours"
    assert names_in(tmp_path / "folder") == ["link", "program", "sub"]
