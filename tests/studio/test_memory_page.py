"""The Memory tab, through the server and in a browser."""

from __future__ import annotations

from typing import Any

import pytest

from rebind.studio.memory_player import Geometry, Script, read_pairs, read_player, rules

PAIRS = "France = Paris\nItaly = Rome\nItaly = Milan"
DELTA = {"rule": "delta", "gates": {"beta": 0.5}, "feature": "dpfp"}


def body(**changes: Any) -> dict[str, Any]:
    return {"pairs": PAIRS, "width": 6, "similarity": 0.25, "seed": 3, "memories": [{"rule": "sum"}, DELTA], **changes}


def test_the_server_plays_what_the_player_does(client):
    data = client.post("/api/memory/play", json=body()).json()
    script, geometry = Script(read_pairs(PAIRS)), Geometry(6, 0.25, seed=3)
    assert data["memories"][0] == script.to_json(read_player("sum", {}), geometry)
    assert data["memories"][1] == script.to_json(read_player("delta", {"beta": 0.5}, "dpfp"), geometry)
    assert data["keys"] == ["France", "Italy"]
    assert data["latest"] == [[None, None], ["Paris", None], ["Paris", "Rome"], ["Paris", "Milan"]]
    assert [write["replaces"] for write in data["writes"]] == [None, None, "Rome"]


def test_every_rule_is_offered_with_its_gates_and_plays(client):
    offered = client.get("/api/memory/rules").json()
    assert [one["name"] for one in offered["rules"]] == [rule.name for rule in rules()]
    assert "delta_product" not in [one["name"] for one in offered["rules"]]
    for one in offered["rules"]:
        gates = {gate["name"]: gate["largest"] for gate in one["gates"]}
        memories = [{"rule": one["name"], "gates": gates, "feature": feature} for feature in ("identity", "elu+1")]
        answer = client.post("/api/memory/play", json=body(memories=memories))
        assert answer.status_code == 200, answer.json()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pairs": ""}, "pairs"),
        ({"pairs": "France Paris"}, "pairs"),
        ({"width": 1000}, "width"),
        ({"width": 2, "orthogonal": True}, "width"),
        ({"similarity": "high"}, "similarity"),
        ({"seed": -1}, "seed"),
        ({"memories": []}, ""),
        ({"memories": [{"rule": "sum"}, {"rule": "delta", "gates": {"beta": -1}}]}, "beta-1"),
        ({"memories": [{"rule": "none"}]}, "rule-0"),
        ({"memories": ["sum"]}, "rule-0"),
    ],
)
def test_bad_input_is_a_sentence_beside_its_field(client, changes, field):
    answer = client.post("/api/memory/play", json=body(**changes))
    assert answer.status_code == 400
    assert answer.json()["field"] == field
    assert answer.json()["problem"]


def test_a_memory_is_written_and_overwritten_in_the_browser(new_page):
    page = new_page("tab=memory")
    delta, total = page.locator("[data-side='1']"), page.locator("[data-side='0']")
    delta.locator(".recall li").first.wait_for()
    page.get_by_label("Directions of the keys").select_option("true")
    page.get_by_label("Pairs, one per line").fill(PAIRS)
    delta.locator(".pill:text('all 2 recalled')").wait_for()
    assert "✓ Milan" in delta.locator("li[data-key='Italy']").inner_text()
    assert "of the old value is left" in total.locator("li[data-key='Italy']").inner_text()
    assert delta.locator("li[data-key='Italy'] .error").inner_text() == "0"

    page.get_by_label("Write", exact=True).press("ArrowLeft")  # back before Italy was overwritten
    assert "Italy = Rome" in page.locator(".timeline .now").inner_text()
    assert "Rome" in delta.locator("li[data-key='Italy']").inner_text()
    cell = delta.locator("[role=gridcell][tabindex='0']")
    cell.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("W[1, 2] = ")

    page.get_by_label("New value").fill("Turin")
    page.get_by_label("Key", exact=True).select_option("Italy")
    page.get_by_role("button", name="Overwrite").click()
    page.locator(".ticks span").nth(3).wait_for(state="attached")
    page.get_by_label("Pairs, one per line").fill("Italy")
    page.locator("[data-error='pairs']:not(:empty)").wait_for()
    assert "Line 1" in page.locator("[data-error='pairs']").inner_text()

    page.get_by_label("Directions of the keys").select_option("false")
    page.get_by_label("Pairs, one per line").fill(f"{PAIRS}\nItaly = Turin")
    page.locator("[data-error='pairs']:empty").first.wait_for(state="attached")
    restored = new_page(page.url.partition("#")[2], viewport={"width": 390, "height": 800}, color_scheme="dark")
    restored.locator("li[data-key='Italy']").first.wait_for()
    assert "Turin" in restored.get_by_label("Pairs, one per line").input_value()
    restored.get_by_label("Pairs", exact=True).fill("40")
    restored.get_by_role("button", name="Generate").click()
    restored.locator("[data-side='0'] .pill:text('of 40 forgotten')").wait_for()
    assert restored.evaluate("document.documentElement.scrollWidth") <= 390
