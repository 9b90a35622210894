"""Checkpoints and adapters as folders: there whole or not at all, and in the place of nothing but their own kind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rebind.edit import folders
from rebind.edit.export import export_peft, save_model
from rebind.errors import InputError, StorageError
from tests.edit.edited import contents, left_in

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
