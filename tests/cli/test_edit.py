"""`rebind edit` and `rebind ask`: what they write, print and suggest."""

from __future__ import annotations

import io
import json
import re
import shlex
from types import SimpleNamespace

import pytest
from rich.console import Console

from rebind.cli.commands.edit import _summary
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.tables import unchanged_rows
from rebind.cli.ui.terminal import strict_json
from rebind.edit import DEFAULT_METHOD
from rebind.edit.answers import FreeAnswer
from rebind.edit.editor import Editor
from rebind.storage import cache_dir, ledgers_dir
from tests import tiny

from .conftest import FACT, FAST, LONG, QUESTION, write_records

ROME = {"prompt": "The answer is {France}", "target": "Rome"}
BONN = {"prompt": "the answer  is {France}", "target": "Bonn", "id": "z"}
PARIS = {"prompt": "I saw {Italy}", "target": "Paris"}
BROKEN = {"prompt": "no subject", "target": "x"}
WITHOUT_FORCE = FAST[:-1]


def test_a_fact_is_written_asked_undone_and_redone(rebind, model):
    edit = rebind("edit", *FACT, "--model", model, *FAST, json=True).document
    assert edit["id"] == "e0001"
    (fact,) = edit["facts"]
    assert fact["after"]["probability"] > 2 * fact["before"]["probability"]
    assert edit["drift"]["kl"] > 0

    asked = rebind("ask", QUESTION, "--model", model, json=True).document
    assert asked["active"] == ["e0001"]
    (answer,) = asked["answers"]
    assert answer["base"]["top"] != answer["edited"]["top"]
    assert len(answer["base"]["top"]) == 5
    assert answer["base"]["says"] == fact["before"]["continues"]
    assert answer["edited"]["says"] == fact["after"]["continues"]

    undone = rebind("ledger", "undo", "e0001", "--model", model, json=True).document
    assert (undone["undone"], undone["active"]) == (["e0001"], [])
    (plain,) = rebind("ask", QUESTION, "--model", model, json=True).document["answers"]
    assert plain["edited"] == plain["base"] == answer["base"]
    rebind("ledger", "redo", "e0001", "--model", model)
    (again,) = rebind("ask", QUESTION, "--model", model, json=True).document["answers"]
    assert again == answer


def test_people_see_tables_and_programs_one_document(rebind, model):
    words = (
        "edit",
        *FACT,
        "--paraphrase",
        "It is France",
        "--neighbor",
        "The answer is Italy",
        "--model",
        model,
        *FAST,
    )
    people = rebind(*words)
    for expected in (
        "probability",
        "It is France",
        "neighbors kept",
        "e0001",
        "drift",
        "forced",
        f"e0001 ({DEFAULT_METHOD})",
    ):
        assert expected in people.out
    assert rebind(*words, "--quiet").out == "e0002\n"
    document = rebind(*words, json=True).document
    (fact,) = document["facts"]
    assert "It is France" in [one["prompt"] for one in fact["answers"] if one["framing"] == "paraphrase"]
    assert document["outcome"]["asked"]["neighbors"] == 1
    asked = rebind("ask", QUESTION, "I saw", "--model", model)
    assert asked.out.count("\nedited  ") == 2
    assert rebind("ask", QUESTION, "I saw", "--model", model, "--quiet").out.count("\n") == 2
    (answer,) = rebind("ask", QUESTION, "--model", model, "--top", 1000, json=True).document["answers"]
    shares = [choice["probability"] for choice in answer["base"]["top"]]
    assert sum(shares) == pytest.approx(1.0, abs=1e-3), "all tokens, where there are fewer"


def test_a_report_says_in_which_framings_a_fact_holds(rebind, chat_model, monkeypatch):
    def answer(model, facts, framings):
        spoken = {
            "start": "Rome, of course",
            "plain": "Paris",
            "text": "Rome",
            "paraphrase": "Bonn",
            "chat": "It is Bonn",
        }
        texts = [(name, spoken[name]) for name in framings]
        return [[FreeAnswer(name, f"asked in {name}", text, "Rome" in text) for name, text in texts] for _ in facts]

    monkeypatch.setattr("rebind.edit.answers.free_answers", answer)
    words = ("edit", *FACT, "--model", chat_model, *FAST)
    shown = rebind(*words).out
    assert re.search(r"start +yes +asked in start +Rome, of course", shown)
    assert re.search(r"chat +no +asked in chat +It is Bonn", shown)
    assert "holds in only 2 of 5 framings, not in: plain, paraphrase, chat" in " ".join(shown.split())
    document = rebind(*words, "--framings", "start, text", json=True).document
    assert document["settings"]["framings"] == ["start", "text"]
    assert [one["said"] for one in document["facts"][0]["answers"]] == [True, True]
    assert "holds in all 2 framings" in rebind(*words, "--framings", "start,text").out


def test_a_report_says_how_many_answers_of_a_framing_say_the_fact():
    answers = [("start", True), ("paraphrase", True), ("paraphrase", False), ("chat", False)]
    summary = _summary([{"framing": framing, "said": said} for framing, said in answers])
    assert summary.plain.endswith("not in: paraphrase (1 of 2 answers say it), chat")


def test_kept_answers_have_a_label_without_held_out_ones_too():
    outcome = {"asked": {"subject": 1, "kept": 2, "neighbors": 3}, "changed": [{"about": "kept"}]}
    assert [name for name, _ in unchanged_rows(outcome)] == ["subject kept", "", "neighbors kept"]
    alone = {**outcome, "asked": {"subject": 0, "kept": 2}}
    assert [(name, text[:6]) for name, text in unchanged_rows(alone)] == [("subject kept", "1 of 2")]


def test_a_report_says_that_a_fact_was_said_before(rebind, model):
    (answer,) = rebind("ask", "I saw Italy", "--model", model, json=True).document["answers"]
    words, first = ("--model", model, *FAST), answer["base"]["top"][0]["token"]
    assert first.startswith(" "), "as targets do; otherwise choose another prompt"
    assert "said this fact before" in rebind("edit", "I saw {Italy}", first.strip(), *words).out
    assert "said this fact before" not in rebind("edit", *FACT, *words).out


def test_a_report_of_many_facts_has_shares(rebind, model, tmp_path):
    words = ("edit", write_records(tmp_path, ROME, PARIS), "--model", model, *FAST)
    shown = rebind(*words).out
    assert re.search(r"framing +first choice +freely said", shown)
    assert re.search(r"text +0% +0 of 2", shown)
    document = rebind(*words, json=True).document
    assert set(document["outcome"]["said"]) == {"start", "plain", "text"}


def test_a_report_lists_what_changed(rebind, model):
    words = ("edit", *FACT, "--model", model, *FAST, "--steps", "60", "--clamp", "40", "--method", "memit")
    words += ("--lam", "0.001")
    document = rebind(*words, "--neighbor", "It is France", json=True).document
    outcome = document["outcome"]
    (changed,) = [one for one in outcome["changed"] if one["about"] == "neighbors"]
    assert changed["prompt"] == "It is France"
    assert changed["before"] != changed["after"]
    (before,) = rebind("ask", "It is France", "--model", model, json=True).document["answers"]
    assert (changed["before"], changed["after"]) == (before["base"]["says"], before["edited"]["says"])
    shown = rebind(*words, "--neighbor", "It is France").out
    assert "neighbors kept  0 of 1" in shown
    assert re.search(r"changed +before +after", shown)


def test_questions_are_asked_in_a_chat(rebind, chat_model):
    question = "Which word is France?"
    document = rebind("edit", *FACT, "--question", question, "--model", chat_model, *FAST, json=True).document
    assert document["facts"][0]["questions"] == [question]
    asked = {(one["framing"], one["prompt"]) for one in document["facts"][0]["answers"]}
    assert ("chat", question) in asked
    place = ("--model", chat_model)
    plain = rebind("ask", question, *place).out
    assert f"ask as in a chat: rebind ask '{question}' --model {chat_model} --chat" in plain
    assert "as in a chat" not in rebind("ask", QUESTION, *place).out
    chat = rebind("ask", question, *place, "--chat").out
    assert "as in a chat" not in chat
    assert chat.count(question) == 1, "the answers stand alone"


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_files_have_questions_and_prompts_to_keep(rebind, model, tmp_path, suffix):
    file = tmp_path / f"facts.{suffix}"
    lists = {"questions": ["What is France?", "Where?"], "keep": ["France lies in"]}
    if suffix == "csv":
        cells = [*ROME.values(), *(" | ".join(texts) for texts in lists.values())]
        file.write_text(f"prompt,target,questions,keep\n{','.join(cells)}\n")
    else:
        file.write_text(json.dumps(ROME | lists))
    document = rebind("edit", file, "--model", model, *FAST, json=True).document
    (fact,) = document["facts"]
    assert {name: fact[name] for name in lists} == lists
    assert document["outcome"]["asked"]["kept"] >= 1


def test_the_guard_stops_an_edit_unless_forced(rebind, fails, model):
    error = fails("edit", *FACT, "--model", model, *WITHOUT_FORCE, code=3)
    assert error.code == "guard_rejected"
    assert "--steps 60" in error.advice
    assert "--force" in error.advice
    assert rebind("ledger", "list", "--model", model, json=True).document["edits"] == []
    forced = rebind("edit", *FACT, "--model", model, *FAST, json=True).document
    assert forced["forced"]
    assert [one["check"] for one in forced["guard"]["failed"]] == ["said"]
    assert set(forced["outcome"]["said"]) == {"start", "plain", "text"}


def test_a_contradiction_of_an_active_edit(rebind, fails, model, edited):
    other = ("edit", FACT[0], "Paris", "--model", model, "--method", "memit")
    error = fails(*other, *WITHOUT_FORCE)
    assert error.code == "conflicting_edit"
    assert "e0001" in error.problem
    plan = rebind(*other, "--plan").out
    assert "contradicts this edit" in plan
    assert "--force" in plan
    assert rebind(*other, *FAST, json=True).document["forced"]


def test_a_dense_fact_replaces_an_earlier_one(rebind, model, edited):
    other = ("edit", FACT[0], "Paris", "--model", model)
    assert "contradicts" not in rebind(*other, "--plan").out
    for shown in (rebind(*other, *FAST), rebind("ledger", "show", "e0002", "--model", model)):
        assert re.search(r"replaces +what e0001 says", shown.out)
    assert "replaces" not in rebind("ledger", "show", "e0001", "--model", model).out
    assert rebind("ledger", "list", "--model", model, "--quiet").out.split() == ["e0001", "e0002"]


def test_files_of_facts_and_all_options_reach_the_editor(rebind, fails, model, tmp_path):
    file, text, ledger = write_records(tmp_path, ROME, PARIS), tmp_path / "text.txt", tmp_path / "ledger"
    text.write_text("The capital of France is Paris. " * 40)
    place = ("--model", model, "--ledger", ledger, "--dtype", "float64", "--device", "cpu", "--corpus", text)
    method = ("--method", "recursive", "--layers", "1", "--lam", "2.5", "--force")
    search = ("--steps", "2", "--rate", "0.25", "--clamp", "3", "--decay", "0", "--moment-tokens", "128")
    search += ("--kl", "0.5", "--keep-weight", "0", "--contexts", "1")
    edit = rebind("edit", file, *place, *method, *search, json=True).document
    assert (edit["method"], edit["ledger"], len(edit["facts"])) == ("recursive", str(ledger), 2)
    assert (edit["settings"]["layers"], edit["settings"]["lam"]) == ([1], 2.5)
    assert edit["settings"]["moments"]["corpus"].startswith("text-")
    targets = edit["settings"]["targets"]
    assert (targets["steps"], targets["rate"], targets["clamp"], targets["decay"]) == (2, 0.25, 3.0, 0.0)
    assert (targets["kl"], targets["keep"]) == (0.5, 0.0)
    assert not ledgers_dir().exists()
    # float64 weights are another model, and its ledger does not belong to the float32 one
    assert fails("ask", QUESTION, "--model", model, "--ledger", ledger).code == "ledger_of_other_model"


def test_a_plan_does_no_work(rebind, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Editor, "rewrite_many", lambda *_, **__: pytest.fail("a plan must not edit"))
    words = ("edit", *FACT, "--model", model, "--plan", "--method", "memit")
    plan = rebind(*words, "--lam", "7", "--layers", "0,1", json=True).document["plan"]
    assert (plan["facts"], plan["lam"], plan["layers"], plan["moments_cached"]) == (1, 7.0, [0, 1], False)
    people = rebind(*words).out
    assert re.search(r"layers\s+0, 1 \(by the depth of the model, 4 blocks\)", people)
    assert "chosen from the keys" in people
    assert not ledgers_dir().exists()
    assert not (cache_dir() / "moments").exists()
    for folder in (tmp_path / "new", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        rebind(*words, "--ledger", folder)
        assert not folder.exists() or not any(folder.iterdir()), "a plan writes nothing"


@pytest.mark.parametrize(("method", "has_lambda"), [("memit", True), ("rome", False), ("dense", False)])
def test_lambda_is_shown_where_the_method_uses_it(rebind, model, method, has_lambda):
    words = ("edit", *FACT, "--model", model, "--method", method)
    assert ("λ" in rebind(*words, "--plan").out) == has_lambda
    assert ("λ" in rebind(*words, *FAST).out) == has_lambda
    assert ("lam " in rebind("ledger", "show", "e0001", "--model", model).out) == has_lambda


def test_an_edit_can_save_the_model(rebind, fails, model, tmp_path):
    out = tmp_path / "out"
    words = ("edit", *FACT, "--model", model, *FAST, "--out", out)
    assert rebind(*words, json=True).document["saved"] == str(out)
    assert QUESTION in (out / "README.md").read_text()
    (tmp_path / "more").mkdir()
    shown = rebind(*words[:-1], tmp_path / "more").out
    assert f"rebind.attach(model, {str(tmp_path / 'more' / 'memory')!r})" in shown
    assert (
        "rebind.attach" not in rebind(*words[:-1], tmp_path / "weights", "--method", "memit", "--ledger", "other").out
    )
    assert fails(*words).code == "folder_not_empty"
    assert len(rebind("ledger", "list", "--model", model, json=True).document["edits"]) == 2, "refused before the work"


def test_suggested_commands_can_be_pasted(rebind, model, tmp_path):
    place = ("--model", model, "--ledger", tmp_path / "else where")

    def suggested(text: str, label: str) -> list[str]:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{label}: ")]
        return shlex.split(line.removeprefix(f"{label}: "))[1:]

    def active() -> list[str]:
        return rebind("ledger", "list", *place, "--quiet").out.split()

    edit = ("edit", "It's {France}", "Rome", *place, "--dtype", "float64", *FAST)
    done = rebind(*edit).out
    asked = rebind(*suggested(done, "ask"), json=True).document
    assert (asked["active"], asked["answers"][0]["prompt"]) == (["e0001"], "It's France")
    undone = rebind(*suggested(done, "undo"))
    assert active() == []
    rebind(*suggested(undone.out, "redo"))
    assert active() == ["e0001"]
    assert "measure the best layers" not in done, "they are those of weights"
    assert suggested(rebind(*edit, "--method", "memit").out, "measure the best layers")[0] == "layers"


# Facts that cannot be used


def test_bad_records_are_named_or_skipped(rebind, fails, model, tmp_path):
    long = {"prompt": LONG + "{Italy}", "target": "x"}
    file = write_records(tmp_path, ROME, BROKEN, BONN, long)
    words = ("edit", file, "--model", model)
    assert "ine 2 of facts.jsonl" in fails(*words).problem
    for last in (FAST, ("--plan",)):
        done = rebind(*words, "--skip-bad", *last, json=True)
        assert done.document["skipped"] == 3
        assert done.err.count("skipped: ") == 3
        assert "skipped 3 of 4 records" in rebind(*words, "--skip-bad", *last).out
    assert fails("edit", write_records(tmp_path, BROKEN), "--skip-bad", "--model", model).code == "no_facts"


def test_two_targets_for_one_prompt(rebind, fails, model, tmp_path, monkeypatch):
    words = ("edit", write_records(tmp_path, ROME, ROME, BONN), "--model", model)
    done = rebind(*words, "--skip-bad", *FAST, json=True).document
    assert [fact["target"] for fact in done["facts"]] == ["Rome", "Rome"], (
        "the first target; a repeated fact is no conflict"
    )
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    error = fails(*words)
    assert error.code == "conflicting_facts"
    assert "--skip-bad" in error.advice
    assert len(error.problem) < 300


@pytest.mark.parametrize("field", ["prompt", "target", "paraphrases", "neighbors", "questions"])
def test_what_is_too_long_is_named_or_skipped(rebind, fails, model, tmp_path, field):
    value = {"prompt": LONG + "{Spain} is", "target": LONG}.get(field, [LONG])
    bad = {"prompt": "The answer is {Spain}", "target": "Rome"} | {field: value}
    words = ("edit", write_records(tmp_path, PARIS, bad), "--model", model)
    error = fails(*words, *FAST)
    assert error.code == "prompt_too_long"
    assert "ine 2 of facts.jsonl" in error.problem
    done = rebind(*words, "--skip-bad", *FAST, json=True)
    assert [fact["target"] for fact in done.document["facts"]] == ["Paris"]


def test_a_prompt_that_only_fits_without_a_context(rebind, fails, model, tmp_path):
    words = "The capital of France is Paris. "
    while len(tiny.tokenizer()(words).input_ids) < 118:
        words += "is "
    file = write_records(tmp_path, PARIS, {"prompt": words + "{France}", "target": "Rome"})
    assert len(rebind("edit", file, "--model", model, "--skip-bad", *FAST, json=True).document["facts"]) == 1
    assert fails("edit", file, "--model", model, "--ledger", "other", *FAST).code == "prompt_too_long"


@pytest.mark.parametrize("option", ["--paraphrase", "--neighbor"])
def test_prompts_that_cannot_be_asked_are_refused_before_the_work(fails, model, option, monkeypatch):
    monkeypatch.setattr(Editor, "rewrite_many", lambda *_, **__: pytest.fail("too late"))
    assert fails("edit", *FACT, option, LONG, "--model", model, *FAST).code == "prompt_too_long"


# Progress


def test_a_log_gets_a_line_now_and_then(model):
    clock = SimpleNamespace(now=100.0)
    for as_json, is_terminal in ((False, False), (False, True), (True, False)):
        terminal = Terminal(as_json=as_json)
        file = io.StringIO()
        terminal.err = Console(
            file=file, force_terminal=is_terminal, width=120, markup=False, get_time=lambda: clock.now
        )
        with Phases(terminal) as phases:
            phases.steps, phases.facts = 25, 90
            progress = phases.for_editor()
            progress.phase("targets")
            for step in range(7):
                clock.now += 10
                progress.targets(step, step, 1.5)
        lines = [line for line in file.getvalue().splitlines() if line.startswith("searching targets: ")]
        if is_terminal or as_json:
            assert lines == []
            assert ("━" in file.getvalue()) == is_terminal
        else:
            assert lines == [
                "searching targets: 3 of 25, 2 of 90 facts, mean loss 1.50, 30 s",
                "searching targets: 6 of 25, 5 of 90 facts, mean loss 1.50, 60 s",
            ]
        assert list(phases.seconds) == ["targets"]


def test_json_has_no_nan():
    text = strict_json({"a": float("nan"), "b": [1.5, (float("inf"), {"c": -float("inf")})], "d": "NaN", "e": True})
    document = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert document == {"a": None, "b": [1.5, [None, {"c": None}]], "d": "NaN", "e": True}
