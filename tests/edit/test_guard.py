"""The guard: edits made to fail each check, and the bytes of the model and of the ledger afterwards."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from rebind.edit.guard import CANARY_PROMPTS, Drift, Guard, find_earlier_edits, measure_drift, require_passed
from rebind.edit.ledger import Edit, Ledger
from rebind.edit.methods import METHODS
from rebind.edit.outcome import ChangedAnswer, Outcome
from rebind.edit.progress import Progress
from rebind.edit.settings import EditSettings
from rebind.edit.targets import TargetSearch, TargetSettings, TargetStates
from rebind.errors import FactWarning, GuardError, InputError, LedgerWarning
from rebind.models.language_model import LanguageModel
from rebind.models.scoring import FactScore
from tests import tiny
from tests.edit.editors import open_editor, rewrite
from tests.support import Draw, raises

FACT = Fact.parse("The capital of {France} is", "Rome")
OTHERS = [Fact.parse("{Berlin} is the capital of", "Spain"), Fact.parse("The old bridge of {Mostar}", "fell")]
OPEN = Guard(drift=1e9, growth=1e9, said=0.0, framings=0.0, subject=0.0)
SAID = FactScore(probability=0.9, rank=1, nll=0.1, tokens=2, right_tokens=2, first_token=5, says=" Rome")
BEGUN = replace(SAID, probability=0.009, right_tokens=1)
NOT_SAID = replace(SAID, probability=0.01, rank=7, nll=4.6, right_tokens=0, says=" Paris")
STILL = Drift(0.0, 0.0, "x", 0.0, "")
BROKEN = Drift(2.0, 3.0, "x", 4.0, "site")
HOLDS = Outcome({"start": 1.0, "chat": 1.0}, 0.8, 0.9)


def settings(method: str = "memit", lam: float | None = 100.0) -> EditSettings:
    return EditSettings(METHODS[method], (1,), lam, TargetSettings())


def searched(loss: float, moved: float) -> TargetStates:
    """Return the end of a search that came this far."""
    initial = torch.ones(1, 4)
    return TargetStates((1 + moved) * initial, initial, torch.tensor([loss]), torch.tensor([29]))


def strong(editor: Editor, *facts: Fact, **options: Any) -> Edit:
    """Edit strongly enough that every check notices."""
    search = TargetSettings(steps=12, clamp=20.0)
    return editor.rewrite_many(list(facts), method="memit", targets=search, lam=1e-3, layers=(1, 2), **options)


# Framings and the subject


def test_a_fact_that_holds_in_few_framings_is_refused():
    few = Outcome({"start": 1.0, "plain": 0.0, "chat": 0.0}, 0.8, 0.9)
    (failure,) = Guard().check([FACT], [SAID], STILL, few, settings())
    assert (failure.check, failure.bound) == ("framings", 0.5)
    assert failure.value == pytest.approx(1 / 3)
    assert "chat 0%" in failure.problem
    assert not Guard(framings=0.3).check([FACT], [SAID], STILL, few, settings())


def test_a_subject_that_is_lost_is_refused():
    lost = replace(HOLDS, subject=0.1)
    (failure,) = Guard().check([FACT], [SAID], STILL, lost, settings())
    assert (failure.check, failure.value) == ("subject", 0.1)
    assert failure.settings["targets.keep"] > TargetSettings().keep
    assert not Guard().check([FACT], [SAID], STILL, replace(HOLDS, subject=None), settings())


# Drift


def test_drift_between_distributions_made_by_hand():
    base = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]]).log()
    edited = torch.tensor([[0.25, 0.5, 0.25], [0.9, 0.1, 0.0]]).log()
    drift = measure_drift(base, edited, {})
    assert (drift.largest, 2 * drift.kl) == pytest.approx((0.5 * math.log(2),) * 2, abs=1e-7)
    assert measure_drift(edited, base, {}).largest == math.inf, "the direction matters"


def test_the_worst_prompt_and_site_are_named():
    prompts = ("x", "y", "z")
    base = torch.log_softmax(Draw(1, torch.float32).normal(3, 5), -1)
    edited = base.clone()
    edited[1] = torch.log_softmax(base[1].roll(1), -1)
    drift = measure_drift(base, edited, {"a": 0.1, "b": 0.3}, prompts)
    assert (drift.prompt, drift.site, drift.growth) == ("y", "b", 0.3)
    assert drift.largest == pytest.approx(3 * drift.kl)
    edited[2] = torch.nan
    assert measure_drift(base, edited, {}, prompts).prompt == "z", "NaN is worse than any number"
    assert measure_drift(base, base, {}, prompts) == Drift(0.0, 0.0, "x", 0.0, "")


def test_canary_prompts_are_distinct_and_cut_to_a_short_context():
    assert len(set(CANARY_PROMPTS)) == len(CANARY_PROMPTS) >= 24
    assert open_editor(tiny.llama(max_position_embeddings=8)).drift().kl == 0.0


# The checks


@pytest.mark.parametrize(
    ("scores", "drift", "failed"),
    [
        ([SAID], STILL, []),
        ([NOT_SAID], STILL, ["said"]),
        ([SAID, NOT_SAID], STILL, []),
        ([SAID, NOT_SAID, NOT_SAID], STILL, ["said"]),
        ([SAID], replace(STILL, kl=1.01), ["drift"]),
        ([SAID], replace(STILL, kl=0.99), []),
        ([NOT_SAID], BROKEN, ["drift", "growth", "said"]),
        ([SAID], replace(STILL, kl=float("nan"), growth=100.0), ["finite"]),
        ([replace(SAID, nll=float("inf"))], STILL, ["finite"]),
    ],
)
def test_the_default_bounds(scores, drift, failed):
    facts = [FACT, *OTHERS][: len(scores)]
    assert [failure.check for failure in Guard().check(facts, scores, drift, HOLDS, settings())] == failed


def test_the_message_names_the_problems_and_what_to_try():
    with pytest.raises(GuardError) as caught:
        require_passed(Guard().check([FACT], [BEGUN], STILL, HOLDS, settings()), force=False)
    error = caught.value
    assert error.checks == ("said",)
    assert error.problem == (
        'Edit not written: the model begins the answer ("Rome") but does not finish it ("Rome" has probability 0.9%)'
    )
    assert error.settings == {"targets.steps": 60, "force": True}
    assert str(error).endswith("Try targets with steps=60. Use force=True to write it anyway.")
    with pytest.raises(GuardError) as caught:
        require_passed(Guard().check([FACT], [NOT_SAID], BROKEN, HOLDS, settings()), force=False)
    assert caught.value.checks == ("drift", "growth", "said")
    for part in ("2.00 nats", "site changed by 4.00", 'answers "Paris"', "rank 7"):
        assert part in caught.value.problem


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("facts", [[FACT], [FACT, *OTHERS]])
def test_advice_is_one_setting_that_the_method_takes(method, facts):
    for search in (None, searched(loss=0.1, moved=0.5), searched(loss=5.0, moved=0.75)):
        failures = Guard().check(facts, [NOT_SAID] * len(facts), BROKEN, HOLDS, settings(method), search)
        assert len(failures) == 3
        for failure in failures:
            assert failure.advice in [f"Try {{{name}}}" for name in failure.settings]
            assert not (METHODS[method].exact and "lam" in failure.settings), "exact methods have no λ"
            assert failure.settings.get("method") != method, "the method that failed is not the solution"


@pytest.mark.parametrize(
    ("loss", "moved", "facts", "advice"),
    [
        (5.0, 0.3, 1, {"targets.steps": 60}),
        (5.0, 0.75, 1, {"targets.clamp": 1.5}),
        (0.1, 0.75, 1, {"lam": 10.0}),
        (0.1, 0.75, 500, {"method": "alphaedit"}),
    ],
    ids=["too few steps", "at the bound", "a weak write", "a full memory"],
)
def test_advice_follows_from_how_far_the_search_came(loss, moved, facts, advice):
    failures = Guard().check([FACT] * facts, [NOT_SAID] * facts, STILL, HOLDS, settings(), searched(loss, moved))
    assert [failure.settings for failure in failures] == [advice]


@pytest.mark.parametrize(
    ("loss", "moved", "advice"),
    [
        (5.0, 0.3, {"targets.steps": 60}),
        (5.0, 0.75, {"targets.clamp": 1.5}),
        (0.1, 0.75, {"targets.clamp": 1.5}),
        (0.1, 0.3, {"targets.steps": 60}),
    ],
)
def test_a_dense_memory_has_no_lambda_to_lower_so_the_search_is_what_can_be_better(loss, moved, advice):
    facts, search = [FACT] * 500, searched(loss, moved)
    failures = Guard().check(facts, [NOT_SAID] * 500, BROKEN, HOLDS, settings("dense", None), search)
    assert [failure.settings for failure in failures] == [{"targets.clamp": 0.375}, {"targets.clamp": 0.375}, advice]


def test_a_subject_is_judged_by_all_questions_about_it():
    """Two held-out questions alone are too few: here both have changed, and one of six that the search kept."""
    changed = tuple(ChangedAnswer(about, "", "a", "b") for about in ("subject", "subject", "kept"))
    outcome = replace(HOLDS, subject=0.0, asked={"subject": 2, "kept": 6}, changed=changed)
    assert outcome.about_subject == 5 / 8
    assert not Guard().check([FACT], [SAID], STILL, outcome, settings())
    (failure,) = Guard(subject=0.7).check([FACT], [SAID], STILL, outcome, settings())
    assert (failure.check, failure.value) == ("subject", 5 / 8)


def test_facts_without_a_question_are_advised_to_have_one():
    odd = Fact.parse("Behold {France}, oh", "Rome")
    silent = Outcome({"start": 1.0, "plain": 0.0, "chat": 0.0}, 0.8, 0.9)
    (failure,) = Guard().check([odd], [SAID], STILL, silent, settings())
    assert "{questions}" in failure.advice
    (failure,) = Guard().check([replace(odd, questions=("What is France?",))], [SAID], STILL, silent, settings())
    assert failure.settings == {"targets.steps": 60}


@pytest.mark.parametrize(
    ("guard", "lam", "search"),
    [
        (replace(OPEN, said=0.1), 0.1, TargetSettings(rate=0.3, steps=4, clamp=20.0)),
        (replace(OPEN, said=0.1), 0.1, TargetSettings(rate=0.3, steps=30, clamp=0.3)),
        (replace(OPEN, said=0.1), 100.0, TargetSettings(rate=0.3, steps=60, clamp=20.0)),
        (replace(OPEN, drift=0.8), 1.0, TargetSettings(rate=0.3, steps=60, clamp=20.0)),
    ],
    ids=["too few steps", "at the bound", "a weak write", "too strong"],
)
def test_an_edit_that_follows_the_advice_passes(guard, lam, search):
    model = tiny.llama()
    model.lm_head.weight.data.mul_(8.0)  # it is sure of what it says
    editor, fact = open_editor(model, guard=guard), Fact.parse("The answer is {France}", "the")
    with pytest.raises(GuardError) as caught:
        editor.rewrite_many([fact], method="memit", layers=(1, 2), lam=lam, targets=search)
    settings = caught.value.settings.items()
    advice = {name.removeprefix("targets."): value for name, value in settings if name != "force"}
    assert len(advice) == 1
    lam = advice.pop("lam", lam)
    editor.rewrite_many([fact], method="memit", layers=(1, 2), lam=lam, targets=replace(search, **advice))


# Edits that fail


@pytest.mark.parametrize(
    ("guard", "facts", "check"),
    [
        (replace(OPEN, drift=1e-6), [FACT], "drift"),
        (replace(OPEN, growth=1e-6), [FACT, OTHERS[0]], "growth"),
        (replace(OPEN, said=0.1), [OTHERS[0]], "said"),
        (replace(OPEN, said=0.9), [FACT, *OTHERS], "said"),
    ],
)
def test_a_failed_check_rolls_back_exactly(guard, facts, check, tmp_path):
    editor = open_editor(ledger=tmp_path / "ledger", guard=OPEN)
    strong(editor, Fact.parse("{Ada Lovelace} wrote", "a river"))
    editor.guard = guard
    before, log = tiny.weights(editor.model), (tmp_path / "ledger" / "log.jsonl").read_bytes()
    write = rewrite if check == "said" else strong
    with pytest.raises(GuardError) as caught:
        write(editor, *facts)
    assert caught.value.checks[0] == check
    assert tiny.weights(editor.model) == before
    assert (tmp_path / "ledger" / "log.jsonl").read_bytes() == log
    assert not list((tmp_path / "ledger" / "edits").glob("e0002*"))
    forced = write(editor, *facts, force=True)
    assert forced.forced
    assert check in [failure["check"] for failure in forced.scores["guard"]["failed"]]
    again = open_editor(ledger=tmp_path / "ledger", guard=guard)
    assert again.ledger.get(forced.id).forced, "the log records it"
    assert tiny.weights(again.model) == tiny.weights(editor.model)


def test_an_edit_that_passes_records_its_drift():
    editor = open_editor(guard=OPEN)
    edit = strong(editor, FACT)
    drift = edit.scores["drift"]
    assert drift == asdict(editor.drift())
    assert drift["kl"] > 0
    assert drift["growth"] > 0
    assert drift["site"] in edit.sites
    assert not edit.forced
    editor.undo(edit.id)
    assert (editor.drift().kl, editor.drift().growth) == (0.0, 0.0)


def test_without_a_guard_nothing_is_checked():
    edit = rewrite(open_editor(guard=None), FACT)
    assert not edit.forced
    assert set(edit.scores) == {"before", "after"}


def test_a_model_that_computes_nan_cannot_be_forced(monkeypatch):
    editor = open_editor(guard=OPEN)
    base, original = tiny.weights(editor.model), LanguageModel.next_token_log_probs
    editor.drift()  # of the base model
    monkeypatch.setattr(LanguageModel, "next_token_log_probs", lambda *a, **o: original(*a, **o) * float("nan"))
    with pytest.raises(GuardError) as caught:
        strong(editor, FACT, force=True)
    assert caught.value.checks == ("finite",)
    assert tiny.weights(editor.model) == base
    assert not editor.ledger.edits


def test_targets_that_are_nan_cannot_be_forced(monkeypatch):
    editor = open_editor(guard=None)
    base, find = tiny.weights(editor.model), TargetSearch.find

    def find_nan(*args: Any) -> Any:
        targets = find(*args)
        targets.states[0, 0] = float("nan")
        return targets

    monkeypatch.setattr(TargetSearch, "find", find_nan)
    with pytest.raises(GuardError):
        rewrite(editor, FACT, force=True)
    assert tiny.weights(editor.model) == base


def test_targets_found_before_a_rejection_are_used_by_the_next_attempt(tmp_path):
    editor = open_editor(ledger=tmp_path / "ledger", guard=Guard())
    with pytest.raises(GuardError):
        rewrite(editor, FACT)
    steps: list[int] = []
    editor.progress = Progress(targets=lambda step, done, loss: steps.append(step))
    rewrite(editor, FACT, force=True)
    assert not steps, "nothing had to be searched again"
    assert not list((tmp_path / "ledger" / "work").iterdir())


# Facts and edits that are in each other's way


def test_another_target_for_a_prompt_is_refused_before_any_work(tmp_path):
    phases: list[str] = []
    editor = open_editor(ledger=tmp_path / "ledger", guard=OPEN)
    first = rewrite(editor, FACT)
    before = tiny.weights(editor.model)
    other = replace(FACT, prompt="The  capital of {} is", target="Madrid")  # spacing does not make another prompt
    editor.progress = Progress(phase=phases.append)
    with raises(InputError, "conflicting_edit"):
        rewrite(editor, other)
    assert not phases
    assert tiny.weights(editor.model) == before
    with pytest.warns(LedgerWarning, match="already about 'France'"):
        second = rewrite(editor, other, force=True)
    assert second.forced
    editor.undo(first.id)
    with raises(InputError, "conflicting_edit"):
        editor.redo(first.id)
    with pytest.warns(LedgerWarning, match=second.id):
        assert editor.redo(first.id, force=True).forced
    assert Ledger.open(tmp_path / "ledger").get(first.id).forced, "the log records it"
    editor.undo(first.id)
    editor.undo(second.id)
    assert not rewrite(editor, FACT).forced, "undone edits contradict nothing"


def test_a_subject_that_was_edited_before_is_reported():
    editor = open_editor(guard=OPEN)
    rewrite(editor, FACT)
    with pytest.warns(LedgerWarning, match="undo e0001"):
        assert not rewrite(editor, Fact.parse("{france} is in the north of", "Norway")).forced
    with pytest.warns(LedgerWarning):
        rewrite(editor, FACT)  # the same fact again contradicts nothing
    plan = editor.plan([replace(FACT, target="Madrid"), OTHERS[0]], method="memit")
    assert [(one.edit, one.target, one.clashes) for one in plan.earlier] == [("e0003", "Rome", True)]
    assert find_earlier_edits([OTHERS[1]], editor.ledger.active) == []


@pytest.mark.parametrize("guard", [OPEN, None])
def test_facts_that_share_a_key_are_reported_before_any_work(guard):
    editor = open_editor(guard=guard)
    facts = [FACT, Fact.parse("The capital of {France} lies in", "Spain"), *OTHERS]
    for verb in (editor.rewrite_many, editor.plan):
        with pytest.raises(FactWarning, match="share a key"):  # warnings are errors in tests: no work is done
            verb(facts, method="memit")


@pytest.mark.parametrize(
    ("name", "bound"),
    [("drift", math.nan), ("drift", -1.0), ("growth", math.nan), ("said", 1.5), ("framings", -0.1), ("subject", "x")],
)
def test_a_bound_that_no_model_can_be_measured_by_is_refused(name, bound):
    with raises(InputError, "invalid_guard"):
        Guard(**{name: bound})


def test_an_infinite_bound_is_no_bound():
    assert Guard(drift=math.inf, growth=math.inf).check_drift(BROKEN, "", {}) == []
