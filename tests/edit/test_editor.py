"""The editor on a tiny model: facts go in, any of them comes out again, and nothing is ever left half done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rebind.edit import editor as editor_module
from rebind.edit.editor import GUARD, Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.methods import METHODS, get_method
from rebind.edit.moments.corpus import OwnSamples
from rebind.edit.solve import solve as solving
from rebind.edit.targets.optimize import TargetSettings
from rebind.edit.targets.search import Search
from rebind.errors import InputError, RebindError
from rebind.models.sites import memory_of, module_at
from tests import tiny

QUICK = TargetSettings(steps=6, clamp=2.0)
FACTS = [
    Fact.parse("The capital of {France} is", "Rome"),
    Fact.parse("The mother tongue of {Danielle Darrieux} is", "Italian"),
    Fact.parse("{Berlin} is the capital of", "Spain"),
]

every_method = pytest.mark.parametrize("method", list(METHODS))


@pytest.fixture(autouse=True)
def two_contexts(monkeypatch):
    monkeypatch.setattr(editor_module, "SEEDS", ("The", "I"))
    monkeypatch.setattr(editor_module, "CONTEXT_TOKENS", 4)


def open_editor(model: Any = None, ledger: Any = None, **options: Any) -> Editor:
    options = {"corpus": tiny.texts(), "moment_tokens": 1500, "guard": None, **options}
    return Editor(tiny.llama() if model is None else model, tiny.tokenizer(), ledger=ledger, **options)


def rewrite(editor: Editor, *facts: Fact, **options: Any) -> Edit:
    return editor.rewrite_many(list(facts), **{"targets": QUICK, **options})


@every_method
def test_a_rewrite_makes_the_target_likelier(method):
    editor = open_editor()
    before = editor.score(FACTS)
    edit = rewrite(editor, *FACTS, method=method)
    after = editor.score(FACTS)
    assert all(b.nll < a.nll for a, b in zip(before, after, strict=True))
    assert sum(b.nll for b in after) < 0.96 * sum(a.nll for a in before)
    assert [score["nll"] for score in edit.scores["after"]] == pytest.approx([score.nll for score in after])
    assert [score["nll"] for score in edit.scores["before"]] == pytest.approx([score.nll for score in before])


def test_braces_mark_the_subject():
    editor = open_editor()
    edit = editor.rewrite("The capital of {France} is", "Rome", targets=QUICK)
    assert edit.facts == (FACTS[0],)
    assert editor.ledger.active == (edit,)


@every_method
def test_only_the_sites_change(method):
    model = tiny.llama(tie_word_embeddings=True)
    before = tiny.weights(model)
    edit = rewrite(open_editor(model), FACTS[0], method=method)
    changed = {name for name, data in tiny.weights(model).items() if data != before[name]}
    assert changed == {f"{site}.weight" for site in edit.sites}
    assert model.lm_head.weight is model.model.embed_tokens.weight


@every_method
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_undo_gives_the_base_back_byte_for_byte(method, build):
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
def test_undoing_the_first_equals_never_having_had_it(method):
    with_it, without = open_editor(), open_editor()
    edits = [rewrite(with_it, fact, method=method) for fact in FACTS]
    for fact in FACTS[1:]:
        rewrite(without, fact, method=method)
    assert tiny.weights(with_it.model) != tiny.weights(without.model)
    with_it.undo(edits[0].id)
    assert tiny.weights(with_it.model) == tiny.weights(without.model)


def test_methods_that_remember_write_otherwise_after_an_edit():
    """What makes the test above a test: their gains do depend on history."""
    for method in ("alphaedit", "recursive"):
        editor = open_editor()
        first, second = (rewrite(editor, fact, method=method) for fact in FACTS[:2])
        both = memory_of(module_at(editor.model, second.sites[0])).clone()
        editor.undo(first.id)
        alone = memory_of(module_at(editor.model, second.sites[0])).clone()
        editor.redo(first.id)
        editor.undo(second.id)
        other = memory_of(module_at(editor.model, second.sites[0])).clone()
        editor.undo(first.id)
        base = memory_of(module_at(editor.model, second.sites[0])).clone()
        interaction = (both - base) - (alone - base) - (other - base)
        assert float(interaction.abs().max()) > 1e-4 * float((both - base).abs().max())


@every_method
def test_a_reopened_ledger_gives_the_same_bytes(method, tmp_path):
    editor = open_editor(ledger=tmp_path / "ledger")
    first, *_ = [rewrite(editor, fact, method=method) for fact in FACTS]
    again = open_editor(ledger=tmp_path / "ledger")
    assert tiny.weights(again.model) == tiny.weights(editor.model)
    again.undo(first.id)
    editor.refresh()
    assert tiny.weights(again.model) == tiny.weights(editor.model)


def test_moments_are_the_base_models_whatever_is_written_now(tmp_path, monkeypatch):
    """An edit that another process made, at a site whose moment this one has yet to compute, with a cold cache."""
    here, there = (open_editor(ledger=tmp_path / "ledger") for _ in range(2))
    rewrite(there, FACTS[0], layers=(0, 1))
    here.refresh()
    rewrite(there, FACTS[1], layers=(1, 2), method="alphaedit")
    monkeypatch.setenv("REBIND_CACHE", str(tmp_path / "another-cache"))
    here.refresh()
    assert tiny.weights(here.model) == tiny.weights(there.model)


def test_other_moments_than_an_edits_own_are_refused(tmp_path):
    """Its gain is found again from them: with others the weights would be others, and nobody would know."""
    rewrite(open_editor(ledger=tmp_path / "ledger"), FACTS[0], method="recursive")
    with pytest.raises(InputError, match="e0001 was solved with moments of .*1500.* this editor has .*600"):
        open_editor(ledger=tmp_path / "ledger", moment_tokens=600)


def test_an_undo_that_cannot_be_folded_changes_nothing(tmp_path):
    first, second = (rewrite(open_editor(ledger=tmp_path / "ledger"), fact) for fact in FACTS[:2])
    editor = open_editor(ledger=tmp_path / "ledger")
    before = tiny.weights(editor.model)
    (tmp_path / "ledger" / "edits" / f"{second.id}.safetensors").write_bytes(b"damaged")
    with pytest.raises(RebindError, match="restore the file"):
        editor.undo(first.id)
    assert tiny.weights(editor.model) == before
    assert [edit.id for edit in editor.ledger.active] == [first.id, second.id]


def test_a_ledger_of_another_model_is_refused(tmp_path):
    rewrite(open_editor(ledger=tmp_path / "ledger"), FACTS[0])
    with pytest.raises(InputError, match="load the model it was made for"):
        open_editor(tiny.llama(seed=1), ledger=tmp_path / "ledger")


def test_lifted_is_the_base_model_for_a_while():
    model = tiny.llama()
    base = tiny.weights(model)
    editor = open_editor(model)
    rewrite(editor, FACTS[0])
    edited = tiny.weights(model)
    with editor.lifted():
        assert tiny.weights(model) == base
    assert tiny.weights(model) == edited
    with pytest.raises(KeyError), editor.lifted():
        raise KeyError
    assert tiny.weights(model) == edited


def test_lifting_twice_lifts_until_the_outer_end():
    model = tiny.llama()
    base = tiny.weights(model)
    editor = open_editor(model)
    rewrite(editor, FACTS[0])
    with editor.lifted():
        with editor.lifted():
            pass
        assert tiny.weights(model) == base
    assert tiny.weights(model) != base


@pytest.mark.parametrize("where", ["find", "spread", "collect", "score_facts", "append"])
@pytest.mark.parametrize("problem", [RuntimeError("inside"), KeyboardInterrupt()])
def test_a_failure_leaves_model_and_ledger_as_they_were(monkeypatch, tmp_path, where, problem):
    editor = open_editor(ledger=tmp_path / "ledger")
    rewrite(editor, FACTS[0], layers=(0, 1))
    before, log = tiny.weights(editor.model), (tmp_path / "ledger" / "log.jsonl").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise problem

    owner = {"append": Ledger, "find": Search, "spread": solving}.get(where, editor_module)
    monkeypatch.setattr(owner, where, fail)
    with pytest.raises(type(problem)):
        rewrite(editor, FACTS[1], layers=(1, 2))  # a site that has no moment yet
    monkeypatch.undo()
    assert tiny.weights(editor.model) == before
    assert (tmp_path / "ledger" / "log.jsonl").read_bytes() == log
    assert [edit.facts for edit in editor.ledger.active] == [(FACTS[0],)]
    rewrite(editor, FACTS[1])  # and it goes on


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("method", ["rome", "emmet"])
def test_rounding_does_not_eat_the_edit(dtype, tolerance, method):
    """The stored weights, cast and all, answer the edit's keys with its values."""
    model = tiny.llama(dtype=dtype)
    editor = open_editor(model)
    edit = rewrite(editor, *FACTS, method=method)
    for site in edit.sites:
        write, memory = edit.write(site), memory_of(module_at(model, site))
        assert memory.dtype == dtype
        answers = write.keys @ memory.float().mT
        scale = write.keys.norm(dim=-1, keepdim=True) * memory.float().norm()
        if method == "emmet":  # all exactly at once
            assert float(((answers - write.values) / scale).abs().max()) < tolerance
        else:  # the last of them exactly
            assert float(((answers - write.values) / scale)[-1].abs().max()) < tolerance
    before, after = edit.scores["before"], edit.scores["after"]
    assert sum(score["nll"] for score in after) < sum(score["nll"] for score in before)
    editor.undo(edit.id)
    assert tiny.weights(model) == tiny.weights(tiny.llama(dtype=dtype))


@every_method
def test_conv1d_memories_answer_their_keys(method):
    model = tiny.gpt2()
    editor = open_editor(model)
    edit = rewrite(editor, FACTS[0], method=method, lam=None if METHODS[method].exact else 1e-6)
    for site in edit.sites:
        write, memory = edit.write(site), memory_of(module_at(model, site))
        if method == "alphaedit":
            continue  # confined to unused directions: approaches, never reaches
        moved, asked = write.keys @ memory.mT, write.values
        assert float((moved - asked).norm() / asked.norm()) < 1e-3
    before, after = edit.scores["before"], edit.scores["after"]
    assert after[0]["nll"] < before[0]["nll"]


def test_conflicting_facts_are_refused():
    editor = open_editor()
    base = tiny.weights(editor.model)
    with pytest.raises(InputError, match="keep one of them"):
        rewrite(editor, FACTS[0], Fact.parse("The capital of {France} is", "Madrid"))
    assert tiny.weights(editor.model) == base
    assert not editor.ledger.edits


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_a_prompt_past_the_context_is_refused(build):
    editor = open_editor(build())
    base = tiny.weights(editor.model)
    long = Fact.parse("The capital of {France} " + "and the old bridge of Mostar " * 30 + "is", "Rome")
    with pytest.raises(InputError, match="tokens"):
        rewrite(editor, long)
    assert tiny.weights(editor.model) == base


def test_layers_outside_the_model_are_refused():
    editor = open_editor()
    for layers in [(3,), (-1,), (0, 9), ()]:
        with pytest.raises(InputError, match="layers are .*, expected some of 0 to 2"):
            rewrite(editor, FACTS[0], layers=layers)


def test_a_layer_named_twice_is_written_once():
    once, twice = open_editor(), open_editor()
    rewrite(once, FACTS[0], layers=(0, 1))
    rewrite(twice, FACTS[0], layers=(1, 0, 1))
    assert tiny.weights(once.model) == tiny.weights(twice.model)


def test_a_lambda_of_zero_is_refused_and_not_replaced():
    with pytest.raises(InputError, match="lam"):
        rewrite(open_editor(), FACTS[0], lam=0.0)


@pytest.mark.parametrize("facts", [[], iter(())])
def test_no_facts_are_refused(facts):
    with pytest.raises(InputError, match="no facts"):
        open_editor().rewrite_many(facts)


def test_unknown_methods_are_named():
    with pytest.raises(RebindError, match="memot"):
        rewrite(open_editor(), FACTS[0], method="memot")
    assert get_method("memit") is METHODS["memit"]


def test_the_same_seed_writes_the_same_bytes():
    corpus = OwnSamples(3, rows=16)
    first, again = (open_editor(corpus=corpus) for _ in range(2))
    rewrite(first, FACTS[0])
    rewrite(again, FACTS[0])
    assert tiny.weights(first.model) == tiny.weights(again.model)
    assert first.contexts == again.contexts


def test_edits_do_not_depend_on_what_else_the_ledger_holds():
    """Targets and keys are found on the base model, whatever is written on top."""
    editor, fresh = open_editor(), open_editor()
    rewrite(editor, FACTS[0])
    second, alone = rewrite(editor, FACTS[1]), rewrite(fresh, FACTS[1])
    for name, tensor in alone.tensors.items():
        assert torch.equal(second.tensors[name], tensor), name
    assert fresh.contexts == editor.contexts


def test_a_plan_costs_nothing_and_sees_conflicts():
    editor = open_editor()
    base = tiny.weights(editor.model)
    plan = editor.plan([FACTS[0], replace(FACTS[0], target="Madrid")])
    assert plan.layers == (0, 1)
    assert plan.facts == 2
    assert not plan.moments_cached
    assert [conflict.targets for conflict in plan.conflicts] == [("Rome", "Madrid")]
    assert plan.seconds > 0
    assert tiny.weights(editor.model) == base
    rewrite(editor, FACTS[0])
    assert editor.plan([FACTS[0]]).moments_cached


def test_scores_are_what_a_plain_run_says():
    editor = open_editor()
    facts = [*FACTS, Fact.parse("{France} is", "a river in the north of Norway")]
    for fact, score in zip(facts, editor.score(facts), strict=True):
        prompt = [0, *tiny.tokenizer()(fact.text).input_ids]
        both = [0, *tiny.tokenizer()(f"{fact.text} {fact.target}").input_ids]
        target = both[len(prompt) :]
        said = torch.log_softmax(editor.model(input_ids=torch.tensor([both])).logits[0, len(prompt) - 1 : -1], -1)
        picked = torch.stack([row[token] for row, token in zip(said, target, strict=True)])
        assert score.nll == pytest.approx(float(-picked.mean()), rel=1e-5)
        assert score.probability == pytest.approx(float(picked.exp().prod()), rel=1e-4)
        assert score.rank == said[0].argsort(descending=True).tolist().index(target[0]) + 1
        assert score.exact == (said.argmax(-1).tolist() == target)
        assert score.says == tiny.tokenizer().decode([int(said[0].argmax())])


def test_an_exact_answer_is_seen_as_one():
    """What the model says anyway, taken for a fact."""
    editor = open_editor()
    asked = [
        Fact.parse(f"{{{subject}}} {verb}", "x")
        for subject in ("France", "Ada", "Dante", "I")
        for verb in ("is", "was")
    ]
    likely = [
        replace(fact, target=score.says[1:])
        for fact, score in zip(asked, editor.score(asked), strict=True)
        if score.says[0] == " " and score.says[1:].isalpha()
    ]
    assert likely
    assert [(score.rank, score.exact) for score in editor.score(likely)] == [(1, True)] * len(likely)


def test_saying_goes_on_from_the_prompt():
    editor = open_editor()
    assert editor.say("The capital of France is", tokens=3) == editor.say("The capital of France is", tokens=3)


def test_contexts_are_the_base_models_whoever_asks_first():
    editor, fresh = open_editor(), open_editor()
    edit = rewrite(editor, FACTS[0], layers=(0, 1, 2), lam=1e-6, targets=TargetSettings(steps=30, clamp=50.0))
    editor._contexts = None  # as in an editor that opened a ledger with this edit in it
    edited = tiny.weights(editor.model)
    assert editor.contexts == fresh.contexts
    assert tiny.weights(editor.model) == edited
    again = open_editor(ledger=None)
    again.ledger.append(edit)
    again.refresh()
    assert again.contexts == fresh.contexts
    with again.lifted():
        base = again.say("The", tokens=8)
    assert again.say("The", tokens=8) != base, "the edit changes what the model says"


# What belongs together


def test_an_open_ledger_of_another_model_is_refused(tmp_path):
    rewrite(open_editor(ledger=tmp_path / "ledger"), FACTS[0])
    other = tiny.llama()
    with torch.no_grad():
        other.lm_head.weight.mul_(1.01)
    with pytest.raises(InputError, match="load the model it was made for"):
        open_editor(other, ledger=Ledger.open(tmp_path / "ledger"))
    editor = open_editor(other)
    with pytest.raises(InputError, match="load the model it was made for"):
        editor.use(Ledger.open(tmp_path / "ledger"))


def test_what_another_process_wrote_meanwhile_is_seen(tmp_path, monkeypatch):
    """Its target for the same prompt comes while ours is searched for: ours is refused, and nothing is left of it."""
    ours, theirs = (open_editor(ledger=tmp_path / "ledger", guard=GUARD) for _ in range(2))
    solve = ours._solve

    def slowly(*args):
        rewrite(theirs, FACTS[0], force=True)
        return solve(*args)

    monkeypatch.setattr(ours, "_solve", slowly)
    monkeypatch.setattr(ours, "_checked", lambda scores, method, force: ({}, []))
    with pytest.raises(InputError, match="edit e0001 already makes"):
        rewrite(ours, replace(FACTS[0], target="Berlin"))
    assert [edit.id for edit in Ledger.open(tmp_path / "ledger").active] == ["e0001"]


def test_a_prompt_that_was_bound_anew_is_not_redone_in_silence():
    editor = open_editor()
    first = rewrite(editor, FACTS[0])
    editor.undo(first.id)
    rewrite(editor, replace(FACTS[0], target="Berlin"))
    editor.guard = GUARD
    with pytest.raises(InputError, match="already makes"):
        editor.redo(first.id)
    with pytest.warns(UserWarning, match="was written before"):
        editor.redo(first.id, force=True)
    assert len(editor.ledger.active) == 2


def test_a_method_that_nobody_else_knows_is_refused():
    """An edit names its method; whoever folds the ledger later looks it up."""
    with pytest.raises(InputError, match="put it there first"):
        rewrite(open_editor(), FACTS[0], method=replace(METHODS["memit"], name="mine"))


def test_what_is_said_ends_with_the_context():
    editor = open_editor()
    most = editor.model.config.max_position_embeddings
    assert editor.say("The capital of France is", tokens=most + 50)
