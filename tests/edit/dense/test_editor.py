"""Facts in the dense memory of a tiny model: like edits of weights they are undone exactly, in any order."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rebind.edit.dense import fold, hook
from rebind.edit.dense.rows import EditRows
from rebind.edit.facts import Fact
from rebind.edit.guard import Guard
from rebind.edit.ledger import Ledger
from rebind.edit.outcome import MAX_FACTS
from rebind.edit.progress import Progress
from rebind.edit.targets import TargetSettings
from rebind.errors import FactWarning, InputError, LedgerWarning
from rebind.memory.dense import Cells
from rebind.models.tokens import Tokens
from tests import tiny
from tests.edit.editors import FACTS, QUICK, open_editor, rewrite
from tests.support import raises

OPEN = Guard(drift=1e9, growth=1e9, said=0.0, framings=0.0, subject=0.0)
RIVER = Fact.parse("The longest river of {France} is the", "Po")
MADRID = Fact.parse("The capital of {France} is", "Madrid")


def dense(editor: Any, *facts: Fact, **options: Any) -> Any:
    return rewrite(editor, *facts, method="dense", **options)


def logits(editor: Any, text: str = "The capital of France is Paris, and Berlin is the capital of Germany") -> Tensor:
    return editor.model(torch.tensor([tiny.tokenizer()(text).input_ids])).logits


def memory(editor: Any) -> tuple[Tensor, ...]:
    """Return the rows that the model reads."""
    ((_, rows),) = editor.edited.dense.memories.items()
    return rows.keys, rows.values, rows.thresholds


def same_memory(editor: Any, other: Any, tolerance: float = 0.0) -> bool:
    pairs = zip(memory(editor), memory(other), strict=True)
    return all(one.shape == two.shape and float((one - two).abs().max()) <= tolerance for one, two in pairs)


# Edits


def test_where_nothing_is_kept_only_facts_that_are_probed_are_asked_about():
    model = tiny.llama()
    editor = open_editor(model, guard=OPEN)
    facts = [Fact.parse(f"The capital of {{Land {index}}} is", "Rome") for index in range(MAX_FACTS + 20)]
    rows: list[int] = []  # of every forward pass
    model.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    asked = []
    for count in (MAX_FACTS, len(facts)):
        rows.clear()
        edit = dense(editor, *facts[:count], targets=TargetSettings(steps=1, keep=0.0))
        asked.append(sum(rows))
        assert len(EditRows.of(edit).subjects) == count
        assert edit.scores["outcome"]["asked"]["kept"] > 0, "the probe compares answers that the search does not keep"
        editor.undo(edit.id)
    assert (asked[1] - asked[0]) / 20 < asked[0] / MAX_FACTS / 2


def test_prompts_to_keep_that_have_no_weight_are_reported():
    editor, fact = open_editor(), replace(FACTS[0], keep=("People in France speak",))
    with pytest.warns(FactWarning, match="People in France speak"):
        dense(editor, fact, targets=replace(QUICK, keep=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FactWarning)
        dense(open_editor(), fact)


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_facts_become_likelier_and_no_weight_changes(build):
    model = build()
    editor, weights = open_editor(model), tiny.weights(model)
    before, plain = editor.score(FACTS), logits(editor)
    edit = dense(editor, *FACTS)
    after, edited = editor.score(FACTS), logits(editor)
    assert all(new.nll < old.nll for old, new in zip(before, after, strict=True))
    assert tiny.weights(model) == weights
    with editor.base_model():
        assert torch.equal(logits(editor), plain)
    assert torch.equal(logits(editor), edited)
    editor.undo(edit.id)
    assert torch.equal(logits(editor), plain)
    assert not any(block._forward_hooks for block in editor.language_model.trunk.blocks)
    editor.redo(edit.id)
    assert torch.equal(logits(editor), edited)


def test_a_value_is_added_at_every_mention_and_nowhere_else():
    editor = open_editor(tiny.llama(dtype=torch.float64))
    edit = dense(editor, FACTS[0])
    layer, (value,) = edit.settings["layers"][0], edit.tensors["rows/values"].double()
    (prompt,) = editor.language_model.encode([Fact.parse("The capital of {France} is", "a").as_prompt()])
    tokens = Tokens.left_padded([(*prompt.ids, *prompt.ids)], torch.device("cpu"))
    after = editor.language_model.trunk.after(layer, tokens)
    with editor.base_model():
        moved = (after - editor.language_model.trunk.after(layer, tokens))[0]
    mention = prompt.subject_last
    assert float((moved[mention] - value).norm() / value.norm()) < 1e-2, "the key itself"
    assert float(moved[len(prompt.ids) + mention] @ value / value.norm() ** 2) > 0.5, "a later mention"
    assert float(moved[0].norm() / value.norm()) < 1e-3


def test_a_run_that_resumes_reads_the_memory_once():
    editor = open_editor()
    dense(editor, FACTS[0], targets=replace(QUICK, clamp=0.1))  # the changed state is still near its key
    trunk, ids = editor.language_model.trunk, tiny.tokenizer()("The capital of France is").input_ids
    tokens, last = Tokens.left_padded([ids], torch.device("cpu")), torch.tensor([[0, len(ids) - 1]])
    whole = trunk.logits(tokens, last)
    for layer in range(tiny.LAYERS):
        resumed = trunk.logits(tokens, last, resume=(layer, trunk.after(layer, tokens)))
        assert torch.allclose(resumed, whole, atol=1e-5), layer


def test_undoing_the_first_equals_never_having_had_it(tmp_path):
    """Edits do not depend on what else is in the ledger, and an editor that opens it reads the same memory."""
    with_it, without = open_editor(ledger=tmp_path / "ledger"), open_editor()
    edits = [dense(with_it, fact) for fact in FACTS]
    for fact in FACTS[1:]:
        dense(without, fact)
    again = open_editor(ledger=tmp_path / "ledger")
    assert same_memory(again, with_it)
    assert torch.equal(logits(again), logits(with_it))
    again.undo(edits[0].id)
    with_it.refresh()
    for editor in (again, with_it):
        assert same_memory(editor, without)
        assert torch.equal(logits(editor), logits(without))
    assert not with_it.ledger.verify()


def test_weights_and_memory_are_edited_side_by_side():
    editor, asked = open_editor(), f"{FACTS[0].text} Paris. {FACTS[1].text}"
    base, plain = tiny.weights(editor.model), logits(editor, asked)
    first, second = rewrite(editor, FACTS[0]), dense(editor, FACTS[1])
    both = logits(editor, asked)
    editor.undo(first.id)
    assert tiny.weights(editor.model) == base
    only_dense = logits(editor, FACTS[1].text)
    editor.redo(first.id)
    assert torch.equal(logits(editor, asked), both)
    editor.undo(second.id)
    editor.undo(first.id)
    assert torch.equal(logits(editor, asked), plain)
    assert not torch.equal(only_dense, logits(editor, FACTS[1].text))


def test_cells_follow_the_edits(monkeypatch):
    for module in (fold, hook):
        monkeypatch.setattr(module, "MANY", 0)
    editor = open_editor(guard=OPEN)
    edits = [dense(editor, fact) for fact in FACTS]
    editor.undo(edits[0].id)
    editor.redo(edits[0].id)
    editor.undo(edits[1].id)
    ((_, rows),) = editor.edited.dense.memories.items()
    fresh = Cells.of(rows.keys, rows.owner)
    for part in ("centers", "first", "size"):
        assert torch.allclose(getattr(rows.cells, part), getattr(fresh, part)), part
    assert len(rows.values) == 2, "one value per fact, whatever its number of rows"


# Several facts about one subject


def test_facts_about_one_subject_share_one_value():
    editor = open_editor()
    before = editor.score([FACTS[0], RIVER])
    edit = dense(editor, FACTS[0], RIVER, FACTS[1])
    rows = EditRows.of(edit)
    assert rows.subjects == ("france", "danielle darrieux")
    assert len(rows.values) == 2
    after = editor.score([FACTS[0], RIVER])
    assert all(new.nll < old.nll for old, new in zip(before, after, strict=True))


def test_a_later_fact_about_the_subject_carries_the_earlier_one():
    editor, alone = open_editor(), open_editor()
    before = editor.score([FACTS[0], RIVER])
    first = dense(editor, FACTS[0], FACTS[1])
    second, fresh = dense(editor, RIVER), dense(alone, RIVER)
    rows = EditRows.of(second)
    assert [(joint.group, joint.carries, joint.replaces) for joint in rows.joints] == [(0, (first.id,), ())]
    after = editor.score([FACTS[0], RIVER])
    assert all(new.nll < old.nll for old, new in zip(before, after, strict=True))
    _, values, _ = memory(editor)
    read = {tuple(value.tolist()) for value in values}
    assert read == {tuple(rows.values[1].tolist()), tuple(first.tensors["rows/values"][1].tolist())}
    editor.undo(first.id)
    # As if the earlier edit had never been, up to the rounding of a search in another batch
    assert same_memory(editor, alone, 1e-3)
    assert torch.allclose(rows.values[0], fresh.tensors["rows/values"][0], atol=1e-3)
    editor.redo(first.id)
    assert torch.equal(memory(editor)[1], values)


def test_a_fact_replaces_an_earlier_one():
    editor = open_editor(guard=OPEN)
    first = dense(editor, FACTS[0])
    rome = memory(editor)
    assert [len(editor.plan([MADRID], method=method).earlier) for method in ("memit", "dense")] == [1, 0]
    second = dense(editor, MADRID)  # weights would refuse it as a contradiction
    assert torch.equal(memory(editor)[1].unique(dim=0), second.tensors["rows/values"])
    editor.undo(second.id)
    assert all(torch.equal(one, two) for one, two in zip(memory(editor), rome, strict=True))
    editor.undo(first.id)
    editor.redo(second.id)
    editor.redo(first.id)  # the second edit knows that it replaces the first
    assert torch.equal(memory(editor)[1].unique(dim=0), second.tensors["rows/values"])
    with raises(InputError, "conflicting_edit"):
        rewrite(editor, Fact.parse(MADRID.text, "Oslo", subject="France"))


def test_edits_that_do_not_know_each_other_add_up():
    editor = open_editor(guard=OPEN)
    first = dense(editor, FACTS[0])
    editor.undo(first.id)
    second = dense(editor, RIVER)
    editor.redo(first.id)
    total = first.tensors["rows/values"] + second.tensors["rows/values"]
    assert torch.allclose(memory(editor)[1].unique(dim=0), total)
    clash = dense(editor, MADRID)
    editor.undo(clash.id)
    other = open_editor(guard=OPEN)
    old = dense(other, FACTS[0])
    other.undo(old.id)
    dense(other, MADRID)
    with raises(InputError, "conflicting_edit"):
        other.redo(old.id)


def test_a_contradiction_by_another_process_meanwhile_is_refused():
    editor = open_editor(guard=OPEN)
    other = open_editor(ledger=editor.ledger, guard=OPEN)

    def write_first(phase: str) -> None:
        if phase == "writing":
            editor.progress = Progress()
            dense(other, FACTS[0])

    editor.progress = Progress(phase=write_first)
    with raises(InputError, "conflicting_edit"):
        dense(editor, MADRID)
    assert [edit.facts for edit in editor.ledger.active] == [(FACTS[0],)]
    assert torch.equal(logits(editor), logits(other))
    dense(editor, MADRID)  # it knows of the other edit now, and replaces it


# What can go wrong


@pytest.mark.parametrize("problem", [RuntimeError("inside"), KeyboardInterrupt()])
def test_a_failure_leaves_the_memory_as_it_was(monkeypatch, problem):
    editor = open_editor()
    dense(editor, FACTS[0])
    before, append = memory(editor), Ledger.append

    def fail(ledger: Ledger, edit: Any) -> Any:
        raise problem

    monkeypatch.setattr(Ledger, "append", fail)
    with pytest.raises(type(problem)):
        dense(editor, FACTS[1])
    assert all(torch.equal(one, two) for one, two in zip(memory(editor), before, strict=True))
    monkeypatch.setattr(Ledger, "append", append)
    dense(editor, FACTS[1])
    assert len(editor.ledger.active) == 2


def test_a_memory_made_with_other_moments_is_refused(tmp_path):
    dense(open_editor(ledger=tmp_path / "ledger"), FACTS[0])
    with raises(InputError, "other_moments"):
        open_editor(ledger=tmp_path / "ledger", moment_tokens=1000)


def test_an_edit_without_its_rows_is_refused():
    editor = open_editor()
    edit = dense(editor, FACTS[0])
    tensors = {name: tensor for name, tensor in edit.tensors.items() if name != "rows/owner"}
    broken = type(edit)(facts=edit.facts, method="dense", settings=edit.settings, sites=(), tensors=tensors)
    with raises(InputError, "edit_incomplete"):
        editor.ledger.append(broken)


def test_a_plan_knows_the_method():
    editor = open_editor()
    plan = editor.plan(FACTS, method="dense")
    assert (plan.method, plan.layers, plan.moments_cached) == ("dense", (1,), False)
    dense(editor, FACTS[0])
    assert editor.plan(FACTS, method="dense").moments_cached
    for options in ({"layers": (0, 1)}, {"lam": 2.0}):
        with pytest.raises(InputError):
            dense(editor, FACTS[1], **options)


def test_the_guard_reports_how_often_other_text_reads_the_memory():
    editor = open_editor(guard=OPEN)
    edit = dense(editor, *FACTS)
    report: Any = edit.scores["memory"]
    assert report["rows"] == len(edit.tensors["rows/owner"])
    assert 0 <= report["fires"] < 0.05
    assert edit.scores["drift"]["growth"] == 0.0


def test_exports_of_weights_say_that_they_lack_the_dense_facts(tmp_path):
    editor = open_editor()
    dense(editor, FACTS[0])
    exports = {"delta.safetensors": editor.save_delta, "adapter": editor.export_peft, "a.gguf": editor.export_gguf}
    for name, save in exports.items():
        with raises(InputError, "only_dense_facts"):
            save(tmp_path / name)
        assert not (tmp_path / name).exists()
    rewrite(editor, FACTS[1])
    with pytest.warns(LedgerWarning):
        editor.save_delta(tmp_path / "delta.safetensors")
