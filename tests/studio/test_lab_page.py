"""The Lab tab in a browser."""

from __future__ import annotations

import dataclasses

import pytest

from rebind.lab import EXPERIMENTS


@pytest.fixture
def small(monkeypatch):
    """Make the quick version of one experiment quicker still, and leave out its figure."""
    monkeypatch.setattr("rebind.lab.run.find_spec", lambda name: None)
    chosen = EXPERIMENTS["closed-form"]
    settings = "width=16 loads=0.25,0.5,1,2 passes=4 seeds=2"
    monkeypatch.setitem(EXPERIMENTS, "closed-form", type(chosen.__name__, (chosen,), {"quick_settings": settings}))


def test_the_server_lists_the_experiments_and_refuses_others(client):
    names = [one["name"] for one in client.get("/api/lab/experiments").json()["experiments"]]
    assert names == list(EXPERIMENTS)
    answer = client.post("/api/lab/run", json={"experiment": "nothing"})
    assert (answer.status_code, answer.json()["field"]) == (400, "experiment")


def test_an_experiment_runs_in_the_browser_and_can_be_cancelled(new_page, small, monkeypatch):
    page = new_page("tab=lab")
    page.get_by_role("radio", name="closed-form").check(force=True)
    page.get_by_role("button", name="Run the quick version").click()
    page.locator(".claims li").first.wait_for()
    view = page.locator("[data-experiment='closed-form']")
    assert view.locator(".series .line").count() >= 6
    held = page.locator(".claims .pill.good").count()
    assert f"{held} of {page.locator('.claims li').count()} claims hold" in page.locator("#panel-lab").inner_text()
    drawing = view.locator(".chart-drawing").first
    drawing.focus()
    page.keyboard.press("Home")
    assert "n / d 0.25" in page.locator("#announcer").inner_text()

    many = dataclasses.replace(EXPERIMENTS["hopfield"].quick(), seeds=50)
    monkeypatch.setattr(EXPERIMENTS["hopfield"], "quick", classmethod(lambda cls: many))
    page.get_by_role("radio", name="hopfield").check(force=True)
    page.get_by_role("button", name="Run the quick version").click()
    page.locator("#panel-lab .progress").get_by_role("button", name="Cancel").click()
    page.locator("text=The run was canceled").wait_for()
    assert page.locator(".claims").count() == 0
