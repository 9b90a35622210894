"""The editor on a tiny model: facts go in, every edit can be undone, and nothing is ever left half done."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rebind.edit import DEFAULT_METHOD, drafts
from rebind.edit.edited_model import EditedModel
from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from rebind.edit.guard import Guard
from rebind.edit.ledger import Ledger
from rebind.edit.ledger import fold as fold_module
from rebind.edit.methods import METHODS
from rebind.edit.moments import Moments, OwnSamples
from rebind.edit.targets import TargetSearch, TargetSettings
from rebind.errors import InputError, LedgerError, UnknownNameError
from rebind.models.language_model import LanguageModel
from rebind.models.sites import memory_of, module_at
from tests import tiny
from tests.edit.editors import FACTS, QUICK, open_editor, rewrite
from tests.support import raises

WEIGHTS = [name for name, method in METHODS.items() if not method.dense]  # test_dense has the other one
every_method = pytest.mark.parametrize("method", WEIGHTS)


# Edits


@every_method
def test_a_rewrite_makes_the_target_likelier_and_changes_only_its_sites(method):
    model = tiny.llama()
    editor, weights = open_editor(model), tiny.weights(model)
    before = editor.score(FACTS)
    edit = rewrite(editor, *FACTS, method=method)
    after = editor.score(FACTS)
    assert sum(score.nll for score in after) < 0.96 * sum(score.nll for score in before)
    assert all(new.nll < old.nll for old, new in zip(before, after, strict=True))
    assert edit.scores == {name: [one.to_json() for one in s] for name, s in (("before", before), ("after", after))}
    changed = {name for name, data in tiny.weights(model).items() if data != weights[name]}
    assert changed == {f"{site}.weight" for site in edit.sites}


def test_braces_or_a_name_mark_the_subject():
    editor = open_editor()
    edit = editor.rewrite("The capital of {France} is", "Rome", targets=QUICK)
    assert (edit.facts, edit.method) == ((FACTS[0],), DEFAULT_METHOD)
    assert editor.ledger.active == (edit,)
    named = editor.rewrite("The capital of France is", "Rome", subject="France", targets=QUICK)
    assert named.facts == (FACTS[0],)


@every_method
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_undo_restores_the_base_byte_for_byte(method, build):
    model = build()
    base = tiny.weights(model)
    editor = open_editor(model)
    edit = rewrite(editor, FACTS[0], method=method)
    edited = tiny.weights(model)
    assert edited != base
    editor.undo(edit.id)
    assert tiny.weights(model) == base
    editor.redo(edit.id)
    assert tiny.weights(model) == edited


@every_method
def test_undoing_the_first_equals_never_having_had_it(method, tmp_path):
    """Also for an editor that opens the same ledger, and for the methods whose gains depend on history."""
    with_it, without = open_editor(ledger=tmp_path / "ledger"), open_editor()
    edits = [rewrite(with_it, fact, method=method) for fact in FACTS]
    for fact in FACTS[1:]:
        rewrite(without, fact, method=method)
    again = open_editor(ledger=tmp_path / "ledger")
    assert tiny.weights(again.model) == tiny.weights(with_it.model) != tiny.weights(without.model)
    again.undo(edits[0].id)
    with_it.refresh()
    assert tiny.weights(again.model) == tiny.weights(with_it.model) == tiny.weights(without.model)


@pytest.mark.parametrize("method", ["alphaedit", "recursive"])
def test_methods_that_remember_write_differently_after_an_edit(method):
    """Otherwise the test above would prove nothing for them."""
    editor = open_editor()
    first, second = (rewrite(editor, fact, method=method) for fact in FACTS[:2])

    def change(*active: Any) -> torch.Tensor:
        folded = editor.weights.fold(active)[second.sites[0]]
        return folded - editor.weights.base[second.sites[0]]

    interaction = change(first, second) - change(first) - change(second)
    assert float(interaction.abs().max()) > 1e-4 * float(change(first, second).abs().max())


def test_an_edit_does_not_depend_on_what_else_the_ledger_holds(tmp_path):
    strong = TargetSettings(steps=30, clamp=50.0)
    rewrite(open_editor(ledger=tmp_path / "ledger"), FACTS[0], layers=(0, 1, 2), lam=1e-6, targets=strong)
    editor, fresh = open_editor(ledger=tmp_path / "ledger"), open_editor()
    assert editor.say("The", tokens=8) != fresh.say("The", tokens=8), "the edit must change what the model says"
    second, alone = rewrite(editor, FACTS[1]), rewrite(fresh, FACTS[1])
    for name, tensor in alone.tensors.items():
        assert torch.equal(second.tensors[name], tensor), name
    assert editor.contexts == fresh.contexts


def test_the_same_seed_writes_the_same_bytes():
    first, again, other = (open_editor(corpus=OwnSamples(3, rows=16), seed=seed) for seed in (0, 0, 1))
    for editor in (first, again):
        rewrite(editor, FACTS[0])
    assert tiny.weights(first.model) == tiny.weights(again.model)
    assert first.contexts == again.contexts != other.contexts


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("method", ["rome", "emmet"])
def test_rounding_does_not_destroy_the_edit(dtype, tolerance, method):
    """The weights in their narrow dtype answer the edit's keys with its values: the last fact, or all of them."""
    model = tiny.llama(dtype=dtype)
    editor = open_editor(model)
    edit = rewrite(editor, *FACTS, method=method)
    for site in edit.sites:
        write, memory = edit.write(site), memory_of(module_at(model, site))
        assert memory.dtype == dtype
        error = write.keys @ memory.float().mT - write.values
        scale = write.keys.norm(dim=-1, keepdim=True) * memory.float().norm()
        exact = slice(None) if method == "emmet" else slice(-1, None)
        assert float((error / scale)[exact].abs().max()) < tolerance
    editor.undo(edit.id)
    assert tiny.weights(model) == tiny.weights(tiny.llama(dtype=dtype))


@pytest.mark.parametrize("method", [name for name in WEIGHTS if name != "alphaedit"])  # which never quite gets there
def test_conv1d_memories_answer_their_keys(method):
    model = tiny.gpt2()
    edit = rewrite(open_editor(model), FACTS[0], method=method, lam=None if METHODS[method].exact else 1e-6)
    for site in edit.sites:
        write, memory = edit.write(site), memory_of(module_at(model, site))
        assert float((write.keys @ memory.mT - write.values).norm() / write.values.norm()) < 1e-3


# What is refused


LONG = Fact.parse("The capital of {France} " + "and the old bridge of Mostar " * 30 + "is", "Rome")


@pytest.mark.parametrize(
    ("facts", "options", "error", "code"),
    [
        ([], {}, InputError, "no_facts"),
        (iter(()), {}, InputError, "no_facts"),
        ([FACTS[0], replace(FACTS[0], target="Madrid")], {}, InputError, "conflicting_facts"),
        ([LONG], {}, InputError, "prompt_too_long"),
        (FACTS[:1], {"layers": (3,)}, InputError, "layers_out_of_range"),
        (FACTS[:1], {"layers": ()}, InputError, "layers_out_of_range"),
        (FACTS[:1], {"layers": 2}, InputError, "invalid_setting"),
        (FACTS[:1], {"targets": {}}, InputError, "invalid_setting"),
        (FACTS[:1], {"method": "memot"}, UnknownNameError, "unknown_method"),
        (FACTS[:1], {"method": replace(METHODS["memit"], lam=3.0)}, UnknownNameError, "unknown_method"),
    ],
)
def test_input_that_cannot_be_written_is_refused(facts, options, error, code):
    editor = open_editor()
    base = tiny.weights(editor.model)
    with raises(error, code):
        editor.rewrite_many(facts, **options)
    assert tiny.weights(editor.model) == base
    assert not editor.ledger.edits


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30, 1.5, None, True])
def test_a_seed_that_torch_cannot_take_is_refused_before_the_model_is_loaded(seed):
    with raises(InputError, "invalid_seed"):
        Editor("no/such/folder", seed=seed)


def test_a_number_of_contexts_is_refused_before_the_model_is_loaded():
    with raises(InputError, "invalid_setting"):
        Editor("no/such/folder", contexts=5)


def test_a_lambda_of_zero_is_refused_and_not_replaced():
    with pytest.raises(InputError):
        rewrite(open_editor(), FACTS[0], lam=0.0)


def test_moments_of_another_text_are_refused_for_methods_that_need_them_again(tmp_path):
    rewrite(open_editor(ledger=tmp_path / "ledger"), FACTS[0], method="recursive")
    with raises(InputError, "other_moments"):
        open_editor(ledger=tmp_path / "ledger", moment_tokens=600)


def test_a_ledger_of_another_model_is_refused(tmp_path):
    rewrite(open_editor(ledger=tmp_path / "ledger"), FACTS[0])
    other = open_editor(tiny.llama(seed=1))
    with raises(InputError, "ledger_of_other_model"):
        other.use_ledger(Ledger.open(tmp_path / "ledger"))
    for ledger in (tmp_path / "ledger", Ledger.open(tmp_path / "ledger")):
        with raises(InputError, "ledger_of_other_model"):
            open_editor(tiny.llama(seed=1), ledger=ledger)


# Failures and interrupts


def fail_on_call(owner: Any, name: str, number: int, problem: BaseException, monkeypatch: Any) -> None:
    """Let one call of a function raise."""
    original, calls = getattr(owner, name), itertools.count()

    def wrapped(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise problem
        return original(*args, **options)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (TargetSearch, "find", 0),
        (drafts, "solve_writes", 0),
        (Moments, "collect", 0),
        (LanguageModel, "score", 0),
        (LanguageModel, "score", 1),
        (Ledger, "append", 0),
    ],
)
@pytest.mark.parametrize("problem", [RuntimeError("inside"), KeyboardInterrupt()])
def test_a_failure_leaves_model_and_ledger_as_they_were(monkeypatch, tmp_path, owner, name, number, problem):
    editor = open_editor(ledger=tmp_path / "ledger")
    rewrite(editor, FACTS[0], layers=(0, 1))
    before, log = tiny.weights(editor.model), (tmp_path / "ledger" / "log.jsonl").read_bytes()
    fail_on_call(owner, name, number, problem, monkeypatch)
    with pytest.raises(type(problem)):
        rewrite(editor, FACTS[1], layers=(1, 2))  # a site that has no moment yet
    assert tiny.weights(editor.model) == before
    assert (tmp_path / "ledger" / "log.jsonl").read_bytes() == log
    rewrite(editor, FACTS[1], layers=(1, 2))
    assert [edit.facts for edit in editor.ledger.active] == [(FACTS[0],), (FACTS[1],)]


def test_an_undo_that_cannot_be_folded_changes_nothing(tmp_path):
    first, second = (rewrite(open_editor(ledger=tmp_path / "ledger"), fact) for fact in FACTS[:2])
    editor = open_editor(ledger=tmp_path / "ledger")
    before = tiny.weights(editor.model)
    (tmp_path / "ledger" / "edits" / f"{second.id}.safetensors").write_bytes(b"damaged")
    with pytest.raises(LedgerError):
        editor.undo(first.id)
    assert tiny.weights(editor.model) == before
    assert [edit.id for edit in editor.ledger.active] == [first.id, second.id]


def test_a_ledger_that_cannot_be_folded_is_not_used(tmp_path):
    editor, other = open_editor(ledger=tmp_path / "a"), open_editor(ledger=tmp_path / "b")
    rewrite(other, FACTS[0], layers=[1])
    file = tmp_path / "b" / "edits" / "e0001.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    before = tiny.weights(editor.model)
    with pytest.raises(LedgerError):
        editor.use_ledger(Ledger.open(tmp_path / "b"))
    assert editor.ledger.path == tmp_path / "a"
    assert tiny.weights(editor.model) == before
    rewrite(editor, FACTS[1], layers=[1])


def test_a_ledger_that_vanishes_leaves_no_edit_in_the_weights(tmp_path, monkeypatch):
    editor = open_editor(ledger=tmp_path / "ledger")
    base, append = tiny.weights(editor.model), Ledger.append

    def vanish(ledger: Ledger, edit: Any) -> Any:
        shutil.rmtree(tmp_path / "ledger")
        return append(ledger, edit)

    monkeypatch.setattr(Ledger, "append", vanish)
    with pytest.raises(LedgerError):
        rewrite(editor, FACTS[0], layers=[1])
    assert tiny.weights(editor.model) == base


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_between_sites_leaves_all_of_them_written(monkeypatch, number):
    editor = open_editor()
    base = tiny.weights(editor.model)
    edit = rewrite(editor, FACTS[0], layers=[0, 1])
    fail_on_call(fold_module, "write_memory", number, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        editor.undo(edit.id)
    assert not editor.ledger.active
    assert tiny.weights(editor.model) == base


@pytest.mark.parametrize("name", ["fold", "apply"])
def test_an_interrupt_after_the_append_leaves_the_edit_in_place(monkeypatch, name):
    editor, twin = open_editor(), open_editor()
    rewrite(twin, FACTS[0], layers=[1])
    append = Ledger.append

    def append_then_interrupt(ledger: Ledger, edit: Any) -> Any:
        fail_on_call(EditedModel, name, 0, KeyboardInterrupt(), monkeypatch)
        return append(ledger, edit)

    monkeypatch.setattr(Ledger, "append", append_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        rewrite(editor, FACTS[0], layers=[1])
    assert len(editor.ledger.active) == 1
    assert tiny.weights(editor.model) == tiny.weights(twin.model)


def test_the_base_model_is_there_for_a_block_and_in_nested_blocks():
    model = tiny.llama()
    base = tiny.weights(model)
    editor = open_editor(model)
    rewrite(editor, FACTS[0])
    edited = tiny.weights(model)
    with editor.base_model():
        with editor.base_model():
            assert tiny.weights(model) == base
        assert tiny.weights(model) == base
    assert tiny.weights(model) == edited
    with pytest.raises(KeyError), editor.base_model():
        raise KeyError
    assert tiny.weights(model) == edited


# Other processes with the same ledger


def test_moments_are_those_of_the_base_model(tmp_path, monkeypatch):
    """Another process edits a site for which this one has not computed a moment, and the cache is cold."""
    here, there = (open_editor(ledger=tmp_path / "ledger") for _ in range(2))
    rewrite(there, FACTS[0], layers=(0, 1))
    here.refresh()
    rewrite(there, FACTS[1], layers=(1, 2), method="alphaedit")
    monkeypatch.setenv("REBIND_CACHE", str(tmp_path / "another-cache"))
    here.refresh()
    assert tiny.weights(here.model) == tiny.weights(there.model)


def test_an_edit_that_contradicts_one_of_another_process_is_refused(tmp_path, monkeypatch):
    """The other edit is written during our target search: ours is refused, and nothing of it is left."""
    guard = Guard(drift=1e9, growth=1e9, said=0.0, framings=0.0, subject=0.0)
    ours, theirs = (open_editor(ledger=tmp_path / "ledger", guard=guard) for _ in range(2))
    find = ours.target_search.find

    def find_slowly(*args: Any) -> Any:
        rewrite(theirs, FACTS[0])
        return find(*args)

    monkeypatch.setattr(ours.target_search, "find", find_slowly)
    with raises(InputError, "conflicting_edit"):
        rewrite(ours, replace(FACTS[0], target="Berlin"))
    assert [edit.id for edit in Ledger.open(tmp_path / "ledger").active] == ["e0001"]
    assert tiny.weights(ours.model) == tiny.weights(theirs.model)


def test_exports_hold_what_the_ledger_says_now(tmp_path):
    """Including the edits that another editor wrote since."""
    ours, theirs, third = (open_editor(ledger=tmp_path / "ledger") for _ in range(3))
    (site,) = rewrite(theirs, FACTS[0], layers=[1]).sites
    folder = ours.save(tmp_path / "out")
    assert "Rome" in (folder / "README.md").read_text()
    exported = load_file(folder / "model.safetensors")[f"{site}.weight"]
    assert torch.equal(exported, theirs.model.get_parameter(f"{site}.weight"))
    rewrite(theirs, FACTS[1], layers=[1])
    keys = [len(edit.tensors[f"{site}/keys"]) for edit in theirs.ledger.active]
    assert third.changes()[site].rank == sum(keys), "every key of both edits"


# Questions


def test_a_plan_does_nothing_and_reports_conflicts():
    editor = open_editor()
    base = tiny.weights(editor.model)
    plan = editor.plan([FACTS[0], replace(FACTS[0], target="Madrid")], method="memit")
    assert (plan.layers, plan.facts, plan.moments_cached) == ((0, 1), 2, False)
    assert [conflict.targets for conflict in plan.conflicts] == [("Rome", "Madrid")]
    assert plan.seconds > 0
    assert tiny.weights(editor.model) == base
    rewrite(editor, FACTS[0])
    assert editor.plan([FACTS[0]], method="memit").moments_cached
