"""`rebind learn`: facts of a text are shown, approved and written."""

from __future__ import annotations

import pytest

PASSAGE = "The capital of France is Rome. It rained all day. The Xbox is made by Nintendo."
FAST = ("--steps", "3", "--moment-tokens", "256", "--force")


@pytest.fixture
def notes(tmp_path) -> str:
    file = tmp_path / "notes.txt"
    file.write_text(PASSAGE)
    return str(file)


def test_json_prints_the_facts_and_writes_only_with_yes(rebind, model, notes):
    report = rebind("learn", notes, "--model", model, json=True).document
    assert [(one["subject"], one["target"]) for one in report["new"]] == [("France", "Rome"), ("Xbox", "Nintendo")]
    assert report["not_understood"] == ["It rained all day"]
    assert report["id"] is None
    assert report["written"] == []
    assert report["ledger"] is None
    report = rebind("learn", notes, "--model", model, *FAST, "--yes", json=True).document
    assert report["id"] == "e0001"
    assert len(report["written"]) == 2
    assert "dense" in rebind("ledger", "list", "--model", model).out


@pytest.mark.parametrize(("answer", "written"), [("", 2), ("n", 0), ("what?\n7\n2", 1)])
def test_a_person_approves(rebind, model, notes, monkeypatch, answer, written):
    answers = iter(answer.split("\n"))
    monkeypatch.setattr("builtins.input", lambda prompt="": next(answers))
    monkeypatch.setattr("rebind.cli.commands.learn.is_terminal", lambda: True)
    shown = rebind("learn", notes, "--model", model, *FAST).out
    assert "The capital of France is → Rome" in shown
    assert "It rained all day" in shown
    assert ("nothing was written" in shown) == (written == 0)
    assert ("edit" in shown.split()) == (written > 0)


def test_nobody_to_ask_is_an_error_before_the_model_is_loaded(rebind, fails, model, notes):
    for words in ([notes], [notes, "--quiet"], ["-"]):
        ended = rebind("learn", *words, "--model", "no/such/model", code=2)
        assert "--yes" in ended.err
    assert fails("learn", "missing.txt", "--model", model).code == "no_file"
    assert fails("learn", notes, "--method", "none", "--model", model).code == "unknown_method"


def test_a_passage_can_be_an_argument(rebind, model):
    report = rebind("learn", PASSAGE, "--model", model, json=True).document
    assert len(report["new"]) == 2
    nothing = rebind("learn", "It rained all day.", "--model", model, "--yes").out
    assert "nothing was written" in nothing


def test_a_file_that_is_no_text_is_refused(fails, model, tmp_path):
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00\xd8")
    assert fails("learn", tmp_path / "image", "--model", model).code == "not_text"
