"""The Edit tab in a real browser: mark, write, cancel, undo, talk, restore from a link, two clients at once."""

from __future__ import annotations

import threading

import pytest
from playwright.sync_api import expect

from tests import tiny


def fill_fact(page, sentence="The capital of {France} is", target="Rome"):
    page.get_by_label("Sentence").fill(sentence)
    page.get_by_label("New target").fill(target)


def write_fact(page):
    page.get_by_role("button", name="Write this fact").click()
    page.get_by_role("heading", name="Before").wait_for()


def marked(page):
    return page.locator(".sentence-shadow mark").all_inner_texts()


def test_a_fact_is_written_shown_undone_and_talked_about(page, live):
    fill_fact(page)
    assert page.get_by_label("Sentence").input_value() == "The capital of France is", "typed braces become a mark"
    assert (marked(page), page.get_by_label("Subject").input_value()) == (["France"], "France")
    write_fact(page)
    assert [edit.facts[0].target for edit in live.studio.ledger.active] == ["Rome"]
    assert page.locator(".tokens li").count() == 12
    assert page.locator(".changes li").count() > 0
    for name in ("Target probability", "Drift", "Time"):
        expect(page.locator(".tiles")).to_contain_text(name)
    page.get_by_role("switch", name="Fact of edit e0001 is on").click()
    expect(page.get_by_role("switch")).to_be_enabled()
    assert not live.studio.ledger.active
    page.get_by_label("Question").fill("The capital of France is")
    page.get_by_role("button", name="Ask both").click()
    expect(page.get_by_label("Question")).to_have_value("")
    assert page.locator(".bubble").count() == 3


def test_the_subject_is_marked_by_selecting_it(page):
    field = page.get_by_label("Sentence")
    field.fill("France has a capital called")
    field.press("Home")
    for _ in "France":
        field.press("Shift+ArrowRight")
    expect(page.get_by_label("Subject")).to_have_value("France")
    field.dblclick(position={"x": 30, "y": 25})
    assert marked(page) == ["France"]
    field.press("End")
    field.type(" the")
    assert marked(page) == ["France"], "the mark stays while the text goes on"
    page.get_by_label("Subject").fill("capital")
    page.get_by_label("Subject").press("Tab")
    assert marked(page) == ["capital"]


def test_bad_input_is_a_sentence_beside_its_field(page, live):
    page.get_by_role("button", name="Write this fact").click()
    expect(page.locator('[data-error="sentence"]')).to_contain_text("empty")
    fill_fact(page, "The capital of France is")
    page.get_by_role("button", name="Write this fact").click()
    expect(page.locator('[data-error="sentence"]')).to_contain_text("Mark the subject")
    fill_fact(page, target="")
    page.get_by_role("button", name="Write this fact").click()
    expect(page.locator('[data-error="target"]')).to_contain_text("empty")
    assert page.get_by_label("New target").get_attribute("aria-invalid") == "true"
    assert "Traceback" not in page.inner_text("body")
    assert not live.studio.ledger.edits


@pytest.fixture
def held_search(live):
    """Hold every target search until the test lets it go."""
    editor, searching, go = live.studio.editor, threading.Event(), threading.Event()
    search = editor.target_search.find

    def hold(*arguments):
        searching.set()
        assert go.wait(30)
        return search(*arguments)

    editor.target_search.find = hold
    yield searching, go
    go.set()


def test_a_cancel_leaves_the_model_as_it_was(page, live, held_search):
    searching, go = held_search
    editor = live.studio.editor
    before = tiny.weights(editor.model)
    fill_fact(page)
    page.get_by_role("button", name="Write this fact").click()
    assert searching.wait(30)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Canceling…")).to_be_disabled()
    go.set()
    expect(page.locator(".hero > [data-error='']")).to_contain_text("The model is as it was")
    assert not live.studio.ledger.edits
    assert tiny.weights(editor.model) == before
    assert not editor.edited.dense.memories


def test_a_canceled_load_goes_back_to_the_old_model(page, live):
    loading, go = threading.Event(), threading.Event()

    def slow(name):
        loading.set()
        assert go.wait(30)

    live.studio._open_editor = slow
    form = page.get_by_role("form", name="Model")
    form.get_by_role("combobox").fill("large")
    form.get_by_role("button", name="Load").click()
    assert loading.wait(30)
    form.get_by_role("button", name="Cancel").click()
    expect(form.locator("[data-error=model]")).to_have_text("Canceled. tiny stays.")
    expect(form.get_by_role("combobox")).to_have_value("tiny")
    fill_fact(page)
    page.get_by_role("button", name="Write this fact").click()
    expect(page.locator(".hero .stages")).to_contain_text("waiting for the canceled job to end")
    go.set()
    page.get_by_role("heading", name="Before").wait_for()


def test_two_clients_wait_for_each_other(new_page, live, held_search):
    searching, go = held_search
    first, second = new_page(), new_page()
    fill_fact(first)
    fill_fact(second, "The capital of {Spain} is", "Oslo")
    first.get_by_role("button", name="Write this fact").click()
    assert searching.wait(30)
    second.get_by_role("button", name="Write this fact").click()
    expect(second.locator(".hero .stages")).to_contain_text("waiting for 1 other job")
    go.set()
    for page in (first, second):
        page.get_by_role("heading", name="Before").wait_for()
    assert [edit.facts[0].target for edit in live.studio.ledger.active] == ["Rome", "Oslo"]


def test_a_link_restores_the_state_and_the_keyboard_moves_between_tabs(new_page):
    page = new_page("tab=edit&sentence=In+%7BOslo%7D+they+speak+%7B%7Bonly%7D%7D&target=Greek&method=dense")
    expect(page.get_by_label("Sentence")).to_have_value("In Oslo they speak {only}")
    assert marked(page) == ["Oslo"]
    expect(page.get_by_label("Method")).to_have_value("dense")
    page.get_by_role("tab", name="Edit").press("ArrowRight")
    expect(page.get_by_role("tab", name="Ledger")).to_be_focused()
    assert "tab=ledger" in page.url
    page.get_by_role("tab", name="Ledger").press("Home")
    expect(page.get_by_role("tabpanel", name="Edit")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_themes(new_page, scheme):
    page = new_page(color_scheme=scheme, viewport={"width": 360, "height": 740})
    other = "light" if scheme == "dark" else "dark"
    assert page.locator(f"html[data-theme={scheme}]").count() == 1
    for tab, text in (("Edit", "Kyoto"), ("Ledger", "No facts yet")):
        page.get_by_role("tab", name=tab).click()
        expect(page.get_by_role("tabpanel", name=tab)).to_contain_text(text)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, tab
    tabs = page.get_by_role("tablist").evaluate("list => list.scrollWidth <= list.clientWidth")
    assert tabs, "every tab is in sight"
    unlabeled = page.locator("input:visible, select:visible, textarea:visible").evaluate_all(
        "all => all.filter((one) => !one.labels?.length && !one.getAttribute('aria-label')).map((one) => one.name)"
    )
    assert unlabeled == []
    page.get_by_role("button", name=f"Use {other} colors").click()
    assert page.locator(f"html[data-theme={other}]").count() == 1
