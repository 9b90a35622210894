"""Which files of a folder an export wrote: nothing else is replaced with it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from rebind.edit.export import delta, folders, listing
from rebind.edit.export.checkpoint import save_model
from rebind.edit.export.delta import save_delta
from rebind.errors import InputError
from rebind.files import write_atomically
from tests.edit.edited import contents, left_in, put, saved_as


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
    put(tmp_path / "out", files)
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
        saved_as("adapter", llama, tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("listed", [True, False])
def test_files_that_no_export_wrote_stay(kind, listed, llama, tmp_path):
    out = tmp_path / "out"
    saved_as(kind, llama, out)
    if not listed:
        (out / listing.LIST).unlink()
    put(out, {"notes.txt": "mine", "sub/chapter.txt": "years"})
    (out / "link").symlink_to(tmp_path)
    before = contents(tmp_path)
    says = r"out holds link, notes.txt and sub/chapter.txt besides an earlier export and is not replaced.*: move them"
    with pytest.raises(InputError, match=says):
        saved_as(kind, llama, out, "second")
    assert contents(tmp_path) == before
    for number in range(5):
        (out / f"a{number}").touch()
    with pytest.raises(InputError, match=r"holds a0, a1, a2 and 5 more besides"):
        saved_as(kind, llama, out, "second")
    for name in ("notes.txt", "sub/chapter.txt", "link", *(f"a{number}" for number in range(5))):
        (out / name).unlink()
    saved_as(kind, llama, out, "second")
    assert "second" in (out / "README.md").read_text()
    assert not (out / "sub").exists()
    assert left_in(tmp_path) == ["out"]


def test_a_file_that_appears_meanwhile_stays(llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    real = folders.write_folder_atomically

    def meanwhile(path, fill):
        real(path, fill)
        put(out, {"notes.txt": "mine"})

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
    saved_as(kind, llama, out)
    (out / listing.LIST).unlink()
    if kind == "model":
        (out / "model.safetensors").rename(out / "model-00001-of-00002.safetensors")
        names = ("model.safetensors.index.json", "vocab.json", "merges.txt", "delta.safetensors")
        put(out, dict.fromkeys(names, "old"))
    saved_as(kind, llama, out, "second")
    assert "second" in (out / "README.md").read_text()
    assert not list(out.glob("model-*"))
    (out / listing.LIST).unlink()
    put(out, {"model-best-of-three.safetensors": "mine"})
    with pytest.raises(InputError, match=r"holds model-best-of-three.safetensors besides"):
        saved_as(kind, llama, out, "third")
    (out / "README.md").write_text("another's card")
    with pytest.raises(InputError, match="holds other things"):
        saved_as(kind, llama, out, "third")


def test_files_of_a_tokenizer_that_nobody_knows_are_an_exports_own(llama, tokenizer, tmp_path, monkeypatch):
    real = type(tokenizer).save_pretrained

    def save(self, folder):
        real(self, folder)
        put(folder, {"sub/words.bin": ""})

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
    put(out, {"delta.safetensors": "mine"})
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
    put(out, dict.fromkeys([*left, *mine], ""))
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
    put(out, {"notes.txt": "mine"})
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
