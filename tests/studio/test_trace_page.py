"""The Trace tab in a browser."""

from __future__ import annotations

from tests.studio.conftest import run_job


def test_the_server_refuses_a_sentence_without_a_subject(client):
    for sentence, code in [("The capital of France is", "no_subject"), ("", "empty_field"), ("{a} {b} is", "")]:
        answer = client.post("/api/trace/run", json={"sentence": sentence})
        assert answer.status_code == 400
        assert answer.json()["field"] == "sentence"
        assert not code or answer.json()["code"] == code
    assert client.post("/api/trace/run", json={"sentence": "{a} is", "draws": 0}).json()["field"] == "draws"


def test_a_target_can_be_traced_instead_of_the_answer(client):
    state = run_job(client, "/api/trace/run", {"sentence": "The capital of {France} is", "target": "Rome", "draws": 1})
    assert state["status"] == "done"
    assert not state["result"]["trace"]["first_choice"]
    assert "Rome".startswith(state["result"]["trace"]["answer"].strip())


def test_a_sentence_is_traced_in_the_browser(new_page):
    page = new_page("tab=trace")
    sentence = page.get_by_label("Sentence, with its subject in braces")
    sentence.fill("The capital of France is")
    page.get_by_role("button", name="Trace").click()
    page.locator("[data-error='sentence']:not(:empty)").wait_for()

    sentence.evaluate("element => element.setSelectionRange(15, 21)")
    page.get_by_role("button", name="Mark the selection").click()
    assert sentence.input_value() == "The capital of {France} is"
    page.get_by_label("Samples of noise").select_option("1")
    page.get_by_role("button", name="Trace").click()
    mlp = page.locator("[data-kind='mlp']")
    mlp.wait_for()
    assert page.locator("[data-error='sentence']").inner_text() == ""
    assert mlp.locator(".heat-column.marked").count() == 2  # layers 0 and 1 of a model of four
    page.get_by_label("by method").select_option("rome")
    assert mlp.locator(".heat-column.marked").count() == 1
    mlp.locator("[role=gridcell][tabindex='0']").focus()
    page.keyboard.press("End")
    assert "layer 3" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert mlp.locator(".tip").is_visible()
    page.get_by_role("grid", name="Logit lens").wait_for()
    assert "rank" in page.locator(".heat.lens [role=gridcell]").first.get_attribute("aria-label")

    page.get_by_role("button", name="Edit this fact at layer").click()
    page.get_by_role("tabpanel", name="Edit").wait_for()
    assert page.get_by_role("textbox", name="Subject", exact=True).input_value() == "France"
    assert page.get_by_role("textbox", name="Layers").input_value() in ("0", "1", "2"), "one that an edit can change"
