"""Facts that move from the dense memory into the weights, as far as they fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rebind.edit.dense.consolidate import said_by_fact
from rebind.edit.facts import Fact
from rebind.edit.guard import Guard
from rebind.edit.progress import Progress
from rebind.edit.targets import TargetSettings
from rebind.errors import InputError, LedgerError
from tests import tiny
from tests.edit.editors import open_editor
from tests.support import raises

OPEN = Guard(drift=1e9, growth=1e9, said=0.0, framings=0.0, subject=0.0)
STRONG = TargetSettings(steps=60, clamp=20.0, keep=0.0)
SUBJECTS = {"France": "the", "Norway": "capital", "Berlin": "sea", "Dante": "and"}
FACTS = [Fact.parse(f"The answer is {{{subject}}}", target) for subject, target in SUBJECTS.items()]
INTO: dict[str, Any] = {"layers": (1, 2), "targets": STRONG, "batch": 2}


def open_sure(seed: int = 1, ledger: Any = None) -> Any:
    """Return an editor of a model that is sure of what it says."""
    model = tiny.llama(seed)
    model.lm_head.weight.data.mul_(8.0)
    return open_editor(model, ledger, guard=OPEN, framings=("start",))


def edited(seed: int = 1) -> Any:
    """Return an editor whose dense memory makes a model that is sure of what it says answer with every target."""
    editor = open_sure(seed)
    editor.rewrite_many(FACTS, method="dense", targets=STRONG)
    assert all(score.exact for score in editor.score(FACTS))
    return editor


@pytest.fixture
def editor() -> Any:
    return edited()


def memory(editor: Any) -> list[torch.Tensor]:
    return [part for rows in editor.edited.dense.memories.values() for part in (rows.keys, rows.values)]


def test_facts_that_fit_leave_the_memory(editor, tmp_path):
    weights, rows = tiny.weights(editor.model), memory(editor)
    result = editor.consolidate(lam=3.0, **INTO)
    assert result.moved == tuple(FACTS)
    assert not result.stayed
    assert not result.reason
    assert not editor.edited.dense.memories, "the weights can be shipped without a hook"
    assert all(score.exact for score in editor.score(FACTS))
    assert tiny.weights(editor.model) != weights
    assert editor.save_delta(tmp_path / "delta.safetensors").exists()
    editor.undo(result.edit.id)
    assert tiny.weights(editor.model) == weights
    assert all(torch.equal(one, two) for one, two in zip(memory(editor), rows, strict=True))
    editor.redo(result.edit.id)
    assert not editor.edited.dense.memories


def test_facts_that_do_not_fit_stay(editor):
    weights = tiny.weights(editor.model)
    result = editor.consolidate(lam=1e4, **INTO)
    assert (result.edit, result.moved, result.stayed) == (None, (), tuple(FACTS))
    assert tiny.weights(editor.model) == weights
    assert len(editor.ledger.edits) == 1
    assert all(score.exact for score in editor.score(FACTS))


def test_a_fact_that_nobody_says_stays(editor):
    deaf = Fact.parse("We met in {Norway City}", "mother")
    editor.rewrite_many([deaf], method="dense", targets=replace(STRONG, steps=1, clamp=0.01))
    assert not editor.score([deaf])[0].exact
    result = editor.consolidate(lam=3.0, **INTO | {"targets": replace(STRONG, steps=1, clamp=0.01)})
    assert deaf in result.stayed
    assert deaf not in result.moved


def test_the_guard_ends_the_batches(editor):
    editor.guard = replace(OPEN, growth=1e-6)
    result = editor.consolidate(lam=3.0, **INTO)
    assert not result.moved
    assert "of its norm" in result.reason


def test_facts_behind_the_last_batch_are_not_searched(editor, monkeypatch):
    editor.guard = replace(OPEN, growth=1e-6)
    searched, find = [], editor.target_search.find
    monkeypatch.setattr(editor.target_search, "find", lambda *args: searched.extend(args[1]) or find(*args))
    assert not editor.consolidate(lam=3.0, **INTO | {"batch": 1}).moved
    assert len(searched) == 3, "the weights are full after three subjects that do not fit"


def test_a_batch_that_does_not_fit_is_tried_in_halves(editor):
    growth = []
    for budget in (1, 4):
        whole = editor.consolidate(budget, lam=3.0, **INTO | {"batch": 4})
        assert len(whole.moved) == budget
        growth.append(whole.edit.scores["drift"]["growth"])
        editor.undo(whole.edit.id)
    editor.guard = replace(OPEN, growth=sum(growth) / 2)
    result = editor.consolidate(lam=3.0, **INTO | {"batch": 4})
    assert 0 < len(result.moved) < 4
    assert "of its norm" in result.reason
    assert all(score.exact for score in editor.score(FACTS))


def test_facts_that_stay_must_not_be_lost():
    editor = edited(0)  # in its weights, the first facts change the states of the others too much
    result = editor.consolidate(2, lam=3.0, **INTO)
    assert not result.moved
    assert "would be lost" in result.reason
    assert all(score.exact for score in editor.score(FACTS))


def test_a_budget_moves_the_oldest_facts(editor):
    result = editor.consolidate(2, lam=3.0, **INTO)
    assert result.moved == tuple(FACTS[:2])
    assert editor.edited.dense.rows() > 0
    assert all(score.exact for score in editor.score(FACTS))
    more = editor.consolidate(lam=3.0, **INTO)
    assert {fact.subject for fact in (*more.moved, *more.stayed)} == {"Berlin", "Dante"}


def test_a_fact_and_its_consolidation_are_undone_in_order(editor):
    result = editor.consolidate(lam=3.0, **INTO)
    with raises(InputError, "consolidated_edit"):
        editor.undo("e0001")
    editor.undo(result.edit.id)
    editor.undo("e0001")
    with raises(InputError, "consolidated_edit"):
        editor.redo(result.edit.id)
    editor.redo("e0001")
    editor.redo(result.edit.id)
    editor.ledger.switch(["e0001", result.edit.id], on=False)
    assert not editor.ledger.active


def test_a_later_fact_does_not_repeat_what_the_weights_say_again(editor):
    """It was searched together with facts that are back in the weights, so the value of its own is read."""
    consolidation = editor.consolidate(lam=3.0, **INTO).edit
    editor.undo(consolidation.id)
    later = editor.rewrite_many([Fact.parse("We met in {France}", "sea")], method="dense", targets=STRONG)
    alone, joint = later.tensors["rows/values"]
    ((_, rows),) = editor.edited.dense.memories.items()
    assert any(torch.equal(value, joint) for value in rows.values)
    editor.redo(consolidation.id)
    ((_, rows),) = editor.edited.dense.memories.items()
    assert torch.equal(rows.values, alone.unsqueeze(0))


@pytest.mark.parametrize("change", ["undo", "consolidate"])
def test_a_change_by_another_process_meanwhile_is_not_overwritten(editor, change):
    other = open_sure(ledger=editor.ledger)

    def change_first(phase: str) -> None:
        if phase == "writing":
            other.undo("e0001") if change == "undo" else other.consolidate(lam=3.0, **INTO)

    editor.progress = Progress(phase=change_first)
    with raises(LedgerError, "memory_changed"):
        editor.consolidate(lam=3.0, **INTO)
    assert editor.ledger.active.ids == ([] if change == "undo" else ["e0001", "e0002"])
    assert not editor.edited.dense.memories
    assert tiny.weights(editor.model) == tiny.weights(other.model)


def test_a_subject_does_not_move_in_parts():
    editor = open_editor(guard=OPEN)
    editor.rewrite_many([Fact.parse(f"{{France}} {verb}", "the") for verb in ("is", "has")], method="dense")
    result = editor.consolidate(1)
    assert (result.edit, result.moved, result.stayed) == (None, (), ())
    assert "France" in result.reason


@pytest.mark.parametrize("options", [{"budget": 0}, {"budget": 1.5}, {"batch": 0}])
def test_an_impossible_budget_or_batch_is_refused(editor, options):
    with raises(InputError, "invalid_setting"):
        editor.consolidate(**options)


def test_an_empty_memory_and_a_dense_method(editor):
    with raises(InputError, "dense_consolidation"):
        editor.consolidate(method="dense")
    editor.undo("e0001")
    assert editor.consolidate().edit is None


def test_facts_are_asked_in_every_framing(editor):
    said = said_by_fact(editor.language_model, FACTS, ("start", "text", "paraphrase"))
    assert all(one[0] for one in said)
    assert all(len(one) >= 2 for one in said)
