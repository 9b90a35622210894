"""Exports replace earlier exports and nothing else."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from rebind.errors import InputError, StorageError
from rebind.storage import add_to_export, check_replaceable, exports, replace_folder, write_file
from rebind.storage.exports import MANIFEST
from tests.storage.processes import start
from tests.support import raises


def export(path, content=b"new", *, kind="adapter", overwrite=False, **more):
    def fill(folder):
        (folder / "weights").write_bytes(content)
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocabulary").write_bytes(content)
        for name, extra in more.items():
            (folder / name).write_bytes(extra)

    return replace_folder(path, fill, kind=kind, overwrite=overwrite)


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST}


def refused(path, **options):
    """Return the code with which both the question and the export itself refuse a folder that stays as it is."""
    before = sorted(path.parent.rglob("*")), contents(path)
    codes = set()
    for attempt in (export, check_replaceable):
        with pytest.raises(InputError) as caught:
            attempt(path, **{"kind": "adapter", **options})
        codes.add(caught.value.code)
    assert (sorted(path.parent.rglob("*")), contents(path)) == before
    (code,) = codes
    return code


NEW = {"weights": b"new", "tokenizer/vocabulary": b"new"}


def test_a_new_or_empty_folder_is_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "deep/new"):
        assert export(tmp_path / name) == tmp_path / name
        assert contents(tmp_path / name) == NEW
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "empty"]


def test_an_export_is_replaced_only_on_request(tmp_path):
    export(tmp_path / "out", b"old", old_file=b"gone afterwards")
    assert refused(tmp_path / "out") == "folder_not_empty"
    export(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_that_are_no_export_are_never_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_bytes(b"precious")
    assert refused(out, overwrite=True) == "not_an_export"
    (out / MANIFEST).write_bytes(b"not JSON")
    assert refused(out, overwrite=True) == "not_an_export"
    export(tmp_path / "model", kind="model")
    assert refused(tmp_path / "model", overwrite=True) == "not_an_export"
    (tmp_path / "file").touch()
    with raises(InputError, "file_in_the_way"):
        export(tmp_path / "file", overwrite=True)


def test_files_besides_the_export_are_named_and_protect_it(tmp_path):
    export(tmp_path / "out", b"old")
    (tmp_path / "out" / "tokenizer" / "notes.txt").write_bytes(b"precious")
    assert refused(tmp_path / "out", overwrite=True) == "other_files_in_export"
    with pytest.raises(InputError) as caught:
        export(tmp_path / "out", overwrite=True)
    assert "tokenizer/notes.txt" in caught.value.problem


def test_a_file_added_to_an_export_is_replaced_with_it(tmp_path):
    export(tmp_path / "out", b"old")
    add_to_export(tmp_path / "out" / "deep" / "delta")
    write_file(tmp_path / "out" / "deep" / "delta", b"x")
    export(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == NEW
    add_to_export(tmp_path / "elsewhere")  # in no export: nothing to record
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("problem", [OSError(28, "full"), ValueError("x"), KeyboardInterrupt()])
def test_the_old_export_stays_if_the_new_one_fails(tmp_path, problem):
    def fill(folder):
        (folder / "weights").write_bytes(b"half")
        raise problem

    export(tmp_path / "out", b"old")
    before = contents(tmp_path / "out")
    with pytest.raises((StorageError, ValueError, KeyboardInterrupt)):
        replace_folder(tmp_path / "out", fill, kind="adapter", overwrite=True)
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_export_comes_back_if_the_exchange_fails(tmp_path, monkeypatch):
    rename = Path.rename

    def full(path, target):
        if path.suffix == ".tmp":
            raise OSError(errno.ENOSPC, "full")
        return rename(path, target)

    export(tmp_path / "out", b"old")
    before = contents(tmp_path / "out")
    monkeypatch.setattr(Path, "rename", full)
    monkeypatch.setattr(exports, "exchange", lambda one, two: False)
    with raises(StorageError, "disk_full"):
        export(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_comes_into_the_folder_meanwhile_is_not_lost(tmp_path):
    def fill(folder):
        (folder / "weights").write_bytes(b"new")
        (tmp_path / "out" / "notes.txt").write_bytes(b"precious")

    export(tmp_path / "out", b"old")
    with raises(InputError, "other_files_in_export"):
        replace_folder(tmp_path / "out", fill, kind="adapter", overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_bytes() == b"precious"
    assert (tmp_path / "out" / "weights").read_bytes() == b"old"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems rename twice")
def test_an_export_takes_the_place_of_another_in_one_step(tmp_path, monkeypatch):
    export(tmp_path / "out", b"old")
    monkeypatch.setattr(Path, "rename", lambda path, target: pytest.fail("between two renames there is no export"))
    export(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_at_any_moment_leaves_a_whole_export(tmp_path, renames):
    code = f"""
from rebind.storage import exports
exports.exchange = lambda one, two: False  # as on a system that cannot do it
left, rename = [{renames}], Path.rename
def killed_rename(path, target):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return rename(path, target)
Path.rename = killed_rename
replace_folder(folder / "out", lambda made: (made / "weights").write_bytes(b"new"), kind="adapter", overwrite=True)
"""
    replace_folder(tmp_path / "out", lambda made: (made / "weights").write_bytes(b"old"), kind="adapter")
    with start(code, tmp_path) as process:
        killed = process.wait(timeout=60) != 0
    assert killed == (renames < 3)
    check_replaceable(tmp_path / "out", kind="adapter", overwrite=True)
    assert contents(tmp_path / "out") == {"weights": b"old" if renames < 2 else b"new"}
    export(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == NEW
    assert not list(tmp_path.glob(".*-old"))


def test_links_in_an_export_are_removed_and_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "weights").write_bytes(b"precious")
    out = tmp_path / "out"
    export(out, b"old")
    (out / "link").symlink_to(tmp_path / "outside")
    assert refused(out, overwrite=True) == "other_files_in_export"
    (out / "link").unlink()
    (out / "weights").unlink()
    (out / "weights").symlink_to(tmp_path / "outside" / "weights")
    (out / "tokenizer" / "vocabulary").unlink()
    (out / "tokenizer" / "vocabulary").symlink_to(tmp_path / "nothing")
    export(out, overwrite=True)
    assert contents(out) == NEW
    assert not (out / "weights").is_symlink()
    assert contents(tmp_path / "outside") == {"weights": b"precious"}
