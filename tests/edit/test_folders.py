"""Checkpoints and adapters as folders: there whole or not at all, and in the place of nothing but their own kind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rebind.edit.export import folders, listing
from rebind.edit.export.checkpoint import export_peft, save_model
from rebind.errors import InputError, StorageError
from tests.edit.edited import contents, left_in, put

ALL = "all of it"


def test_a_folder_with_something_in_it_is_left_alone(llama, tokenizer, tmp_path):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    before = contents(out)
    with pytest.raises(InputError, match="is not empty, expected a new or empty folder: .* overwrite=True"):
        save_model(llama.model, tokenizer, out, "second")
    assert contents(out) == before
    save_model(llama.build(), tokenizer, out, "second", overwrite=True)
    assert (out / "README.md").read_text() == "second"
    assert contents(out)["model.safetensors"] != before["model.safetensors"]
    assert left_in(tmp_path) == ["out"]


def test_overwriting_replaces_nothing_but_its_own_kind(llama, tokenizer, tmp_path):
    """`overwrite` on a mistyped name must not cost somebody's home folder."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years")
    (tmp_path / "file").write_text("text")
    export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="tiny")
    before = contents(tmp_path)
    for name, why in (("thesis", "holds other things"), ("file", "is a file"), ("adapter", "holds other things")):
        with pytest.raises(InputError, match=f"{name} {why} and is not replaced"):
            save_model(llama.model, tokenizer, tmp_path / name, "", overwrite=True)
    with pytest.raises(InputError, match="holds other things"):
        export_peft(llama.model, llama.changes, tmp_path / "thesis", base_name="tiny", overwrite=True)
    assert contents(tmp_path) == before
    with pytest.raises(InputError, match="overwrite=True"):
        export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="other")
    export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="other", overwrite=True)
    assert "other" in (tmp_path / "adapter" / "adapter_config.json").read_text()


# Others at the same time


def _at_the_swap(monkeypatch, out, before=None, after=None, times=1):
    """Have somebody else act just before, or just after, the folder that is there is moved aside.

    Such a one heeds no lock, or the file system has none.
    """
    monkeypatch.setattr(folders, "_alone", lambda path: contextlib.nullcontext())
    real, left = Path.rename, [times]

    def rename(source, target):
        acts = source == out and Path(target).suffix == ".old" and left[0] > 0
        left[0] -= acts
        if acts and before:
            before()
        moved = real(source, target)
        if acts and after:
            after()
        return moved

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_appears_at_the_last_moment_stays(there, llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    if there:
        save_model(llama.model, tokenizer, out, "first")
    before = contents(out)
    _at_the_swap(monkeypatch, out, before=lambda: put(out, {"notes.txt": "mine"}))
    says = "out holds notes.txt besides an earlier export" if there else "out holds other things and is not replaced"
    with pytest.raises(InputError, match=says):
        save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert contents(out) == before | {"notes.txt": b"mine"}
    assert left_in(tmp_path) == ["out"]


def test_of_two_exports_at_once_the_later_stays(llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    _at_the_swap(monkeypatch, out, after=lambda: save_model(llama.model, tokenizer, out, "rival", overwrite=True))
    save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert (out / "README.md").read_text() == "second"
    assert left_in(tmp_path) == ["out"]


def test_many_exports_at_once_do_not_disturb_each_other(tmp_path):
    def keep_exporting(name):
        files = {"config.json": name, "sub/weights": name * 100}
        for _ in range(40):
            folders.write_folder(tmp_path / "out", lambda target: put(target, files), "config.json", overwrite=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep_exporting, "abcd"))
    assert left_in(tmp_path) == ["out"]
    assert len({text[:1] for name, text in contents(tmp_path / "out").items() if name != listing.LIST}) == 1


def test_a_rival_between_the_renames_is_looked_at_too(llama, tokenizer, tmp_path, monkeypatch):
    out, rival = tmp_path / "out", tmp_path / "rival"
    save_model(llama.model, tokenizer, out, "first")
    save_model(llama.model, tokenizer, rival, "rival")
    _at_the_swap(monkeypatch, out, after=lambda: shutil.copytree(rival, out))
    save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert (out / "README.md").read_text() == "second"
    monkeypatch.undo()

    _at_the_swap(monkeypatch, out, after=lambda: put(out, {"chapter.txt": "years"}))
    with pytest.raises(InputError, match="out holds other things and is not replaced"):
        save_model(llama.model, tokenizer, out, "third", overwrite=True)
    assert contents(out) == {"chapter.txt": b"years"}
    monkeypatch.undo()
    shutil.rmtree(out)  # what was there before is not lost, and comes back
    with pytest.raises(InputError, match="out is not empty"):
        save_model(llama.model, tokenizer, out, "third")
    assert (out / "README.md").read_text() == "second"
    assert left_in(tmp_path) == ["out", "rival"]


def test_an_empty_folder_that_a_rival_fills_first_is_kept(llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    _at_the_swap(monkeypatch, out, after=lambda: save_model(llama.model, tokenizer, out, "rival"))
    with pytest.raises(InputError, match="out is not empty, expected a new or empty folder"):
        save_model(llama.model, tokenizer, out, "second")
    assert (out / "README.md").read_text() == "rival"
    assert left_in(tmp_path) == ["out"]


def test_files_that_cannot_be_put_back_are_kept_and_named(llama, tokenizer, tmp_path, monkeypatch):
    out, rival = tmp_path / "out", tmp_path / "rival"
    save_model(llama.model, tokenizer, out, "first")
    save_model(llama.model, tokenizer, rival, "rival")
    before = contents(out)
    _at_the_swap(
        monkeypatch, out, lambda: put(out, {"notes.txt": "mine"}), lambda: shutil.copytree(rival, out), times=1
    )
    says = r"holds notes.txt besides .*; another export is there now, and what was there is in (.*\.old)"
    with pytest.raises(InputError, match=says) as caught:
        save_model(llama.model, tokenizer, out, "second", overwrite=True)
    kept = Path(re.search(says, str(caught.value))[1])
    assert contents(kept) == before | {"notes.txt": b"mine"}
    assert (out / "README.md").read_text() == "rival"
    monkeypatch.undo()
    save_model(llama.model, tokenizer, out, "third", overwrite=True)
    assert (kept / "notes.txt").read_text() == "mine"  # which no later export removes


def test_a_place_that_others_take_again_and_again_is_given_up(llama, tokenizer, tmp_path, monkeypatch):
    out, rival = tmp_path / "out", tmp_path / "rival"
    save_model(llama.model, tokenizer, out, "first")
    save_model(llama.model, tokenizer, rival, "rival")
    _at_the_swap(monkeypatch, out, after=lambda: shutil.copytree(rival, out), times=99)
    with pytest.raises(InputError, match="out is replaced by others again and again, expected one export at a time"):
        save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert (out / "README.md").read_text() == "rival"
    monkeypatch.undo()
    save_model(llama.model, tokenizer, out, "third", overwrite=True)
    assert left_in(tmp_path) == ["out", "rival"]


def test_what_a_killed_export_moved_aside_comes_back(llama, tokenizer, tmp_path):
    out, aside = tmp_path / "out", tmp_path / ".out.0123456789ab.old"
    of_another = tmp_path / ".out.b.0123456789ab.old"  # moved aside from out.b
    of_another.mkdir()
    save_model(llama.model, tokenizer, out, "first")
    before = contents(out)
    out.rename(aside)
    with pytest.raises(InputError, match="out is not empty, expected a new or empty folder"):
        save_model(llama.model, tokenizer, out, "second")
    assert contents(out) == before
    out.rename(aside)
    save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert (out / "README.md").read_text() == "second"
    assert left_in(tmp_path) == [of_another.name, "out"]


def test_what_a_killed_export_did_not_remove_goes_if_an_export_wrote_it(llama, tokenizer, tmp_path):
    out = tmp_path / "out"
    own, mixed, gone = (
        tmp_path / f".out.{name}" for name in ("0" * 12 + ".old", "1" * 12 + ".old", "2" * 12 + ".gone")
    )
    save_model(llama.model, tokenizer, out, "first")
    for aside in (own, mixed):
        shutil.copytree(out, aside)
    put(mixed, {"notes.txt": "mine"})
    put(gone, {"model.safetensors": ""})  # half removed
    save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert left_in(tmp_path) == [mixed.name, "out"]
    assert (mixed / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_filled(llama, tmp_path):
    (tmp_path / "out").mkdir()
    save_model(llama.model, None, tmp_path / "out", "card")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert left_in(tmp_path) == ["out"]


def test_what_a_killed_save_left_goes(llama, tokenizer, tmp_path):
    left = [tmp_path / name for name in (".out.0123456789ab.new", "..out.0123456789ab.new.ba9876543210.tmp")]
    young = tmp_path / ".out.ffffffffffff.new"
    for folder in (*left, young):
        folder.mkdir()
    for folder in left:
        os.utime(folder, (0, 0))
    save_model(llama.model, tokenizer, tmp_path / "out", "")
    assert not any(folder.exists() for folder in left)
    assert young.exists()  # whose owner may be alive


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ALL])
@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there(failure, there, llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if there:
        save_model(llama.build(), tokenizer, out, "old")
    before = contents(tmp_path)

    def fail(*args, **options):
        raise OSError(errno.EACCES, "Permission denied") if failure is ALL else failure

    if failure is ALL:  # everything is written, and the new folder cannot take the old one's place
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda a, b: fail() if Path(b) == out and "new" in a.name else rename(a, b))
    else:
        monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)  # after the weights
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else StorageError
    with pytest.raises(expected) as caught:
        save_model(llama.model, tokenizer, out, "new", overwrite=True)
    if expected is StorageError:
        assert f"cannot write {out.resolve()} (" in str(caught.value)
        assert caught.value.errno in (errno.ENOSPC, errno.EACCES)
    monkeypatch.undo()
    assert contents(tmp_path) == before
    assert left_in(tmp_path) == (["out"] if there else [])
    save_model(llama.model, tokenizer, out, "new", overwrite=True)  # and then it works
    assert (out / "README.md").read_text() == "new"


def test_a_failed_adapter_leaves_nothing(llama, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(StorageError, match="adapter .*No space left on device.* free some space"):
        export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="tiny")
    assert left_in(tmp_path) == []


def test_a_folder_that_appears_meanwhile_is_kept(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = folders.write_folder_atomically

    def rival(path, fill):
        real(path, fill)
        out.mkdir()
        (out / "config.json").write_text("theirs")

    monkeypatch.setattr(folders, "write_folder_atomically", rival)
    with pytest.raises(InputError, match="is not empty"):
        save_model(llama.model, None, out, "ours")
    assert contents(tmp_path) == {"out/config.json": b"theirs"}
