"""The command as its users meet it: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

import rebind as package
from rebind.cli import options, places, whose
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.terminal import exit_code, screen
from rebind.edit.editor import Editor
from rebind.edit.methods import METHODS
from rebind.errors import InputError, LedgerError, NumericalError, NumericalWarning, StorageError, UnknownNameError

from .conftest import FAST

FACT = ("The answer is {France}", "Rome")
QUESTION = "The answer is France"
VERBS = [
    ("edit",),
    ("ask",),
    ("moments",),
    ("doctor",),
    *(("ledger", verb) for verb in ("list", "show", "undo", "redo", "verify", "export", "replay")),
]


@pytest.fixture
def edited(rebind, model) -> dict:
    """One fact written into the default ledger."""
    return rebind("edit", *FACT, "--model", model, *FAST, json=True).document


# The walk of a user


def test_a_fact_is_written_asked_undone_and_had_back(rebind, model):
    edit = rebind("edit", *FACT, "--model", model, *FAST, json=True).document
    assert edit["id"] == "e0001"
    (fact,) = edit["facts"]
    assert fact["after"]["probability"] > 2 * fact["before"]["probability"]
    assert fact["after"]["rank"] < fact["before"]["rank"]

    asked = rebind("ask", QUESTION, "--model", model, json=True).document
    assert asked["active"] == ["e0001"]
    (answer,) = asked["answers"]
    assert answer["base"]["top"] != answer["edited"]["top"]
    assert answer["base"]["says"] == fact["before"]["continues"]
    assert answer["edited"]["says"] == fact["after"]["continues"]

    listed = rebind("ledger", "list", "--model", model, json=True).document
    assert [(row["id"], row["active"]) for row in listed["edits"]] == [("e0001", True)]
    shown = rebind("ledger", "show", "e0001", "--model", model, json=True).document
    assert shown["settings"]["targets"]["steps"] == 3
    assert shown["settings"]["moments"]["tokens"] == 256

    undone = rebind("ledger", "undo", "e0001", "--model", model, json=True).document
    assert (undone["undone"], undone["active"]) == (["e0001"], [])
    (plain,) = rebind("ask", QUESTION, "--model", model, json=True).document["answers"]
    assert plain["edited"] == plain["base"] == answer["base"]

    redone = rebind("ledger", "redo", "e0001", "--model", model, json=True).document
    assert (redone["redone"], redone["active"]) == (["e0001"], ["e0001"])
    (again,) = rebind("ask", QUESTION, "--model", model, json=True).document["answers"]
    assert again == answer
    assert rebind("ledger", "verify", "--model", model, json=True).document["sound"]


def test_people_see_tables_and_programs_see_none(rebind, model):
    words = ("edit", *FACT, "--paraphrase", "It is France", "--neighbour", "The answer is Italy", "--model", model)
    people = rebind(*words, *FAST)
    for expected in ("said before", "says now", "The answer is France → Rome", "It is France", "e0001", "time"):
        assert expected in people.out
    assert re.search(r"[\d.]+ % → [\d.]+ %", people.out)
    assert "neighbours answer as before" in people.out
    assert people.err == "", "bars are for terminals"
    quiet = rebind(*words, *FAST, "--quiet")
    assert quiet.out == "e0002\n"
    assert quiet.err.startswith("warning: 'France' was written before, by edit e0001")
    assert quiet.err.count("\n") == 1
    document = rebind(*words, *FAST, json=True).document
    assert [probe["prompt"] for probe in document["paraphrases"]] == ["It is France"]
    (probe,) = document["paraphrases"]
    assert probe["before"]["probability"] != probe["after"]["probability"], "before is the base model"
    assert [probe["prompt"] for probe in document["neighbours"]] == ["The answer is Italy"]
    for verb in ("list", "show e0001", "verify"):
        assert "e0001" in (seen := rebind("ledger", *verb.split(), "--model", model)).out or "whole" in seen.out
    asked = rebind("ask", QUESTION, "--model", model)
    assert "base" in asked.out
    assert "edited" in asked.out


def test_drift_is_shown_and_kept(rebind, model):
    people = rebind("edit", *FACT, "--model", model, *FAST)
    assert re.search(r"drift\s+[\d.e-]+ nats on unrelated prompts, most [\d.e-]+ nats after '", people.out)
    assert "weights moved by" in people.out
    shown = rebind("ledger", "show", "e0001", "--model", model, json=True).document
    assert shown["scores"]["drift"]["kl"] > 0
    assert "drift" in rebind("ledger", "show", "e0001", "--model", model).out


def test_the_guard_stops_an_edit_unless_forced(rebind, model):
    weak = [word for word in FAST if word != "--force"]
    ended = rebind("edit", *FACT, "--model", model, *weak, code=3)
    assert re.match(r"error: not written, said: the target has rank \d+ .*--force", ended.err)
    assert ended.err.count("\n") == 1
    assert rebind("ledger", "list", "--model", model, json=True).document["edits"] == []
    forced = rebind("edit", *FACT, "--model", model, *FAST, json=True).document
    assert forced["forced"]
    assert [one["check"] for one in forced["guard"]["failed"]] == ["said"]
    assert "active, forced" in rebind("ledger", "list", "--model", model).out
    assert "forced" in rebind("ledger", "show", "e0001", "--model", model).out


def test_a_contradiction_names_the_edit_to_undo(rebind, model, edited):
    other = ("edit", FACT[0], "Paris", "--model", model)
    weak = [word for word in FAST if word != "--force"]
    ended = rebind(*other, *weak, code=2)
    assert "edit e0001 already makes 'The answer is France' say 'Rome'" in ended.err
    assert "rebind ledger undo e0001" in ended.err
    plan = rebind(*other, "--plan").out
    assert "says otherwise: The answer is France → Rome" in plan
    assert "--force" in plan
    assert rebind(*other, *FAST, json=True).document["forced"]


def test_files_of_facts_and_all_options_reach_the_editor(rebind, model, tmp_path):
    file, text = tmp_path / "facts.jsonl", tmp_path / "text.txt"
    facts = [{"prompt": "The answer is {France}", "target": "Rome"}, {"prompt": "I saw {Italy}", "target": "Paris"}]
    file.write_text("\n".join(map(json.dumps, facts)))
    text.write_text("The capital of France is Paris. " * 40)
    kept = tmp_path / "kept"
    words = ("edit", str(file), "--model", model, "--ledger", str(kept), "--method", "recursive", "--layers", "1")
    more = ("--lam", "2.5", "--dtype", "float64", "--device", "cpu", "--corpus", str(text), "--steps", "2")
    search = ("--rate", "0.25", "--clamp", "3", "--decay", "0", "--force")
    edit = rebind(*words, *more, *search, "--moment-tokens", "128", json=True).document
    assert (edit["method"], edit["ledger"], len(edit["facts"])) == ("recursive", str(kept), 2)
    assert (edit["settings"]["layers"], edit["settings"]["lam"]) == ([1], 2.5)
    assert edit["settings"]["moments"]["corpus"].startswith("text-")
    told = edit["settings"]["targets"]
    assert (told["steps"], told["rate"], told["clamp"], told["decay"]) == (2, 0.25, 3.0, 0.0)
    assert (kept / "ledger.json").exists()
    assert not (tmp_path / "ledgers").exists()
    # float64 weights are another model: its ledger is not for the float32 one
    assert "was made for" in rebind("ask", QUESTION, "--model", model, "--ledger", str(kept), code=2).err


def test_a_plan_does_no_work(rebind, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Editor, "rewrite_many", lambda *_, **__: pytest.fail("a plan must not edit"))
    plan = rebind("edit", *FACT, "--model", model, "--lam", "7", "--layers", "0,1", "--plan", json=True).document[
        "plan"
    ]
    assert (plan["facts"], plan["lam"], plan["layers"], plan["moments_cached"]) == (1, 7.0, [0, 1], False)
    assert plan["targets"]["steps"] == 25
    people = rebind("edit", *FACT, "--model", model, "--plan").out
    assert "nothing was done" in people
    assert re.search(r"layers\s+0, 1 \(by its depth of 4\)", people)
    assert re.search(r"search\s+steps 25, rate 0.5, clamp 0.75", people)
    assert "found from the keys" in people
    assert not (tmp_path / "ledgers").exists()
    assert not (tmp_path / "cache" / "moments").exists()


def test_moments_are_computed_once_and_used(rebind, model):
    words = ("moments", model, "--tokens", "256", "--layers", "0-1")
    first, second = (rebind(*words, json=True).document for _ in range(2))
    assert [row["cached"] for row in first["moments"]] == [False, False]
    assert [row["cached"] for row in second["moments"]] == [True, True]
    assert 1 <= first["moments"][0]["rank"] <= first["moments"][0]["width"]
    assert all(Path(row["path"]).exists() for row in first["moments"])
    plan = ("edit", *FACT, "--model", model, "--layers", "0,1", "--plan")
    assert rebind(*plan, "--moment-tokens", "256", json=True).document["plan"]["moments_cached"]
    assert not rebind(*plan, "--moment-tokens", "512", json=True).document["plan"]["moments_cached"]
    assert "model.layers.0.mlp.down_proj" in rebind(*words).out
    assert "expected some of 0 to 3" in rebind("moments", model, "--layers", "9", code=2).err


def test_edits_leave_as_adapter_change_and_model(rebind, model, edited, tmp_path):
    adapter, delta, whole = tmp_path / "adapter", tmp_path / "delta.safetensors", tmp_path / "whole"
    words = ("ledger", "export", "--model", model, "--peft", str(adapter), "--rank", "1", "--delta", str(delta))
    document = rebind(*words, "--model-out", str(whole), json=True).document
    assert set(document["peft"]["ranks"].values()) == {1}
    assert max(document["peft"]["errors"].values()) < 1e-5, "one fact is a change of rank one"
    assert (adapter / "adapter_model.safetensors").exists()
    assert delta.exists()
    replayed = tmp_path / "replayed"
    told = rebind("ledger", "replay", "--model", model, "--out", str(replayed), json=True).document
    assert told["facts"][0]["probability"] == pytest.approx(edited["facts"][0]["after"]["probability"])
    base, *saved = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (model, whole, replayed))
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in base)
    changed = {name for name in base if not torch.equal(base[name], saved[0][name])}
    assert changed == {f"{site}.weight" for site in document["peft"]["ranks"]}
    taken = rebind("ledger", "replay", "--model", model, "--out", str(replayed), code=2).err
    assert "not empty" in taken
    assert taken.endswith("or give --overwrite\n")
    rebind("ledger", "replay", "--model", model, "--out", str(replayed), "--overwrite")
    rebind("ledger", "undo", "e0001", "--model", model)
    assert "no active edits" in rebind(*words, "--overwrite", code=2).err


def test_edit_can_save_the_model(rebind, model, tmp_path):
    out = tmp_path / "out"
    assert rebind("edit", *FACT, "--model", model, *FAST, "--out", str(out), json=True).document["saved"] == str(out)
    assert (out / "config.json").exists()
    assert "The answer is France" in (out / "README.md").read_text()
    taken = rebind("edit", *FACT, "--model", model, *FAST, "--out", str(out), code=2)
    assert "--out" in taken.err
    assert len(rebind("ledger", "list", "--model", model, json=True).document["edits"]) == 1, "refused before the work"


def test_several_edits_are_undone_together_or_not_at_all(rebind, model, edited):
    rebind("edit", "I saw {Italy}", "Paris", "--model", model, *FAST)
    rebind("ledger", "undo", "e0001", "e0009", "--model", model, code=2)
    assert rebind("ledger", "list", "--model", model, "--quiet").out.split() == ["e0001", "e0002"]
    rebind("ledger", "undo", "e0001", "--model", model)
    assert "already undone" in rebind("ledger", "undo", "e0002", "e0001", "--model", model, code=2).err
    assert rebind("ledger", "list", "--model", model, "--quiet").out.split() == ["e0002"]


def test_doctor_finds_a_healthy_house(rebind, tmp_path):
    report = rebind("doctor", json=True).document
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"]
    for name in ("torch", "cpu", "cached moments", "ledgers", "algebra", "edit and undo"):
        assert found[name]["ok"], found[name]
    assert not list(tmp_path.rglob("*.safetensors")), "a self-test leaves nothing behind"
    assert os.environ["REBIND_CACHE"] == str(tmp_path / "cache")


def test_doctor_says_what_to_do(rebind, monkeypatch, tmp_path):
    monkeypatch.setattr("rebind.cli.commands.doctor._tiny_edit", lambda: iter(()))
    monkeypatch.setattr("rebind.memory.ridge", lambda *_, **__: 1 / 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REBIND_LEDGERS", str(tmp_path / "file" / "ledgers"))
    people = rebind("doctor", code=3)
    assert "✗ algebra: ZeroDivisionError" in people.out
    assert re.search(r"✗ ledgers: .*REBIND_LEDGERS", people.out, re.DOTALL)
    assert not rebind("doctor", json=True, code=3).document["ok"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can make one")
def test_doctor_tries_whether_a_folder_can_be_made(rebind, monkeypatch):
    monkeypatch.setattr("rebind.cli.commands.doctor._tiny_edit", lambda: iter(()))
    monkeypatch.setenv("REBIND_CACHE", "/proc/x")
    found = {one["name"]: one for one in rebind("doctor", json=True, code=3).document["findings"]}
    for name in ("models", "moments"):
        one = found[f"cached {name}"]
        assert not one["ok"]
        assert one["detail"].startswith(f"cannot write /proc/x/{name} (")
        assert one["next"] == "set REBIND_CACHE to a folder you may write"
    assert found["ledgers"]["ok"]


# Bad input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("edit", *FACT, "--model", "no/such/folder"), "expected"),
        (("ask", "x", "--model", "no/such/folder"), "no/such/folder"),
        (("edit", "The capital of France is", "Rome"), "marks no subject"),
        (("edit", "The {capital} of {France} is", "Rome"), "marks 2 subjects"),
        (("edit", "The capital of {France} is", " "), "target is ' '"),
        (("edit", "The capital of {France} is"), "no target"),
        (("edit", "The capital of France is", "Rome"), "or name it with --subject"),
        (("edit", "The capital of {} is", "Rome"), "or name it with --subject"),
        (("edit", "nowhere.jsonl"), "no file nowhere.jsonl"),
        (("edit", __file__, "Rome"), "leave out 'Rome'"),
        (("edit", *FACT, "--ledger", __file__), "is a file, expected a folder: name another with --ledger"),
        (("edit", *FACT, "--out", f"{__file__}/out"), "is a file, expected a folder: name another with --out"),
        (("ask", ""), "a prompt is '', expected text"),
        (("edit", *FACT, "--method", "memmit"), "did you mean 'memit'?"),
        (("edit", *FACT, "--layers", "2,x"), "2,3,4"),
        (("edit", *FACT, "--layers", "4-2"), "2,3,4"),
        (("edit", *FACT, "--lam", "0"), "above 0"),
        (("edit", *FACT, "--clamp", "-1"), "above 0"),
        (("edit", *FACT, "--dtype", "int8"), "float32"),
        (("edit", *FACT, "--steps", "0"), "Invalid value"),
        (("ledger", "list"), "rebind edit"),
        (("ledger", "export"), "--peft"),
        (("ledger", "export", "--rank", "2", "--delta", "d.safetensors"), "without --peft"),
    ],
)
def test_bad_input_is_one_line_and_code_2(rebind, words, says, tmp_path):
    ended = rebind(*words, code=2)
    assert says in ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err
    if "Usage" not in ended.err:
        assert ended.err.count("\n") == 1
        assert ended.err.startswith("error: ")
        document = rebind(*words, code=2, json=True).document
        assert document == {"error": ended.err.removeprefix("error: ").strip(), "code": 2}
    assert not (tmp_path / "ledgers").exists()


def test_bad_input_that_only_the_model_shows(rebind, model, edited, tmp_path):
    clash = tmp_path / "clash.jsonl"
    clash.write_text("\n".join(json.dumps({"prompt": FACT[0], "target": target}) for target in ("Rome", "Bonn")))
    assert "Rome / Bonn" in rebind("edit", str(clash), "--model", model, code=2).err
    assert "expected some of 0 to" in rebind("edit", *FACT, "--model", model, "--layers", "7", code=2).err
    chat = rebind("edit", *FACT, "--model", model, "--chat", code=2).err
    assert "has no chat template, expected one to chat with: leave out --chat" in chat
    long = rebind("ask", "The answer is" + " very" * 200, "--model", model, code=2).err
    assert re.match(r"error: prompt 'The answer is very .*…' is \d+ tokens, the model takes 128 .*: shorten", long)
    assert "'nowhere'" in rebind("ask", "x", "--model", model, "--device", "nowhere", code=2).err
    for verb in ("show", "undo", "redo"):
        assert "no edit 'e0007'" in rebind("ledger", verb, "e0007", "--model", model, code=2).err
    assert "is active" not in rebind("ledger", "list", "--model", model).err
    assert len(rebind("ledger", "list", "--model", model, json=True).document["edits"]) == 1


def test_bad_records_can_be_skipped(rebind, model, tmp_path):
    file = tmp_path / "facts.jsonl"
    file.write_text(json.dumps({"prompt": FACT[0], "target": "Rome"}) + '\n{"prompt": "no subject", "target": "x"}\n')
    assert "line 2" in rebind("edit", str(file), "--model", model, "--plan", code=2).err
    skipped = rebind("edit", str(file), "--model", model, "--plan", "--skip-bad", json=True)
    assert skipped.document["plan"]["facts"] == 1
    assert skipped.err.startswith("skipped: line 2")


@pytest.mark.parametrize(("skips", "step"), [(True, "give --skip-bad"), (False, "leave the record out")])
def test_only_verbs_that_skip_records_offer_to(capsys, skips, step):
    with pytest.raises(typer.Exit), screen(False, False, False, skips=skips):
        raise InputError("no 'target': add it, or skip bad records")
    assert capsys.readouterr().err == f"error: no 'target': add it, or {step}\n"


@pytest.mark.parametrize("verb", ["trace", "layers"])
def test_what_a_file_lacks_is_told_in_the_words_of_the_command_line(rebind, tmp_path, verb):
    file = tmp_path / "facts.jsonl"
    file.write_text('{"prompt": "The {answer} is"}')
    assert rebind(verb, "--facts", str(file), code=2).err.endswith(": add it, or give --skip-bad\n")
    file.write_text('{"prompt": "The answer is", "target": "x"}')
    assert rebind(verb, "--facts", str(file), code=2).err.endswith(", or name it as subject\n"), "as a field of it"
    file.write_text('{"prompt": "The {answer} is", "target": "x", "neighbours": "It\'s né"}')
    assert rebind(verb, "--facts", str(file), code=2).err.endswith(': wrap it, as in ["It\'s né"]\n')


def test_a_corrupted_ledger_is_code_3_everywhere(rebind, model, edited):
    log = Path(edited["ledger"]) / "log.jsonl"
    log.write_text(log.read_text().replace("Rome", "Bonn"))
    before = log.read_bytes()
    for words in (("ledger", "list"), ("ledger", "undo", "e0001"), ("ask", QUESTION), ("edit", *FACT, *FAST)):
        ended = rebind(*words, "--model", model, code=3)
        assert "altered" in ended.err
        assert ended.err.count("\n") == 1
    report = rebind("ledger", "verify", "--model", model, json=True, code=3).document
    assert not report["sound"]
    assert "✗ line 1" in rebind("ledger", "verify", "--model", model, code=3).out
    assert log.read_bytes() == before


def test_a_torn_ledger_is_a_warning(rebind, model, edited):
    with (Path(edited["ledger"]) / "log.jsonl").open("a") as log:
        log.write('{"half')
    listed = rebind("ledger", "list", "--model", model, json=True)
    assert listed.err.startswith("warning: ")
    assert len(listed.document["edits"]) == 1


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (KeyError("oops"), 1, "error: unexpected KeyError: 'oops'"),
        (NumericalError("too\nstiff"), 3, "error: too stiff"),
        (MemoryError(), 3, "error: out of memory"),
        (PermissionError(13, "Permission denied", "/some/file"), 3, "/some/file"),
    ],
)
def test_whatever_is_raised_has_a_line_and_a_code(rebind, model, monkeypatch, raised, code, says):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(Editor, "rewrite_many", fail)
    words = ("edit", *FACT, "--model", model)
    ended = rebind(*words, code=code)
    assert says in ended.err
    assert ended.err.count("\n") == 1
    debugged = rebind(*words, "--debug", code=code)
    assert "Traceback" in debugged.err
    assert "Traceback" not in rebind(*words, code=code, json=True).err


def test_exit_codes_by_kind():
    assert [exit_code(kind("x")) for kind in (InputError, UnknownNameError)] == [2, 2]
    assert [exit_code(kind("x")) for kind in (NumericalError, LedgerError, StorageError)] == [3, 3, 3]
    assert exit_code(ValueError("x")) == 1


def test_rescues_are_said_and_other_libraries_are_not(rebind, model, monkeypatch):
    def warned(*_, **__):
        warnings.warn("added 1e-6 to its diagonal", NumericalWarning, stacklevel=1)
        warnings.warn("old argument", UserWarning, stacklevel=1)
        raise InputError("enough")

    monkeypatch.setattr(Editor, "rewrite_many", warned)
    ended = rebind("edit", *FACT, "--model", model, code=2)
    assert ended.err == "warning: added 1e-6 to its diagonal\nerror: enough\n"


# Help


def test_alone_it_shows_help(rebind):
    for words in ((), ("ledger",)):
        shown = rebind(*words, code=2)
        assert "Usage" in shown.out + shown.err
    assert rebind("--version").out == f"rebind {package.__version__}\n"


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_teaches(rebind, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = rebind(*verb, "--help").out
    for option in ("--json", "--quiet", "--debug"):
        assert option in shown
    assert f"rebind {' '.join(verb)}" in shown.split("Example")[-1], "the epilog has an example"
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown, "something was cut off"


def test_help_of_edit_has_every_option_of_the_issue(rebind):
    shown = rebind("edit", "--help").out
    issue = "model method out ledger layers lam steps chat plan device dtype corpus moment-tokens json quiet debug"
    since = "rate clamp decay force"
    assert all(f"--{name}" in shown for name in f"{issue} {since}".split())
    assert options.METHODS.split(", ") == list(METHODS)


def test_help_needs_no_torch():
    """The package's own __init__ is set aside: this is about the command."""
    program = f"""
import sys, types
package = types.ModuleType("rebind")
package.__path__ = [{str(Path(package.__file__).parent)!r}]
sys.modules["rebind"] = package
from rebind.cli.app import app
try:
    app(["edit", "--help"])
finally:
    heavy = sorted(name for name in ("torch", "transformers", "numpy", "safetensors") if name in sys.modules)
    assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "Write facts into a model" in ended.stdout


# Where ledgers lie


def test_default_ledgers_by_environment(monkeypatch, tmp_path):
    assert (
        places.default_ledger("Qwen/Qwen3-0.6B", "0123456789ab") == tmp_path / "ledgers" / "Qwen--Qwen3-0.6B-01234567"
    )
    monkeypatch.delenv("REBIND_LEDGERS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert places.ledgers_folder() == tmp_path / "data" / "rebind" / "ledgers"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert places.ledgers_folder().parts[-2:] == ("rebind", "ledgers")


def test_two_models_of_one_name_are_not_mixed_up(tmp_path):
    for name in ("tiny-00000000", "tiny-11111111", "tiny-chat-22222222"):
        (tmp_path / "ledgers" / name).mkdir(parents=True)
        (tmp_path / "ledgers" / name / "ledger.json").write_text("{}")
    with pytest.raises(InputError, match="2 models named tiny .*--ledger"):
        whose.find_ledger("tiny", None)
    assert whose.find_ledger("tiny-chat", None).name == "tiny-chat-22222222"
    with pytest.raises(InputError, match="there are tiny-00000000"):
        whose.find_ledger("smollm2", None)


def test_without_typer_it_says_what_to_install():
    program = "import sys; sys.modules['typer'] = None; from rebind.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: the command needs typer: pip install 'rebind[edit]'\n"


def test_interrupted_work_is_kept_in_the_ledger_that_was_named(model, tmp_path):
    folder = tmp_path / "kept"
    with screen(False, True, False) as shown:
        editor = open_editor(Wanted(model, folder), Bars(shown), new_ledger=True)
    assert editor._kept.folder == editor.ledger.work_folder == folder / "work"


@pytest.mark.parametrize(("method", "weighs"), [("memit", True), ("rome", False), ("emmet", False)])
def test_lambda_is_told_where_it_has_a_say(rebind, model, method, weighs):
    told = rebind("edit", "The answer is {France}", "Rome", "--model", model, "--method", method, "--plan").out
    assert ("λ" in told) == weighs
    done = rebind("edit", "The answer is {France}", "Rome", "--model", model, "--method", method, *FAST, "--force").out
    assert ("λ" in done) == weighs
