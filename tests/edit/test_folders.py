"""Checkpoints and adapters as folders: there whole or not at all, and in the place of nothing but their own kind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rebind.edit import folders
from rebind.edit.card import model_card
from rebind.edit.delta import save_delta
from rebind.edit.export import export_peft, save_model
from rebind.errors import InputError, StorageError
from tests.edit.edited import contents, left_in, word_tokenizer

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


def _saved(kind, case, folder, name="first"):
    """An export of either kind, again into the same folder."""
    card = model_card(case.edits, name, "0" * 64, library="peft" if kind == "adapter" else "transformers")
    if kind == "adapter":
        export_peft(case.model, case.changes, folder, base_name=name, card=card, overwrite=True)
    else:
        save_model(case.model, word_tokenizer(), folder, card, overwrite=True)


def _write(folder, files):
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}", "log.jsonl": "{}", "checkpoints/step-1/config.json": "{}"},  # a run of `rebind train`
        {"config.json": "{}", "summary.json": "{}"},  # of `rebind eval`
        {"config.json": "{}", "model.safetensors": "weights"},
        {"config.json": "{}", "model.safetensors": "weights", "README.md": "---\ntags:\n- rebind\n---\nMy model."},
    ],
)
def test_a_config_alone_makes_no_export(files, llama, tokenizer, tmp_path):
    """Runs, results and other people's models have a config.json too."""
    _write(tmp_path / "out", files)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="out holds other things and is not replaced, expected a new or empty folder"):
        save_model(llama.model, tokenizer, tmp_path / "out", "card", overwrite=True)
    assert contents(tmp_path) == before


def test_an_adapter_of_another_program_is_not_replaced(llama, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (tmp_path / "out" / name).write_text("trained for a week")
    before = contents(tmp_path)
    with pytest.raises(InputError, match="holds other things and is not replaced"):
        _saved("adapter", llama, tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("listed", [True, False])
def test_files_that_no_export_wrote_stay(kind, listed, llama, tmp_path):
    out = tmp_path / "out"
    _saved(kind, llama, out)
    if not listed:
        (out / folders.LIST).unlink()
    _write(out, {"notes.txt": "mine", "sub/chapter.txt": "years"})
    (out / "link").symlink_to(tmp_path)
    before = contents(tmp_path)
    says = r"out holds link, notes.txt and sub/chapter.txt besides an earlier export and is not replaced.*: move them"
    with pytest.raises(InputError, match=says):
        _saved(kind, llama, out, "second")
    assert contents(tmp_path) == before
    for number in range(5):
        (out / f"a{number}").touch()
    with pytest.raises(InputError, match=r"holds a0, a1, a2 and 5 more besides"):
        _saved(kind, llama, out, "second")
    for name in ("notes.txt", "sub/chapter.txt", "link", *(f"a{number}" for number in range(5))):
        (out / name).unlink()
    _saved(kind, llama, out, "second")
    assert "second" in (out / "README.md").read_text()
    assert not (out / "sub").exists()
    assert left_in(tmp_path) == ["out"]


def test_a_file_that_appears_meanwhile_stays(llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    real = folders.write_folder_atomically

    def meanwhile(path, fill):
        real(path, fill)
        _write(out, {"notes.txt": "mine"})

    monkeypatch.setattr(folders, "write_folder_atomically", meanwhile)
    with pytest.raises(InputError, match=r"out holds notes.txt besides an earlier export .*: move it"):
        save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "README.md").read_text() == "first"
    assert left_in(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_what_an_earlier_version_exported_is_replaced(kind, llama, tmp_path):
    """It left no list; its card shows what it is."""
    out = tmp_path / "out"
    _saved(kind, llama, out)
    (out / folders.LIST).unlink()
    if kind == "model":
        (out / "model.safetensors").rename(out / "model-00001-of-00002.safetensors")
        names = ("model.safetensors.index.json", "vocab.json", "merges.txt", "delta.safetensors")
        _write(out, dict.fromkeys(names, "old"))
    _saved(kind, llama, out, "second")
    assert "second" in (out / "README.md").read_text()
    assert not list(out.glob("model-*"))
    (out / folders.LIST).unlink()
    _write(out, {"model-best-of-three.safetensors": "mine"})
    with pytest.raises(InputError, match=r"holds model-best-of-three.safetensors besides"):
        _saved(kind, llama, out, "third")
    (out / "README.md").write_text("another's card")
    with pytest.raises(InputError, match="holds other things"):
        _saved(kind, llama, out, "third")


def test_files_of_a_tokenizer_that_nobody_knows_are_an_exports_own(llama, tokenizer, tmp_path, monkeypatch):
    real = type(tokenizer).save_pretrained

    def save(self, folder):
        real(self, folder)
        _write(folder, {"sub/words.bin": ""})

    monkeypatch.setattr(type(tokenizer), "save_pretrained", save)
    save_model(llama.model, tokenizer, tmp_path / "out", "first")
    monkeypatch.undo()
    save_model(llama.model, tokenizer, tmp_path / "out", "second", overwrite=True)
    assert not (tmp_path / "out" / "sub").exists()


def test_a_change_in_the_folder_of_a_model_goes_with_it(llama, tokenizer, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        save_model(llama.model, tokenizer, out, "card", overwrite=True)
        assert "change.safetensors" not in left_in(out)
        for name in ("", "change.safetensors"):
            save_delta(llama.changes, out / name, overwrite=True)
        save_delta(llama.changes, out, overwrite=True)
    listed = (out / folders.LIST).read_text().splitlines()
    assert sorted([*listed, folders.LIST]) == left_in(out)


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
