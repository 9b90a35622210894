"""`rebind ledger`: what it switches, refuses and replays."""

from __future__ import annotations

import errno
import os
import re
import shutil

import pytest
from transformers import PreTrainedTokenizerFast

from rebind.cli.commands.edit import begun
from rebind.edit.editor import Editor

from .conftest import FAST

FACT = ("The answer is {France}", "Rome")
TEMPLATE = "{% for turn in messages %}[{{ turn['role'] }}] {{ turn['content'] }}\n{% endfor %}"


@pytest.fixture
def chatty(model, tmp_path) -> str:
    """The tiny model with a chat template."""
    folder = shutil.copytree(model, tmp_path / "chatty")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def active(rebind, model) -> list[str]:
    return rebind("ledger", "list", "--model", model, "--quiet").out.split()


def test_a_disk_that_fails_in_between_undoes_none(rebind, model, monkeypatch):
    for subject in ("France", "Italy", "Spain"):
        rebind("edit", f"The answer is {{{subject}}}", "Rome", "--model", model, *FAST)
    original, used = os.fsync, []

    def failing(handle):
        used.append(handle)
        if len(used) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        rebind("ledger", "undo", "e0001", "e0002", "e0003", "--model", model)
    assert len(used) == 1, "all lines in one write"
    assert active(rebind, model) == []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        ended = rebind("ledger", "redo", "e0001", "e0002", "e0003", "--model", model, code=3)
    assert "the ledger is as it was" in ended.err
    assert active(rebind, model) == []


def test_replay_asks_each_edit_as_it_was_asked(rebind, chatty, tmp_path):
    place = ("--model", chatty)
    edits = [
        rebind("edit", "What is {Italy}?", "Paris", *place, "--chat", *FAST, json=True).document,
        rebind("edit", *FACT, *place, *FAST, json=True).document,
    ]
    words = ("ledger", "replay", *place, "--out", str(tmp_path / "out"), "--overwrite")
    found = []
    for edit in reversed(edits):  # the last one as it was made, then the one before it
        found.append(rebind(*words, json=True).document["facts"][-1])
        rebind("ledger", "undo", edit["id"], *place)
    assert [fact["edit"] for fact in found] == ["e0002", "e0001"]
    assert "in the chat template" in rebind("ledger", "show", "e0001", *place).out
    made = [edit["facts"][0]["after"]["probability"] for edit in reversed(edits)]
    assert [fact["probability"] for fact in found] == pytest.approx(made, rel=1e-3)


def test_a_list_has_a_line_an_edit(rebind, model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rebind("edit", *FACT, "--model", model, *FAST)
    rebind("edit", "I {Italy}", "Paris", "--model", model, *FAST)
    rebind("ledger", "undo", "e0001", "--model", model)
    listed = rebind("ledger", "list", "--model", model).out
    rows = [line for line in listed.splitlines() if re.match(r" e000\d +(active|undone)", line)]
    assert len(rows) == 2
    assert all(re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d  ", row) for row in rows)
    assert "made (UTC)" in listed
    told = rebind("ledger", "list", "--model", model, json=True).document["edits"]
    assert all(row["created"].endswith("+00:00") for row in told)
    help = " ".join(rebind("ledger", "list", "--help").out.split())
    assert "with --quiet the ids of those that are active" in help


def test_a_score_says_the_target_or_how_the_model_begins():
    assert begun({"exact": True, "says": " p"}, "park") == "park"
    assert begun({"exact": False, "says": " p"}, "park") == "p…"


def test_one_edit_is_one_edit(rebind, model, tmp_path):
    rebind("edit", *FACT, "--model", model, *FAST)
    assert "\n1 edit, " in rebind("ledger", "export", "--model", model, "--delta", str(tmp_path / "d.safetensors")).out
    shown = rebind("ledger", "show", "e0001", "--model", model).out
    assert "chat" not in shown


def test_redo_does_not_contradict_an_active_edit(rebind, model):
    place = ("--model", model)
    rebind("edit", *FACT, *place, *FAST)
    rebind("ledger", "undo", "e0001", *place)
    rebind("edit", FACT[0], "Paris", *place, *FAST)
    ended = rebind("ledger", "redo", "e0001", *place, code=2)
    assert "edit e0002 makes 'The answer is France' say 'Paris'" in ended.err
    assert "rebind ledger undo e0002" in ended.err
    assert "--force" in ended.err
    assert active(rebind, model) == ["e0002"]
    rebind("ledger", "undo", "e0002", *place)
    assert "redo one of the two" in rebind("ledger", "redo", "e0001", "e0002", *place, code=2).err
    assert active(rebind, model) == []
    assert rebind("ledger", "redo", "e0001", *place).err == ""
    forced = rebind("ledger", "redo", "e0002", "--force", *place)
    assert forced.err.startswith("warning: edit e0001 makes")
    assert active(rebind, model) == ["e0001", "e0002"]


@pytest.fixture
def edited(rebind, model) -> tuple[str, str]:
    rebind("edit", *FACT, "--model", model, *FAST)
    return ("--model", model)


def unloaded(monkeypatch) -> None:
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))


def test_an_export_is_written_whole_or_not_at_all(rebind, edited, tmp_path, monkeypatch):
    new, adapter, whole, other = (tmp_path / name for name in ("new", "adapter", "whole", "other"))
    delta, folder = tmp_path / "d.safetensors", tmp_path / "folder.safetensors"
    rebind("ledger", "export", *edited, "--peft", str(adapter), "--delta", str(delta), "--model-out", str(whole))
    folder.mkdir()
    other.mkdir()
    (other / "letter.txt").write_text("mine")
    unloaded(monkeypatch)
    for words, says in (
        (("--peft", new, "--delta", delta), "is there already, expected a new name: choose another, or give --overw"),
        (("--peft", new, "--model-out", whole), "is not empty, expected a new or empty folder: choose another, or"),
        (("--peft", adapter, "--model-out", new), "is not empty"),
        (("--peft", new, "--model-out", other, "--overwrite"), "holds other things and is not replaced"),
        (("--peft", new, "--model-out", edited[1], "--overwrite"), "holds the base model, expected another folder"),
        (("--peft", new, "--model-out", new), "are both"),
        (("--peft", new / "adapter", "--model-out", new), "lie one in the other, expected folders apart"),
        (("--peft", new, "--model-out", new / "whole", "--overwrite"), "lie one in the other"),
        (("--peft", new.with_suffix(".safetensors"), "--delta", new.with_suffix(".safetensors")), "is a folder, expec"),
        (("--peft", new, "--delta", folder, "--overwrite"), "is a folder, expected a file"),
    ):
        assert says in rebind("ledger", "export", *edited, *map(str, words), code=2).err
        assert not new.exists()
    assert (other / "letter.txt").exists()


def test_a_change_may_lie_in_the_folder_of_a_model(rebind, edited, tmp_path):
    whole = tmp_path / "whole"
    rebind("ledger", "export", *edited, "--delta", str(whole), "--model-out", str(whole))
    assert {"config.json", "delta.safetensors"} <= {file.name for file in whole.iterdir()}


def test_replay_refuses_a_folder_before_the_model_is_loaded(rebind, edited, tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    unloaded(monkeypatch)
    taken = rebind("ledger", "replay", *edited, "--out", str(tmp_path / "taken"), code=2).err
    assert taken.endswith("is not empty, expected a new or empty folder: choose another, or give --overwrite\n")


def test_whoever_may_read_files_may_read_a_saved_model(rebind, edited, tmp_path):
    rebind("ledger", "export", *edited, "--peft", str(tmp_path / "a"), "--model-out", str(tmp_path / "m"))
    (tmp_path / "plain").touch()
    modes = {file.stat().st_mode for name in "am" for file in (tmp_path / name).iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_a_narrow_list_breaks_no_word_of_an_edits_state(rebind, edited, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = rebind("ledger", "list", *edited).out
    assert " e0001   active, forced   memit " in shown
    assert {"The", "answer", "is", "France", "→", "Rome"} <= set(shown.split())
    assert max(map(len, shown.splitlines())) <= 60


@pytest.mark.parametrize(("method", "told"), [("memit", True), ("rome", False)])
def test_a_lambda_is_shown_where_it_has_a_say(rebind, model, method, told):
    rebind("edit", "The capital of {France} is", "Rome", "--model", model, "--method", method, *FAST)
    shown = rebind("ledger", "show", "e0001", "--model", model).out
    assert ("lam " in shown) == told
    assert "search" in shown
