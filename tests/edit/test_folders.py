"""Checkpoints and adapters as folders: there whole or not at all, and in the place of nothing but their own kind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rebind.edit import delta, folders, listing
from rebind.edit.card import model_card
from rebind.edit.delta import save_delta
from rebind.edit.export import export_peft, save_model
from rebind.errors import InputError, StorageError
from rebind.files import write_atomically
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
        (out / listing.LIST).unlink()
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
    (out / listing.LIST).unlink()
    if kind == "model":
        (out / "model.safetensors").rename(out / "model-00001-of-00002.safetensors")
        names = ("model.safetensors.index.json", "vocab.json", "merges.txt", "delta.safetensors")
        _write(out, dict.fromkeys(names, "old"))
    _saved(kind, llama, out, "second")
    assert "second" in (out / "README.md").read_text()
    assert not list(out.glob("model-*"))
    (out / listing.LIST).unlink()
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
    listed = json.loads((out / listing.LIST).read_text())
    assert sorted([*listed, listing.LIST]) == left_in(out)


@pytest.mark.parametrize("place", ["d/change.safetensors", "d/e", "link/d/change.safetensors"])
def test_a_change_below_the_folder_of_a_model_goes_with_it(place, llama, tokenizer, tmp_path):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    (tmp_path / "link").symlink_to(out)
    save_delta(llama.changes, (tmp_path if place.startswith("link") else out) / place)
    save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert not (out / "d").exists()
    assert left_in(tmp_path) == ["link", "out"]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("writes", [0, 1])
def test_a_change_that_is_killed_while_it_is_saved_blocks_nothing(
    there, writes, llama, tokenizer, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    if there:
        save_delta(llama.changes, out)
    done = []

    def killed(path, data):
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append(path)
        write_atomically(path, data)

    for module in (listing, delta):
        monkeypatch.setattr(module, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        save_delta(llama.changes, out, {"more": "x"}, overwrite=True)
    assert len(done) == writes
    monkeypatch.undo()
    save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert "delta.safetensors" not in left_in(out)


def test_a_file_that_a_killed_change_was_to_replace_is_not_an_exports_own(llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    _write(out, {"delta.safetensors": "mine"})
    monkeypatch.setattr(delta, "write_atomically", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_delta(llama.changes, out, overwrite=True)
    with pytest.raises(InputError, match=r"holds delta.safetensors \(changed since\) besides"):
        save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert (out / "delta.safetensors").read_text() == "mine"


def test_what_a_killed_writer_left_is_an_exports_own(llama, tokenizer, tmp_path):
    out, number = tmp_path / "out", "0123456789ab"
    save_model(llama.model, tokenizer, out, "first")
    save_delta(llama.changes, out / "d" / "change.safetensors")
    left = [f".{listing.LIST}.{number}.tmp", f"d/.change.safetensors.{number}.tmp", f".config.json.{number}.tmp"]
    mine = [f".change.safetensors.{number}.tmp", f".notes.txt.{number}.tmp", ".config.json.tmp"]
    _write(out, dict.fromkeys([*left, *mine], ""))
    for name in sorted(mine):
        with pytest.raises(InputError, match=f"out holds {name}(,| and | besides)"):
            save_model(llama.model, tokenizer, out, "second", overwrite=True)
        (out / name).unlink()
    save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert not any((out / name).exists() for name in left)


# Files that have changed since


def test_weights_that_were_trained_on_stay(llama, tokenizer, tmp_path):
    """`save_pretrained` into an export's folder leaves files of the same names and sizes."""
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    with torch.no_grad():
        llama.model.get_parameter("model.layers.1.mlp.down_proj.weight").add_(1e-3)
    sizes = {name: len(data) for name, data in contents(out).items()}
    llama.model.save_pretrained(out)
    before = contents(out)
    assert {name: len(data) for name, data in before.items()} == sizes
    says = r"out holds model.safetensors \(changed since\) besides an earlier export and is not replaced.*: move it"
    with pytest.raises(InputError, match=says):
        save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert contents(out) == before
    assert left_in(tmp_path) == ["out"]


def test_other_things_under_a_listed_name_stay(llama, tokenizer, tmp_path):
    out = tmp_path / "out"
    for place in ("README.md", "config.json", "delta.safetensors"):
        save_model(llama.model, tokenizer, out, "first", overwrite=True)
        save_delta(llama.changes, out)
        kept = (out / place).read_bytes()
        (out / place).write_bytes(kept[:-1] + b"?")
        with pytest.raises(InputError, match=rf"holds {place} \(changed since\) besides"):
            save_model(llama.model, tokenizer, out, "second", overwrite=True)
        (out / place).unlink()
        (out / place).symlink_to(tmp_path)
        with pytest.raises(InputError, match="changed since|holds other things"):
            save_model(llama.model, tokenizer, out, "second", overwrite=True)
        (out / place).unlink()
        (out / place).write_bytes(kept)


def test_a_copied_export_is_replaced(llama, tokenizer, tmp_path):
    save_model(llama.model, tokenizer, tmp_path / "out", "first")
    save_delta(llama.changes, tmp_path / "out")
    copy = shutil.copytree(tmp_path / "out", tmp_path / "copy", copy_function=shutil.copyfile)
    save_model(llama.model, tokenizer, copy, "second", overwrite=True)
    assert (copy / "README.md").read_text() == "second"


def test_a_list_of_names_alone_goes_by_names(llama, tokenizer, tmp_path):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    names = sorted(set(left_in(out)) - {listing.LIST})
    (out / listing.LIST).write_text("".join(f"{name}\n" for name in names))
    (out / "README.md").write_text("changed")
    save_delta(llama.changes, out)  # and the list is written anew
    _write(out, {"notes.txt": "mine"})
    with pytest.raises(InputError, match=r"holds notes.txt besides"):
        save_model(llama.model, tokenizer, out, "second", overwrite=True)
    (out / "notes.txt").unlink()
    save_model(llama.model, tokenizer, out, "second", overwrite=True)
    assert (out / "README.md").read_text() == "second"


def test_a_seal_sees_a_changed_matrix_anywhere(tmp_path):
    """In a large file too, of which it reads a part: its first and last bytes, and some of each MiB between."""
    file, matrix = tmp_path / "weights", 2**20
    size = listing.WHOLE + 5 * matrix + 77
    file.write_bytes(bytes(size))
    whole = listing._seals(file)
    for start in (0, 1, 3 * matrix - 1, 7 * matrix + 12345, size - matrix):
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(b"x" * matrix)
        assert listing._seals(file) != whole
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(bytes(matrix))
        assert listing._seals(file) == whole
    for start in (0, size - 1):
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(b"x")
        assert listing._seals(file) != whole


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
    _at_the_swap(monkeypatch, out, before=lambda: _write(out, {"notes.txt": "mine"}))
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
            folders.write_folder(tmp_path / "out", lambda target: _write(target, files), "config.json", overwrite=True)

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

    _at_the_swap(monkeypatch, out, after=lambda: _write(out, {"chapter.txt": "years"}))
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
        monkeypatch, out, lambda: _write(out, {"notes.txt": "mine"}), lambda: shutil.copytree(rival, out), times=1
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
    _write(mixed, {"notes.txt": "mine"})
    _write(gone, {"model.safetensors": ""})  # half removed
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
