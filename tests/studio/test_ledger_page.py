"""The Ledger tab in a real browser: switches, search, import, export, and the edits of others."""

from __future__ import annotations

from playwright.sync_api import expect

from .conftest import finish


def add_facts(live, *names):
    """Write one edit per name, in the studio's own queue."""

    def work(control):
        return [live.studio.editor.rewrite(f"The capital of {{{name}}} is", "Rome").id for name in names]

    return finish(live.studio, live.studio.submit("edit", work))


def test_a_switch_changes_the_answer(new_page, live):
    add_facts(live, "France", "Spain")
    page = new_page("tab=ledger")
    answers = page.locator(".watched-answer")
    expect(answers).to_have_count(4)
    expect(answers.nth(1)).not_to_have_text("…")
    expect(page.locator(".count")).to_have_text("2 facts, 2 on, 2 in the dense memory.")
    on = page.locator(".watched").inner_text()
    spain = page.get_by_role("switch", name="The capital of Spain is Rome")
    spain.press("Space")
    expect(page.locator(".count")).to_contain_text("1 on")
    expect(page.locator("#switch-time")).to_contain_text("Switched in")
    assert [edit.id for edit in live.studio.ledger.active] == ["e0001"]
    assert page.locator(".watched").inner_text() != on
    expect(spain).to_be_focused()
    page.get_by_role("button", name="Redo the newest").click()
    expect(page.locator(".count")).to_contain_text("2 on")
    assert page.locator(".watched").inner_text() == on
    page.get_by_label("Search").fill("france")
    expect(page.locator(".fact-row")).to_have_count(1)
    page.get_by_label("Show").select_option("off")
    expect(page.locator(".fact-row")).to_have_count(0)


def test_import_export_and_bad_files(new_page, live, tmp_path):
    page = new_page("tab=ledger")
    expect(page.locator(".count")).to_contain_text("No facts yet")
    form = page.get_by_role("form", name="Import")
    form.get_by_role("button", name="Import").click()
    expect(form.locator("[data-error=file]")).to_have_text("Choose a file.")
    bad, good = tmp_path / "bad.json", tmp_path / "good.csv"
    bad.write_text("[1]")
    good.write_text("prompt,target\nThe capital of {Spain} is,Oslo\n")
    form.get_by_label("File").set_input_files(bad)
    form.get_by_role("button", name="Import").click()
    expect(form.locator("[data-error=file]")).to_contain_text("bad.json")
    form.get_by_label("File").set_input_files(good)
    form.get_by_label("Into").select_option("memit")
    form.get_by_role("button", name="Import").click()
    expect(form.locator(".done")).to_have_text("1 fact written as e0001.")
    expect(page.locator(".fact-row")).to_have_count(1)
    form = page.get_by_role("form", name="Export")
    form.get_by_label("Name").fill("../x")
    form.get_by_role("button", name="Export").click()
    expect(form.locator("[data-error=name]")).to_contain_text("cannot be the name of an export")
    form.get_by_label("Name").fill("facts")
    form.get_by_label("Kind").select_option("json")
    form.get_by_role("button", name="Export").click()
    expect(form.locator(".done")).to_contain_text("facts.json")
    assert (tmp_path / "exports" / "facts.json").exists()


def test_what_another_client_does_appears(new_page, live):
    page = new_page("tab=ledger")
    expect(page.locator(".count")).to_contain_text("No facts yet")
    add_facts(live, "France")
    expect(page.locator(".fact-row")).to_have_count(1)
