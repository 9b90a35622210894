"""The Edit tab in a real browser."""

from __future__ import annotations


def fill_fact(page, sentence="The capital of {France} is", target="Rome"):
    page.get_by_label("Sentence").fill(sentence)
    page.get_by_label("New target").fill(target)


def test_a_fact_is_written_and_shown(page, live):
    fill_fact(page)
    assert page.get_by_label("Sentence").input_value() == "The capital of France is"
    assert page.get_by_label("Subject").input_value() == "France"
    page.get_by_role("button", name="Write this fact").click()
    page.get_by_role("heading", name="Before").wait_for()
    print(page.inner_text("main"))
    assert len(live.studio.ledger.active) == 1
    page.screenshot(path="/tmp/edit.png", full_page=True)
