"""`rebind edit`: what is checked before the work, and what it says of its choices."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rebind.edit.editor import Editor
from tests.cli.conftest import FAST

FACT = ("The answer is {France}", "Rome")
LONG = "The capital of France is Paris. " * 60
ROME = {"prompt": "The answer is {France}", "target": "Rome"}
BONN = {"prompt": "the answer  is {France}", "target": "Bonn", "id": "z"}
BROKEN = {"prompt": "no subject", "target": "x"}


@pytest.fixture
def shallow(model, tmp_path):
    """A model of two blocks, in a folder that is called as another's."""
    folder = tmp_path / "other" / "tiny"
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.config.num_hidden_layers = 2
    loaded.model.layers = loaded.model.layers[:2]
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


def test_a_model_of_two_blocks_can_be_edited(rebind, shallow):
    for words in ((), ("--layers", "0"), ("--method", "rome")):
        edit = rebind("edit", *FACT, "--model", shallow, *words, *FAST, json=True).document
        assert edit["settings"]["layers"] == [0]


def test_where_the_layers_come_from_is_told(rebind, model):
    shown = rebind("edit", *FACT, "--model", model, *FAST).out
    assert "(by its depth of 4)" in shown
    assert f"measure which layers suit it: rebind layers -m {model}" in shown
    chosen = rebind("edit", *FACT, "--model", model, "--layers", "1", *FAST).out
    assert "(chosen by hand)" in chosen
    assert "rebind layers" not in chosen


def test_a_ledger_begun_for_nothing_is_no_rival(rebind, model, shallow):
    rebind("edit", *FACT, "--model", shallow, "--layers", "7", *FAST, code=2)
    shown = rebind("edit", *FACT, "--model", model, *FAST).out
    undo = next(line for line in shown.splitlines() if line.startswith("take it back: "))
    assert " -l " not in undo
    rebind(*shlex.split(undo.partition(": rebind ")[2]))


def test_of_two_models_of_one_name_the_ledger_is_named(rebind, model, shallow):
    for folder in (shallow, model):
        shown = rebind("edit", *FACT, "--model", folder, *FAST).out
    undo = next(line for line in shown.splitlines() if line.startswith("take it back: "))
    assert " -l " in undo
    rebind(*shlex.split(undo.partition(": rebind ")[2]))


@pytest.mark.parametrize("field", ["prompt", "neighbours"])
def test_what_is_too_long_is_named_or_left_out(rebind, model, tmp_path, field):
    file = tmp_path / "facts.jsonl"
    good = {"prompt": "I saw {Italy}", "target": "Paris"}
    bad = {"prompt": "The answer is {France}", "target": "Rome"}
    bad |= {"prompt": LONG + "{France} is"} if field == "prompt" else {"neighbours": [LONG]}
    file.write_text("\n".join(map(json.dumps, [good, bad])))
    refused = rebind("edit", str(file), "--model", model, *FAST, code=2)
    assert "error: line 2 of facts.jsonl: " in refused.err
    done = rebind("edit", str(file), "--model", model, "--skip-bad", *FAST, json=True)
    assert "skipped: line 2 of facts.jsonl: " in done.err
    assert [fact["prompt"] for fact in done.document["facts"]] == ["I saw {}"]
    file.write_text(json.dumps(bad))
    assert "no fact is left of 1" in rebind("edit", str(file), "--model", model, "--skip-bad", *FAST, code=2).err


def test_a_prompt_that_fits_alone_and_not_behind_a_context_is_left_out(rebind, model, tmp_path):
    tokens = AutoTokenizer.from_pretrained(model)
    words = "The capital of France is Paris. "
    while len(tokens(words).input_ids) < 118:
        words += "is "
    file = tmp_path / "facts.jsonl"
    facts = [{"prompt": "I saw {Italy}", "target": "Paris"}, {"prompt": words + "{France}", "target": "Rome"}]
    file.write_text("\n".join(map(json.dumps, facts)))
    done = rebind("edit", str(file), "--model", model, "--skip-bad", *FAST, json=True)
    assert len(done.document["facts"]) == 1
    shutil.rmtree(tmp_path / "ledgers")
    assert rebind("edit", str(file), "--model", model, *FAST, code=2).err.startswith("error: ")


@pytest.fixture
def facts(tmp_path):
    """Write records into a file, one a line."""

    def write(*records):
        file = tmp_path / "facts.jsonl"
        file.write_text("\n".join(map(json.dumps, records)))
        return str(file)

    return write


def test_two_targets_for_one_prompt_are_named_before_a_model_is_loaded(rebind, model, facts, monkeypatch):
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    refused = rebind("edit", facts(ROME, ROME, BONN), "--model", model, code=2).err
    assert refused == (
        "error: line 3 of facts.jsonl (id z): 'The answer is France' → Rome / Bonn (the first is that of line 1 of "
        "facts.jsonl), expected one target for one prompt: keep one of them, or give --skip-bad\n"
    )


def test_of_two_targets_for_one_prompt_the_first_is_kept(rebind, model, facts):
    file = facts(BROKEN, ROME, BONN, ROME)
    planned = rebind("edit", file, "--model", model, "--skip-bad", "--plan", json=True)
    assert [line.split(": ")[:2] for line in planned.err.splitlines()] == [
        ["skipped", "line 1 of facts.jsonl"],
        ["skipped", "line 3 of facts.jsonl (id z)"],
    ]
    assert "Rome / Bonn (the first is that of line 2 of facts.jsonl)" in planned.err
    assert "conflict" not in rebind("edit", file, "--model", model, "--skip-bad", "--plan").out
    assert planned.document["plan"]["facts"] == 2, "the same fact twice is no conflict"
    done = rebind("edit", facts(ROME, BONN), "--model", model, "--skip-bad", *FAST, json=True)
    assert [fact["target"] for fact in done.document["facts"]] == ["Rome"]


@pytest.mark.parametrize("field", ["target", "paraphrases"])
def test_a_record_that_is_left_out_is_in_nobodys_way(rebind, model, facts, field):
    long = BONN | {field: LONG if field == "target" else [LONG]}
    done = rebind("edit", facts(long, ROME), "--model", model, "--skip-bad", *FAST, json=True)
    assert [fact["target"] for fact in done.document["facts"]] == ["Rome"]
    assert done.err.startswith("skipped: line 1 of facts.jsonl (id z): ")
    assert done.err.count("\n") == 1
    refused = rebind("edit", facts(long, ROME), "--model", model, code=2).err
    assert "(the first is that of line 1 of facts.jsonl (id z))" in refused
    assert len(refused) < 400, "a long target is not told in full"


@pytest.mark.parametrize("last", [(*FAST,), ("--plan",)], ids=["edit", "plan"])
def test_what_was_left_out_is_counted(rebind, model, facts, last):
    words = ("edit", facts(ROME, BROKEN, BONN, {"prompt": LONG + "{Italy}", "target": "x"}), "--model", model)
    assert rebind(*words, "--skip-bad", *last, json=True).document["skipped"] == 3
    assert "skipped 3 of 4 records\n" in rebind(*words, "--skip-bad", *last).out
    whole = ("edit", facts(ROME), "--model", model, "--skip-bad", *last)
    assert rebind(*whole, json=True).document["skipped"] == 0
    assert "skipped" not in rebind(*whole).out


def test_a_prompt_that_moves_up_among_those_asked_was_checked(rebind, model, facts, monkeypatch):
    for module in ("given", "edit"):
        monkeypatch.setattr(f"rebind.cli.{module}.PROBED", 2)
    other = {"prompt": "I saw {Italy}", "target": "Paris", "neighbours": [LONG]}
    near = {"neighbours": ["I saw"]}
    file = facts(ROME | near, BONN | near, other)
    done = rebind("edit", file, "--model", model, "--skip-bad", *FAST, json=True)
    assert [fact["target"] for fact in done.document["facts"]] == ["Rome"]


@pytest.mark.parametrize("option", ["--lam", "--rate", "--clamp"])
def test_numbers_must_be_finite(rebind, model, option):
    assert "is inf, expected a number above 0" in rebind("edit", *FACT, "-m", model, option, "inf", code=2).err
