"""A real edit in SmolLM2, through the page."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import expect

from rebind.edit.editor import Editor
from rebind.studio import Studio
from rebind.studio.asking import LiveAnswers

PATIENCE = 600_000  # milliseconds


@pytest.fixture
def studio(tmp_path):
    """A studio on the embedded model, in place of the tiny one."""
    studio = Studio(lambda name: Editor(name, ledger=tmp_path / "ledger"), model="smollm2", export_folder=tmp_path)
    assert studio.jobs.wait(studio.load("smollm2").id, 300).status == "done"
    yield studio
    studio.close()


@pytest.mark.slow
def test_france_gets_another_capital_and_the_switch_gives_it_back(page, studio):
    page.get_by_label("Sentence").fill("The capital of {France} is")
    page.get_by_label("New target").fill("Rome")
    page.get_by_role("button", name="Write this fact").click()
    page.get_by_role("heading", name="Before").wait_for(timeout=PATIENCE)
    expect(page.locator(".side.before .token").first).to_have_text("Paris")
    expect(page.locator(".side.after .token").first).to_have_text("Rome")
    page.get_by_role("tab", name="Ledger").click()
    now = page.locator(".watched-answer").nth(1)
    expect(now).to_have_text(re.compile("^Rome"), timeout=PATIENCE)
    page.get_by_role("switch", name="The capital of France is Rome").click()
    expect(now).to_have_text(re.compile("^Paris"), timeout=PATIENCE)
    assert seconds_of_a_switch(studio.editor) < 1.0


def seconds_of_a_switch(editor: Editor) -> float:
    """Return the processor time of a switch to a state in which three prompts have not been asked yet."""
    prompts, (edit,) = ["The capital of France is", "The capital of Spain is", "France is in"], editor.ledger.edits
    LiveAnswers().ask(editor, prompts)  # the first run of a model costs more
    began = time.process_time()
    editor.redo(edit.id)
    LiveAnswers().ask(editor, prompts)
    return time.process_time() - began
