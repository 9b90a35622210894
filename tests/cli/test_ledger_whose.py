"""Whose a default ledger is: `rebind ledger` changes none that may be another model's."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from rebind.cli.places import ledgers_folder
from rebind.edit.editor import Editor
from rebind.edit.log import digest_of
from tests.edit import tiny

from .conftest import FAST

FACT = ("The answer is {France}", "Rome")
QUESTION = "The answer is France"


def saved(folder: Path, seed: int = 0) -> str:
    tiny.llama(seed).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def ours(tmp_path) -> str:
    return saved(tmp_path / "ours" / "model")


@pytest.fixture
def theirs(tmp_path) -> str:
    """Another model in a folder of the same name."""
    return saved(tmp_path / "theirs" / "model", seed=1)


def edit(rebind, model: str, *more: str) -> Path:
    """The ledger that an edit is in."""
    return Path(rebind("edit", *FACT, "--model", model, *FAST, *more, json=True).document["ledger"])


def active(rebind, folder: Path) -> list[str]:
    return rebind("ledger", "list", "-l", str(folder), "--quiet").out.split()


def as_earlier(folder: Path) -> None:
    """Make a ledger without edits what an earlier version made: its header had neither place nor dtype."""
    header = json.loads((folder / "ledger.json").read_bytes())
    old = {name: header[name] for name in ("format", "model", "model_name", "created")}
    (folder / "ledger.json").write_text(json.dumps({**old, "digest": digest_of(old)}))


@pytest.fixture
def earlier(rebind, ours) -> Path:
    """A ledger of `ours` with an edit, made by an earlier version."""
    rebind("edit", *FACT, "--model", ours, "--layers", "77", *FAST, code=2)  # begins one, and writes nothing
    (folder,) = ledgers_folder().iterdir()
    as_earlier(folder)
    assert edit(rebind, ours) == folder
    assert "place" not in json.loads((folder / "ledger.json").read_bytes())
    return folder


def suggested(text: str) -> list[list[str]]:
    """The commands in a message."""
    return [shlex.split(part)[1:] for part in text.split("`") if part.startswith("rebind ledger ")]


@pytest.mark.parametrize("words", [("list",), ("show", "e0001"), ("verify",), ("undo", "e0001"), ("redo", "e0001")])
def test_a_ledger_is_not_another_models_of_the_same_name(rebind, ours, theirs, words, monkeypatch):
    folder = edit(rebind, ours)
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("loads the model"))
    ended = rebind("ledger", *words, "--model", theirs, code=2)
    assert f"no ledger of {theirs} in " in ended.err
    assert f"(of {ours}, float32, 1 active edit, made " in ended.err
    assert suggested(ended.err) == [["ledger", *words, "-m", theirs, "-l", str(folder)]]
    assert active(rebind, folder) == ["e0001"]


def test_each_model_of_one_name_has_the_command_it_was_told(rebind, ours, theirs):
    """Also the one that was edited first, when there was no other."""
    folders = [edit(rebind, model) for model in (ours, theirs)]
    rebind("ledger", "undo", "e0001", "--model", ours)
    assert [active(rebind, folder) for folder in folders] == [[], ["e0001"]]
    rebind("ledger", "undo", "e0001", "--model", theirs)
    assert active(rebind, folders[1]) == []


def test_a_place_is_the_same_however_it_is_written(rebind, ours, tmp_path, monkeypatch):
    edit(rebind, ours)
    (tmp_path / "link").symlink_to(ours)
    monkeypatch.chdir(tmp_path / "ours")
    for model in ("model", "./model/", "../ours/model", str(tmp_path / "link")):
        assert rebind("ledger", "list", "--model", model, "--quiet").out == "e0001\n"


@pytest.mark.parametrize("name", ["model", "renamed"])
def test_a_model_that_was_moved_keeps_its_ledger(rebind, ours, tmp_path, name):
    folder = edit(rebind, ours)
    (tmp_path / "elsewhere").mkdir()
    moved = str(shutil.move(ours, tmp_path / "elsewhere" / name))
    assert rebind("ask", QUESTION, "--model", moved, json=True).document["active"] == ["e0001"]
    out = tmp_path / "change.safetensors"
    assert rebind("ledger", "export", "--model", moved, "--delta", str(out), json=True).document["edits"] == ["e0001"]
    shown = rebind("edit", "I saw {Italy}", "Paris", "--model", moved, *FAST).out
    undo = next(line for line in shown.splitlines() if line.startswith("take it back: "))
    rebind(*shlex.split(undo.partition(": rebind ")[2]))
    assert active(rebind, folder) == ["e0001"]
    ended = rebind("ledger", "undo", "e0001", "--model", moved, code=2)
    assert f"no ledger of {moved} in " in ended.err
    rebind(*suggested(ended.err)[0])
    assert active(rebind, folder) == []


def test_a_copy_by_another_name_has_a_ledger_of_its_own(rebind, ours, tmp_path):
    edit(rebind, ours)
    copy = str(shutil.copytree(ours, tmp_path / "copy"))
    asked = rebind("ask", QUESTION, "--model", copy, json=True)
    assert (asked.document["active"], asked.err) == ([], "")


def test_an_earlier_versions_ledger_is_found_and_not_changed(rebind, ours, theirs, earlier):
    for model in (ours, theirs):  # whose it is cannot be known
        listed = rebind("ledger", "list", "--model", model, "--quiet")
        assert listed.out == "e0001\n"
        assert listed.err.startswith(f"warning: an earlier rebind made {earlier}, which does not say where its model")
        assert rebind("ledger", "verify", "--model", model).out.split()[-2:] == ["is", "whole"]
        for verb in ("undo", "redo"):
            refused = rebind("ledger", verb, "e0001", "--model", model, code=2).err
            assert "nothing was changed" in refused
            assert suggested(refused) == [["ledger", verb, "e0001", "-m", model, "-l", str(earlier)]]
    assert active(rebind, earlier) == ["e0001"]
    rebind(*suggested(rebind("ledger", "undo", "e0001", "--model", ours, code=2).err)[0])
    assert active(rebind, earlier) == []


def test_an_edit_to_an_earlier_versions_ledger_says_how_it_is_taken_back(rebind, ours, earlier):
    shown = rebind("edit", "I saw {Italy}", "Paris", "--model", ours, *FAST).out
    undo = next(line for line in shown.splitlines() if line.startswith("take it back: "))
    rebind(*shlex.split(undo.partition(": rebind ")[2]))
    assert active(rebind, earlier) == ["e0001"]


def test_an_earlier_versions_ledger_of_a_renamed_model_is_mentioned(rebind, ours, earlier, tmp_path):
    renamed = str(shutil.move(ours, tmp_path / "renamed"))
    asked = rebind("ask", QUESTION, "--model", renamed, json=True)
    assert asked.document["active"] == []
    assert f"-l {earlier} has its edits" in asked.err
    again = rebind("ask", QUESTION, "--model", renamed, "-l", str(earlier), json=True)
    assert (again.document["active"], again.err) == (["e0001"], "")


def test_an_earlier_versions_ledger_of_a_hub_id_is_known_by_it(rebind, tmp_path):
    """No folder's name has a slash."""
    folder = ledgers_folder() / "some--model-00000000"
    folder.mkdir(parents=True)
    told = {"format": "rebind-ledger-1", "model": "0" * 64, "model_name": "some/model", "created": "2026-01-01T00:00"}
    (folder / "ledger.json").write_text(json.dumps({**told, "digest": digest_of(told)}))
    (folder / "log.jsonl").touch()
    assert rebind("ledger", "list", "--model", "some/model", "--quiet").err == ""
    assert "no edit 'e0001'" in rebind("ledger", "undo", "e0001", "--model", "some/model", code=2).err
    same = str(tmp_path / "some--model")
    saved(Path(same))
    assert f"no ledger of {same} in " in rebind("ledger", "undo", "e0001", "--model", same, code=2).err


def test_of_two_dtypes_each_ledger_is_named(rebind, ours):
    """As is what to type instead of the hint of the first, which was right when it was given."""
    plain, half = edit(rebind, ours), edit(rebind, ours, "--dtype", "bfloat16")
    ended = rebind("ledger", "undo", "e0001", "--model", ours, code=2).err
    for folder, dtype in ((plain, "float32"), (half, "bfloat16")):
        told = f"`rebind ledger undo e0001 -m {ours} -l {folder}` (of {ours}, {dtype}, 1 active edit, made 20"
        assert told in ended
    for words in suggested(ended):
        rebind(*words)
    assert active(rebind, plain) == active(rebind, half) == []
    assert "0 active edits" in rebind("ledger", "list", "--model", ours, code=2).err
    rebind("ledger", "redo", "e0001", "-l", str(half))
    change = str(ledgers_folder() / "change.safetensors")
    half_wanted = ("ledger", "export", "--model", ours, "--dtype", "bfloat16", "--delta", change)
    assert rebind(*half_wanted, json=True).document["edits"] == ["e0001"], "the dtype says which"


def test_a_ledger_in_another_dtype_says_which(rebind, ours):
    half = edit(rebind, ours, "--dtype", "bfloat16")
    for words in (("ask", QUESTION), ("edit", *FACT)):
        ended = rebind(*words, "--model", ours, "-l", str(half), code=2).err
        assert "was made for model in bfloat16 (" in ended
        assert "load it in bfloat16 (--dtype bfloat16)" in ended
    again = rebind("ask", QUESTION, "--model", ours, "-l", str(half), "--dtype", "bfloat16", json=True)
    assert again.document["active"] == ["e0001"]


def test_edits_in_another_dtype_are_mentioned(rebind, ours):
    half = edit(rebind, ours, "--dtype", "bfloat16")
    asked = rebind("ask", QUESTION, "--model", ours, json=True)
    assert asked.document["active"] == []
    assert asked.err == (
        f"warning: the model in float32 has no edits, those in bfloat16 are in {half}: --dtype bfloat16 has them\n"
    )
    rebind("ledger", "undo", "e0001", "-l", str(half))
    assert rebind("ask", QUESTION, "--model", ours, json=True).err == ""


def test_edits_to_weights_that_lay_there_before_are_mentioned(rebind, ours):
    """As when a training goes on."""
    before = edit(rebind, ours)
    saved(Path(ours), seed=2)
    asked = rebind("ask", QUESTION, "--model", ours, json=True)
    assert asked.document["active"] == []
    assert asked.err.startswith(f"warning: the weights of {ours} are not those that {before} was made for")
    assert asked.err.count("\n") == 1
    assert rebind(*suggested(asked.err)[0], "--quiet").out == "e0001\n"
    now = edit(rebind, ours)
    asked = rebind("ask", QUESTION, "--model", ours, json=True)
    assert (asked.document["ledger"], asked.err) == (str(now), "")


def test_an_export_of_what_has_no_ledger_says_so(rebind, ours, theirs, tmp_path):
    out = ("--delta", str(tmp_path / "change.safetensors"))
    assert "no ledger of" in rebind("ledger", "export", "--model", theirs, *out, code=2).err
    edit(rebind, ours)
    assert "as it is loaded here" in rebind("ledger", "export", "--model", theirs, *out, code=2).err


def test_verify_says_what_it_cannot_see(rebind, ours):
    folder = edit(rebind, ours)
    rebind("ledger", "undo", "e0001", "--model", ours)
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "log.jsonl").write_bytes(b"".join(lines[:-1]))
    assert rebind("ledger", "verify", "--model", ours, json=True).document["sound"], "the undo is gone, and not missed"
    help = " ".join(rebind("ledger", "verify", "--help").out.split())
    assert "Not seen are undo and redo lines cut off whole at the log's end" in help
