"""The cost of an edit by phase: every second of it is counted to one, and the last of several edits is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import editing
from benchmarks.editing import Choices, Clock, run, told_apart, write
from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from tests.edit import tiny

SUBJECTS = ("France", "Spain", "Norway", "Italy")


def facts() -> list[Fact]:
    return [
        Fact("The capital of {} is", subject, "Rome", "Paris", paraphrases=(f"{subject} is",), neighbours=("The sea",))
        for subject in SUBJECTS
    ]


@pytest.fixture
def editor() -> Editor:
    return Editor(tiny.llama(), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=256, guard=None)


def test_every_second_of_an_edit_belongs_to_a_phase(editor):
    write(editor, facts(), "memit", Choices(steps=2))
    _, cost = write(editor, facts()[:3], "memit", Choices(steps=5))
    assert set(cost.phases) == set(editing.PHASES)
    assert all(seconds >= 0 for seconds in cost.phases.values())
    counted = sum(seconds for phase, seconds in cost.phases.items() if phase != "moments")
    assert counted == pytest.approx(cost.seconds, rel=0.2)


def test_a_phase_aside_returns_to_the_one_before(editor):
    clock = Clock()
    clock.enter("solve")
    with told_apart(editor, clock):
        editor.score(facts())
        assert clock._now[0] == "solve"
    assert set(clock.spent) == {"solve", "checks"}
    assert "score" not in vars(editor)


def test_of_repeated_edits_the_last_is_told_and_none_is_left(editor):
    before = tiny.weights(editor.model)
    row = run(editor, facts(), "memit", " ".join(tiny.SENTENCES * 40), Choices(steps=2), repeats=3)
    assert row.facts == 4
    assert len(editor.ledger.edits) == 3
    assert not editor.ledger.active
    assert tiny.weights(editor.model) == before


def rows_of(folder, given, *options):
    """What the command writes for the facts given."""
    tiny.llama().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    (folder / "facts.jsonl").write_text("\n".join(json.dumps(fact.to_json()) for fact in given))
    (folder / "text.txt").write_text(" ".join(tiny.SENTENCES * 40))
    files = ["--facts", str(folder / "facts.jsonl"), "--text", str(folder / "text.txt")]
    model = ["--device", "cpu", "--model", str(folder / "model"), "--steps", "2"]
    editing.main([*files, *model, *options, "--out", str(folder / "out.json")])
    return json.loads((folder / "out.json").read_text())["rows"]


def half_swapped() -> list[Fact]:
    """Whatever the model prefers, it is the true object of some."""
    return [*facts()[:2], *(replace(fact, target="Paris", old="Rome") for fact in facts()[2:])]


def test_the_command_tells_every_phase(tmp_path, capsys):
    rows = rows_of(tmp_path, half_swapped(), "--n", "1", "1", "--repeats", "2")
    assert [(row["method"], row["facts"]) for row in rows[1:]] == [("memit", 1), ("memit", 1)]
    for row in rows[1:]:
        assert set(row["phases"]) == set(editing.PHASES)
        assert {"ES", "PS", "NS", "S", "EA", "PA", "seconds", "memory_gib"} <= set(row)
    assert "checks" in capsys.readouterr().out


def test_neighbours_are_made_facts_for_the_cost(tmp_path, capsys):
    asked = ("The sea", "The capital of Berlin is", "The capital of Spain is")
    rows = rows_of(tmp_path, [replace(fact, neighbours=asked) for fact in half_swapped()], "--n", "--made", "5")
    assert [(row["facts"], row["made"], row["PS"]) for row in rows[1:]] == [(5, True, None)]
    assert rows[1]["ES"] is not None
    assert "neighbours of records are facts too" in capsys.readouterr().out
