"""The guard: edits made to fail each check, and the bytes of the model and of the ledger after they did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rebind.edit import editor as editor_module
from rebind.edit.drift import Drift
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.facts.scores import FactScore
from rebind.edit.guard import Guard, enforce, find_earlier
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.methods import METHODS
from rebind.edit.targets.optimize import TargetSettings
from rebind.edit.targets.search import Search
from rebind.errors import FactWarning, GuardError, InputError, LedgerWarning
from tests import tiny

FACT = Fact.parse("The capital of {France} is", "Rome")
OTHERS = [Fact.parse("{Berlin} is the capital of", "Spain"), Fact.parse("The old bridge of {Mostar}", "fell")]
OPEN = Guard(drift=1e9, growth=1e9, said=0.0)
SAID = FactScore(probability=0.9, rank=1, nll=0.1, exact=True, says=" Rome")
UNSAID = FactScore(probability=0.01, rank=7, nll=4.6, exact=False, says=" Paris")
STILL = Drift(0.0, 0.0, "x", 0.0, "")


@pytest.fixture(autouse=True)
def two_contexts(monkeypatch):
    monkeypatch.setattr(editor_module, "SEEDS", ("The", "I"))
    monkeypatch.setattr(editor_module, "CONTEXT_TOKENS", 4)


def open_editor(guard: Guard | None, ledger: Any = None, model: Any = None) -> Editor:
    return Editor(
        tiny.llama() if model is None else model,
        tiny.tokenizer(),
        ledger=ledger,
        corpus=tiny.texts(),
        moment_tokens=1500,
        guard=guard,
    )


def rewrite(editor: Editor, *facts: Fact, **options: Any) -> Edit:
    """So few steps that no fact is said."""
    return editor.rewrite_many(list(facts), targets=TargetSettings(steps=6, clamp=2.0), **options)


def strong(editor: Editor, *facts: Fact, **options: Any) -> Edit:
    """Enough to be seen in everything that is checked."""
    search = TargetSettings(steps=12, clamp=20.0)
    return editor.rewrite_many(list(facts), targets=search, lam=1e-3, layers=(1, 2), **options)


# The checks


def test_an_edit_that_passes_tells_its_drift():
    editor = open_editor(OPEN)
    edit = strong(editor, FACT)
    assert not edit.forced
    told = edit.scores["drift"]
    assert told == editor.drift().to_json()
    assert told["kl"] > 0
    assert told["growth"] > 0
    assert told["site"] in edit.sites
    assert edit.scores["guard"]["failed"] == []
    editor.undo(edit.id)
    assert (editor.drift().kl, editor.drift().growth) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("guard", "facts", "check", "says"),
    [
        (
            replace(OPEN, drift=1e-6),
            [FACT],
            "drift",
            r"moved by .* nats .*, allowed 1e-06: lower the clamp, raise λ, or undo",
        ),
        (
            replace(OPEN, drift=1e-6),
            [FACT, OTHERS[0]],
            "drift",
            r"moved by .* nats .*, allowed 1e-06: write fewer facts",
        ),
        (replace(OPEN, growth=1e-6), [FACT], "growth", r"down_proj moved by .* of its own size, allowed 1e-06.*λ"),
        (
            replace(OPEN, said=0.1),
            [OTHERS[0]],
            "said",
            r"target has rank \d+ and probability .*expected it first: raise the steps",
        ),
        (replace(OPEN, said=0.9), [FACT, *OTHERS], "said", r"of 3 facts are said, expected 3: write fewer"),
    ],
)
def test_a_failed_check_rolls_back_exactly(guard, facts, check, says, tmp_path):
    editor = open_editor(OPEN, tmp_path / "ledger")
    strong(editor, Fact.parse("{Ada Lovelace} wrote", "a river"))
    editor.guard = guard
    before, log = tiny.weights(editor.model), (tmp_path / "ledger" / "log.jsonl").read_bytes()
    write = strong if check != "said" else rewrite
    with pytest.raises(GuardError, match=f"not written, {check}: .*{says}.*or force it") as refused:
        write(editor, *facts)
    assert check in refused.value.checks
    assert tiny.weights(editor.model) == before
    assert (tmp_path / "ledger" / "log.jsonl").read_bytes() == log
    assert not list((tmp_path / "ledger" / "edits").glob("e0002*"))
    forced = write(editor, *facts, force=True)
    assert forced.forced
    assert check in [one["check"] for one in forced.scores["guard"]["failed"]]
    again = open_editor(guard, tmp_path / "ledger")
    assert again.ledger.get(forced.id).forced, "it is in the log"
    assert tiny.weights(again.model) == tiny.weights(editor.model)


def test_answers_that_are_no_numbers_cannot_be_forced(monkeypatch):
    editor = open_editor(OPEN)
    base = tiny.weights(editor.model)
    clean = editor_module.next_tokens
    calls = []

    def poisoned(*args: Any) -> torch.Tensor:
        calls.append(args)
        return clean(*args) if len(calls) == 1 else clean(*args) * torch.nan

    monkeypatch.setattr(editor_module, "next_tokens", poisoned)
    with pytest.raises(GuardError, match="NaN or infinite, expected numbers: load the model in float32"):
        strong(editor, FACT, force=True)
    assert tiny.weights(editor.model) == base
    assert not editor.ledger.edits


def test_targets_found_before_a_refusal_are_used_by_the_next_try(tmp_path, monkeypatch):
    editor = open_editor(Guard(), tmp_path / "ledger")
    with pytest.raises(GuardError):
        rewrite(editor, FACT)
    told: list[int] = []
    monkeypatch.setattr(editor, "progress", editor_module.Progress(targets=lambda *_: told.append(1)))
    rewrite(editor, FACT, force=True)
    assert not told, "nothing had to be searched for again"
    assert not list((tmp_path / "ledger" / "work").iterdir())


def test_no_guard_checks_nothing():
    edit = rewrite(open_editor(None), FACT)
    assert not edit.forced
    assert set(edit.scores) == {"before", "after"}


@pytest.mark.parametrize(
    ("scores", "drift", "failed"),
    [
        ([SAID], STILL, []),
        ([UNSAID], STILL, ["said"]),
        ([SAID, UNSAID], STILL, []),
        ([SAID, UNSAID, UNSAID], STILL, ["said"]),
        ([SAID], replace(STILL, kl=1.01), ["drift"]),
        ([SAID], replace(STILL, kl=0.99), []),
        ([UNSAID], replace(STILL, kl=2.0, growth=100.0), ["drift", "growth", "said"]),
        ([SAID], replace(STILL, kl=float("nan"), growth=100.0), ["finite"]),
        ([replace(SAID, nll=float("inf"))], STILL, ["finite"]),
    ],
)
def test_the_default_bounds(scores, drift, failed):
    assert [one.check for one in Guard().check(scores, drift)] == failed


# What the ledger holds already


@pytest.mark.parametrize(
    ("probability", "told"),
    [
        (0.0, "0 %"),
        (1e-9, "<0.001 %"),
        (0.00007, "0.007 %"),
        (0.0004, "0.04 %"),
        (0.0123, "1.2 %"),
        (0.0999, "10.0 %"),
        (0.41, "41 %"),
        (0.9971, "99.7 %"),
    ],
)
def test_a_probability_is_told_as_the_tables_tell_it(probability, told):
    (failure,) = Guard().check([replace(UNSAID, probability=probability)], STILL)
    assert f"probability {told} (" in failure.says


def test_another_target_for_a_prompt_is_refused_before_any_work(monkeypatch):
    editor = open_editor(OPEN)
    first = strong(editor, FACT)
    before = tiny.weights(editor.model)
    other = replace(FACT, prompt="The  capital of {} is", target="Madrid")  # another spacing is the same prompt
    monkeypatch.setattr(editor, "_solve", lambda *_: pytest.fail("work was done"))
    with pytest.raises(InputError, match=f"{first.id} already makes .* say 'Rome'.*rebind ledger undo {first.id}"):
        strong(editor, other)
    monkeypatch.undo()
    assert tiny.weights(editor.model) == before
    with pytest.warns(LedgerWarning, match="'France' was written before, by edit e0001"):
        assert strong(editor, other, force=True).forced
    editor.undo("e0001")
    editor.undo("e0002")
    strong(editor, other)  # undone edits speak against nothing


def test_a_subject_written_again_is_mentioned():
    editor = open_editor(OPEN)
    strong(editor, FACT)
    with pytest.warns(LedgerWarning, match="'France' was written before, by edit e0001 .*undo e0001"):
        assert not strong(editor, Fact.parse("{france} is in the north of", "Norway")).forced
    with pytest.warns(LedgerWarning):
        strong(editor, FACT)  # the same fact again is no contradiction


def test_the_plan_names_earlier_edits():
    editor = open_editor(OPEN)
    strong(editor, FACT)
    plan = editor.plan([replace(FACT, target="Madrid"), OTHERS[0]])
    assert [(one.edit, one.target, one.clashes) for one in plan.earlier] == [("e0001", "Rome", True)]
    assert find_earlier([OTHERS[1]], editor.ledger.active) == []
    same = find_earlier([FACT], editor.ledger.active)
    assert [one.clashes for one in same] == [False]


def test_every_check_that_failed_is_told_with_its_numbers():
    failed = Guard(drift=0.1, growth=0.2).check([UNSAID], Drift(0.5, 0.6, "x", 0.7, "site"))
    with pytest.raises(GuardError) as told:
        enforce(failed, force=False)
    text = str(told.value)
    assert text.startswith("not written, drift: the next token on unrelated prompts moved by 0.50 nats")
    assert "; also growth: site moved by 0.70 of its own size, allowed 0.2" in text
    assert "; also said: the target has rank 7" in text


def test_targets_that_are_no_numbers_are_the_guards_business(monkeypatch):
    editor = open_editor(Guard())
    base, find = tiny.weights(editor.model), Search.find

    def broken(*args: Any) -> Any:
        found = find(*args)
        found.hidden[0, 0] = float("nan")
        return found

    monkeypatch.setattr(Search, "find", broken)
    with pytest.raises(GuardError, match="not written, finite: 1 of 1 targets .* NaN .*: load the model in float32"):
        rewrite(editor, FACT, force=True)
    assert tiny.weights(editor.model) == base
    assert not editor.ledger.edits


def test_a_redo_that_was_forced_is_told_so(tmp_path):
    editor = open_editor(OPEN, ledger=tmp_path / "ledger")
    first = rewrite(editor, FACT)
    editor.undo(first.id)
    rewrite(editor, replace(FACT, target="Berlin"))
    assert not editor.ledger.get(first.id).forced
    with pytest.warns(LedgerWarning, match="was written before, by edit e0002"):
        assert editor.redo(first.id, force=True).forced
    assert Ledger.open(tmp_path / "ledger").get(first.id).forced
    assert editor.ledger.verify() == []
    editor.undo(first.id)
    editor.undo("e0002")
    assert not editor.redo("e0002", force=True).forced, "nothing spoke against it"


@pytest.mark.parametrize("guard", [OPEN, None])
def test_facts_that_share_a_key_are_named_before_any_work(monkeypatch, guard):
    """By an edit and by its plan."""
    editor = open_editor(guard)
    facts = [FACT, Fact.parse("The capital of {France} lies in", "Spain"), *OTHERS]
    monkeypatch.setattr(Search, "find", lambda *_, **__: pytest.fail("searched"))
    for work in (editor.rewrite_many, editor.plan):
        with pytest.raises(FactWarning, match="'Rome' and 'The capital of France lies in' → 'Spain'.*share a key"):
            work(facts)


@pytest.mark.parametrize("scores", [[UNSAID], [UNSAID, SAID, UNSAID]])
def test_what_to_try_is_what_the_method_takes(scores):
    """rome and emmet refuse λ, and several layers."""
    guard, drift = Guard(drift=0.1, growth=0.2), Drift(0.5, 0.6, "x", 0.7, "site")
    steps = {name: [one.step for one in guard.check(scores, drift, METHODS[name])] for name in METHODS}
    for name, told in steps.items():
        assert len(told) == 3
        assert not any(f"use {name}" in step for step in told), "which did not do"
        if METHODS[name].exact:
            assert not any("λ" in step or "layers" in step for step in told)
            assert all("memit" in step for step in told)
        else:
            assert all("λ" in step for step in told)
    fewer = [step for told in steps.values() for step in told if "fewer facts" in step]
    assert bool(fewer) == (len(scores) > 1)


@pytest.mark.parametrize(("method", "step"), [("rome", "use memit"), ("memit", "raise λ")])
def test_the_editor_says_which_method_it_is(method, step):
    editor = open_editor(replace(OPEN, drift=1e-6))
    with pytest.raises(GuardError, match=f"lower the clamp, {step}"):
        editor.rewrite_many([FACT], method=method, targets=TargetSettings(steps=12, clamp=20.0))
