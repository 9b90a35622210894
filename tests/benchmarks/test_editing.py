"""The cost of an edit by phase: every second of it is counted to one, and the last of several edits is told."""

from __future__ import annotations

import json

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


def test_the_command_tells_every_phase(tmp_path, capsys):
    folder = tmp_path / "model"
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    swapped = [Fact(f.prompt, f.subject, "Paris", "Rome", f.paraphrases, f.neighbours) for f in facts()]
    lines = [json.dumps(fact.to_json()) for fact in (*facts()[:2], *swapped[2:])]
    (tmp_path / "facts.jsonl").write_text("\n".join(lines))
    (tmp_path / "text.txt").write_text(" ".join(tiny.SENTENCES * 40))
    files = ["--facts", str(tmp_path / "facts.jsonl"), "--text", str(tmp_path / "text.txt")]
    sizes = ["--n", "1", "1", "--steps", "2", "--repeats", "2", "--device", "cpu", "--model", str(folder)]
    editing.main([*files, *sizes, "--out", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["method"], row["facts"]) for row in rows[1:]] == [("memit", 1), ("memit", 1)]
    for row in rows[1:]:
        assert set(row["phases"]) == set(editing.PHASES)
        assert {"ES", "PS", "NS", "S", "EA", "PA", "seconds", "memory_gib"} <= set(row)
    assert "checks" in capsys.readouterr().out
