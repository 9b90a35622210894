"""What the page asks the server for: edits, switches, exports, imports, and bad input."""

from __future__ import annotations

import json
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from starlette.testclient import TestClient

from rebind.edit import DEFAULT_METHOD
from rebind.edit.facts import read_facts
from rebind.errors import FactWarning
from rebind.studio import Access, Studio, create_app
from rebind.studio.fact_list import PAGE, page_of_facts
from tests import tiny

from .conftest import PORT, finish, open_editor, run_job, wait_for

FACT = {"sentence": "The capital of {France} is", "target": "Rome"}
FACTS = '{"prompt": "The capital of {Spain} is", "target": "Oslo"}\n{"prompt": "{Dante} wrote in", "target": "Greek"}\n'


def model_state(studio):
    """Return the weights of the model, and the rows of its dense memory."""
    memories = studio.editor.edited.dense.memories.values()
    return tiny.weights(studio.editor.model), [(memory.keys.tolist(), memory.values.tolist()) for memory in memories]


def write(client, **changes):
    state = run_job(client, "/api/edit/write", FACT | changes)
    assert state["status"] == "done", state["error"]
    return state["result"]


@pytest.mark.parametrize(("method", "memory"), [({}, "dense"), ({"method": "memit"}, "weights")])
def test_an_edit_is_shown_from_all_sides(client, studio, method, memory):
    base = model_state(studio)
    result = write(client, **method)
    assert result["edit"]["id"] == "e0001"
    assert result["edit"]["memory"] == memory
    assert result["fact"] == {
        "before": "The capital of ",
        "subject": "France",
        "after": " is",
        "text": "The capital of France is",
        "target": "Rome",
    }
    assert result["after"]["target"] > result["before"]["target"]
    assert len(result["before"]["top"]) == len(result["after"]["top"]) == 6
    assert {one["framing"] for one in result["framings"]} == set(studio.editor.framings)
    assert {one["kind"] for one in result["related"]} == {"subject", "neighbor"}
    assert all(one["changed"] is (one["before"]["token"] != one["after"]["token"]) for one in result["related"])
    assert result["drift"]["kl"] > 0
    assert (model_state(studio)[0] == base[0]) == (memory == "dense")
    assert (model_state(studio)[1] == base[1]) == (memory == "weights")
    assert [edit.id for edit in studio.ledger.active] == ["e0001"]


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"sentence": ""}, "sentence", "empty_field"),
        ({"sentence": "   "}, "sentence", "empty_field"),
        ({"sentence": "The capital of France is"}, "sentence", "no_subject"),
        ({"sentence": "{The} capital of {France} is"}, "sentence", "several_subjects"),
        ({"sentence": "The capital of {France is"}, "sentence", "unpaired_brace"),
        ({"sentence": "The capital is", "subject": "France"}, "subject", "subject_not_in_prompt"),
        ({"target": ""}, "target", "empty_field"),
        ({"target": 7}, "target", "empty_field"),
        ({"target": "x" * 500}, "target", "too_long"),
        ({"sentence": "{France}\x00 is"}, "sentence", "control_characters"),
        ({"method": "magic"}, "method", "unknown_choice"),
        ({"layers": "1 to 5"}, "layers", "invalid_layers"),
        ({"force": "perhaps"}, "force", "not_a_flag"),
    ],
)
def test_bad_input_is_a_sentence_beside_a_field(client, changes, field, code):
    answer = client.post("/api/edit/write", json=FACT | changes)
    assert answer.status_code == 400
    assert (answer.json()["field"], answer.json()["code"]) == (field, code)
    assert answer.json()["problem"]
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"\xff", b"[" * 100_000])
def test_what_is_not_a_json_object(client, body):
    answer = client.post("/api/edit/write", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["code"] in ("invalid_json", "empty_field")


def test_the_page_begins_with_the_default_method(client):
    options = client.get("/api/edit/options").json()
    assert options["method"] == DEFAULT_METHOD
    assert options["method"] in [method["name"] for method in options["methods"]]


def test_unknown_addresses_and_jobs(client):
    assert client.get("/api/nothing").json()["code"] == "not_found"
    assert client.get("/api/edit/write").status_code == 405
    assert client.get("/api/jobs/j999").json()["code"] == "unknown_job"


def test_a_refused_fact_comes_back_from_the_job(client, studio):
    state = run_job(client, "/api/edit/write", FACT | {"sentence": "The capital of {" + "France " * 90 + "} is"})
    assert state["status"] == "failed"
    assert state["error"]["problem"]
    assert not studio.ledger.edits


def test_an_edit_changes_the_layers_that_were_chosen(client):
    assert write(client, layers="2, 1", method="memit")["edit"]["layers"] == [1, 2]
    state = run_job(client, "/api/edit/write", FACT | {"layers": "9"})
    assert (state["error"]["field"], state["error"]["code"]) == ("layers", "layers_out_of_range")


def test_warnings_become_notes(client, studio):
    def work(control):
        warnings.warn("These facts share a key", FactWarning, stacklevel=1)
        return 1

    job = studio.submit("work", work)
    finish(studio, job)
    assert job.notes == ["These facts share a key"]


def test_a_cancel_leaves_the_model_as_it_was(client, studio):
    write(client)
    before, in_search, go = model_state(studio), threading.Event(), threading.Event()
    search = studio.editor.target_search.find

    def slow(*arguments):
        in_search.set()
        assert go.wait(20)
        return search(*arguments)

    studio.editor.target_search.find = slow
    state = client.post("/api/edit/write", json=FACT | {"sentence": "The capital of {Spain} is"}).json()
    assert in_search.wait(20)
    client.post(f"/api/jobs/{state['id']}/cancel", json={})
    go.set()
    assert wait_for(client, state)["status"] == "cancelled"
    assert model_state(studio) == before
    assert len(studio.ledger.edits) == 1


def test_a_switch_changes_the_answer_and_back(client, studio):
    base, prompt = model_state(studio), "The capital of France is"
    edited = write(client)["after"]["top"][:3]
    on = model_state(studio)
    off = run_job(client, "/api/ledger/switch", {"edit": "e0001", "on": False, "prompts": [prompt]})
    assert model_state(studio) == base
    assert off["result"]["answers"][0]["edited"]["top"] != edited
    again = run_job(client, "/api/ledger/switch", {"edit": "e0001", "on": True, "prompts": [prompt]})
    assert model_state(studio) == on
    assert again["result"]["answers"][0]["edited"]["top"] == edited
    assert run_job(client, "/api/ledger/switch", {"edit": "e0001", "on": True})["status"] == "done", "twice is once"
    newest = run_job(client, "/api/ledger/switch", {"edit": "newest", "on": False})
    assert newest["result"]["edit"] == "e0001"
    assert (
        run_job(client, "/api/ledger/switch", {"edit": "newest", "on": False})["error"]["code"] == "nothing_to_switch"
    )
    assert run_job(client, "/api/ledger/switch", {"edit": "e0099", "on": False})["error"]["code"] == "unknown_edit"


def test_a_switch_is_reported_before_the_answers_and_states_are_asked_once(client, studio, monkeypatch):
    write(client)
    model, prompt, shown = studio.editor.language_model, "The capital of France is", []
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda *arguments: shown.append(studio.jobs.unfinished[0].to_json()) or generate(*arguments)
    )

    def switch(on):
        return run_job(client, "/api/ledger/switch", {"edit": "e0001", "on": on, "prompts": [prompt]})["result"]

    off = switch(False)["answers"]
    on = switch(True)["answers"]
    assert [state["is_committed"] for state in shown] == [True, True]
    first = [state["data"]["answers"][0]["edited"] for state in shown]
    assert [one["top"] for one in first] == [off[0]["edited"]["top"], on[0]["edited"]["top"]]
    assert all(one["says"] == one["top"][0]["token"] for one in first)
    assert (switch(False)["answers"], switch(True)["answers"]) == (off, on)
    assert len(shown) == 2, "a state that was seen is not asked again"
    write(client, target="Oslo")
    assert switch(True)["answers"] != on
    assert len(shown) > 2


def test_two_clients_get_one_model(client, studio):
    other = TestClient(create_app(studio, Access(PORT)), base_url=f"http://127.0.0.1:{PORT}")
    states = [
        one.post("/api/edit/write", json=FACT | {"sentence": f"The capital of {{{name}}} is"}).json()
        for one, name in ((client, "France"), (other, "Spain"), (client, "Norway"))
    ]
    results = [wait_for(client, state) for state in states]
    assert [one["result"]["edit"]["id"] for one in results] == ["e0001", "e0002", "e0003"]
    once = SimpleNamespace(editor=open_editor())
    once.editor.use_ledger(studio.ledger)
    assert model_state(once) == model_state(studio), "the model is the fold of the ledger"


def test_edits_of_another_process_are_seen(client, studio, tmp_path):
    open_editor(tmp_path / "ledger").rewrite("The capital of {Spain} is", "Oslo")
    assert client.get("/api/ledger/facts").json()["rows"][0]["subject"] == "Spain"
    asked = run_job(client, "/api/ledger/ask", {"prompts": ["The capital of Spain is"]})["result"]["answers"][0]
    assert asked["base"]["top"] != asked["edited"]["top"]


def test_chat_answers_from_both_models(client):
    first = run_job(client, "/api/edit/chat", {"question": "Who?"})["result"]
    assert first["base"] == first["edited"], "without edits there is one model"
    write(client, method="memit")
    turn = {"question": "Who?", **first}
    second = run_job(client, "/api/edit/chat", {"question": "The capital of France is", "history": [turn]})["result"]
    assert second["base"] != second["edited"]
    assert client.post("/api/edit/chat", json={"question": "x", "history": "y"}).json()["code"] == "invalid_history"


def test_dense_facts_are_told_apart_and_move_into_the_weights(client, studio):
    write(client, method="dense")
    listed = client.get("/api/ledger/facts").json()
    assert (listed["rows"][0]["memory"], listed["dense"]) == ("dense", 1)
    state = run_job(client, "/api/ledger/consolidate", {})
    assert state["status"] == "done", state["error"]
    listed, moved = client.get("/api/ledger/facts").json(), state["result"]["moved"]
    assert listed["dense"] == 1 - moved
    assert len(listed["moves"]) == moved
    assert len(listed["rows"]) == 1


def test_import_and_export_round_trip(client, studio, tmp_path):
    state = run_job(client, "/api/ledger/import", {"name": "my.jsonl", "text": FACTS, "method": "memit"})
    assert state["result"] == {"edits": ["e0001"], "facts": 2}
    row = client.get("/api/ledger/facts").json()["rows"][0]
    assert row["together"] == 2
    written = run_job(client, "/api/ledger/export", {"kind": "json", "name": "facts"})["result"]["path"]
    assert written == str(tmp_path / "exports" / "facts.json")
    assert [fact.target for fact in read_facts(written)] == ["Oslo", "Greek"]
    text = json.dumps([{"prompt": "The capital of {Italy} is", "target": "Bern"}])
    separate = run_job(
        client, "/api/ledger/import", {"name": "a.json", "text": text, "separate": True, "method": "memit"}
    )
    assert separate["result"]["edits"] == ["e0002"]


def test_exports_that_other_programs_read(client, studio, tmp_path):
    write(client, method="memit")
    adapter = run_job(client, "/api/ledger/export", {"kind": "adapter", "name": "my-adapter"})
    folder = tmp_path / "exports" / "my-adapter"
    assert adapter["result"]["path"] == str(folder)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert list(file.keys())
    assert run_job(client, "/api/ledger/export", {"kind": "checkpoint", "name": "model"})["status"] == "done"
    assert (tmp_path / "exports" / "model" / "config.json").exists()
    assert (
        run_job(client, "/api/ledger/export", {"kind": "memory", "name": "memory"})["error"]["code"] == "no_dense_facts"
    )
    again = run_job(client, "/api/ledger/export", {"kind": "adapter", "name": "my-adapter"})
    assert again["status"] == "failed", "nothing is overwritten"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", ".hidden", "", "a\\b", "x" * 65, "a\nb", "ü"])
def test_exports_stay_in_their_folder(client, tmp_path, name):
    answer = client.post("/api/ledger/export", json={"kind": "json", "name": name})
    assert answer.status_code == 400
    assert answer.json()["field"] == "name"
    assert not (tmp_path / "exports").exists()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_field"),
        ("[1]", "not_a_fact"),
        ("[", "not_json"),
        ("a,b\n1,2", "unknown_columns"),
        ("{}", "missing_field"),
    ],
)
def test_bad_files(client, text, code):
    answer = client.post("/api/ledger/import", json={"name": "../../x.json", "text": text})
    assert answer.status_code == 400
    assert answer.json()["code"] == code
    assert "/tmp" not in answer.json()["problem"]


def test_an_import_is_all_or_nothing(client, studio):
    base = model_state(studio)
    long = json.dumps([json.loads(FACTS.splitlines()[0]), {"prompt": "{Dante} " + "wrote " * 99, "target": "x"}])
    state = run_job(client, "/api/ledger/import", {"name": "a.json", "text": long, "separate": True, "method": "memit"})
    assert state["status"] == "failed"
    assert model_state(studio) == base
    assert not studio.ledger.active


def test_a_model_that_cannot_be_loaded_leaves_the_old_one(tmp_path):
    def open_one(name):
        return open_editor() if name == "tiny" else read_facts(tmp_path / "missing")

    studio = Studio(open_one, model="tiny", export_folder=tmp_path)
    client = TestClient(create_app(studio, Access(PORT)), base_url=f"http://127.0.0.1:{PORT}")
    try:
        assert client.get("/api/ledger/facts").json()["code"] == "no_model"
        assert run_job(client, "/api/edit/write", FACT)["error"]["code"] == "no_model"
        finish(studio, studio.load("tiny"))
        assert run_job(client, "/api/model", {"model": "other"})["status"] == "failed"
        state = client.get("/api/state").json()
        assert (state["model"], state["loaded"], state["problem"]["field"]) == ("tiny", True, "model")
    finally:
        studio.close()


def test_a_load_that_is_cancelled_leaves_the_old_model(client, studio):
    loading, go = threading.Event(), threading.Event()

    def slow(name):
        loading.set()
        assert go.wait(20)
        return open_editor()

    before, studio._open_editor = studio.editor, slow
    state = client.post("/api/model", json={"model": "large"}).json()
    assert loading.wait(20)
    client.post(f"/api/jobs/{state['id']}/cancel", json={})
    assert wait_for(client, state)["status"] == "cancelled"
    assert client.get("/api/state").json()["model"] == "tiny"
    next = client.post("/api/edit/write", json=FACT).json()
    go.set()
    assert wait_for(client, next)["status"] == "done"
    assert studio.editor is before
    assert len(before.ledger.active) == 1


class ManyFacts:
    """A ledger of many edits, as far as a list of facts looks at it."""

    def __init__(self, edit, count):
        from dataclasses import replace

        facts = read_facts([(f"The capital of {{Land {n}}} is", f"Town {n}") for n in range(count)]).facts
        self.edits = tuple(replace(edit, id=f"e{n:05}", facts=(fact,)) for n, fact in enumerate(facts))
        self.active = self.edits[::2]


def test_ten_thousand_facts_stay_usable(client, studio):
    write(client)
    ledger = ManyFacts(studio.ledger.edits[0], 10_000)
    began = time.process_time()
    first = page_of_facts(ledger)
    found = page_of_facts(ledger, search="land 4321", state="all")
    off = page_of_facts(ledger, state="off", page=10**6)
    assert time.process_time() - began < 3.0
    assert (first["matches"], first["pages"], len(first["rows"])) == (10_000, 10_000 // PAGE, PAGE)
    assert first["rows"][0]["text"] == "The capital of Land 9999 is"
    assert [row["target"] for row in found["rows"]] == ["Town 4321"]
    assert (off["matches"], off["page"]) == (5_000, 100)
    assert all(not row["on"] for row in off["rows"])
