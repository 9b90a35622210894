"""`rebind ledger`: what it switches, refuses and replays."""

from __future__ import annotations

import errno
import os
import re
import shutil

import pytest
from transformers import PreTrainedTokenizerFast

from rebind.cli.edit import begun

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
