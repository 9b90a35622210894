"""On a terminal of 80 columns no number, name or header is broken."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from rebind.cli.commands import lens
from rebind.cli.manual import manual
from rebind.cli.ui.tables import table
from rebind.lab.catalogue import EXPERIMENTS

from .conftest import FAST


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def printed(made, width: int) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as shown:
        console.print(made)
    return [line.rstrip() for line in shown.get().splitlines()]


def rows_of(lines: list[str]) -> list[list[str]]:
    """Rows that begin with a number, in words."""
    return [line.split() for line in lines if re.match(r" *\d+ ", line)]


def test_names_give_way_to_numbers():
    heads = [f"how much {place}" for place in range(5)]
    made = table("what", *heads, right=heads)
    made.add_row("a few plain words", *["1,234,567.8"] * 5)
    shown = printed(made, 80)
    assert max(map(len, shown)) <= 80
    assert [line.count("1,234,567.8") for line in shown if re.search(r"\d[,.]\d", line)] == [5]
    assert " ".join(heads) in [" ".join(line.split()).removeprefix("what ") for line in shown]


@pytest.mark.parametrize(("width", "token"), [(80, "' intern"), (120, "' internationalization'")])
def test_a_lens_is_a_row_a_layer(width, token):
    """At its widest: a vocabulary of six digits, probabilities with a sign before them, and long tokens."""
    one = SimpleNamespace(
        top=[(" internationalization",)] * 32,
        top_probability=torch.full((32, 1), 0.9999),
        probability=torch.full((32, 1), 1e-7),
        rank=torch.full((32, 1), 128_256),
    )
    shown = printed(lens._table([("base", one), ("edited", one)]), width)
    assert max(map(len, shown)) <= width
    assert [row[0] for row in rows_of(shown)] == [str(layer) for layer in range(32)]
    for row in rows_of(shown):
        assert [row.count(number) for number in (">99.9", "<0.001", "128,256")] == [2, 2, 2]
        assert " ".join(row).count(token) == 2
    assert sum(line.strip() != "" for line in shown) - 32 <= 3, "a header of two lines at most, and its rule"


def test_a_lens_of_an_edited_model(rebind, model):
    rebind("edit", "The capital of {France} is", "Rome", "--model", model, *FAST)
    shown = rebind("lens", "The capital of France is", "--target", "Rome", "--model", model).out.splitlines()
    rows = rows_of(shown)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert any("base says" in line and "edited says" in line for line in shown)
    assert any("P: how likely" in line for line in shown)
    assert max(map(len, shown)) <= 80


def test_layers_are_a_row_each_and_their_reasons_below(rebind, model, monkeypatch):
    monkeypatch.setattr("rebind.analysis.layer_search._known", lambda editor, one: True)
    words = ("layers", "--model", model, "--most", "3", "--moment-tokens", "128")
    tried = rebind(*words, json=True).document["candidates"]
    shown = rebind(*words).out
    head = "layers trace efficacy paraphrase neighbour drift score"
    assert head in [" ".join(line.split()) for line in shown.splitlines()]
    spans = [f"{one['layers'][0]}-{one['layers'][-1]}" for one in tried]
    table, below = shown.split("why these: ")
    assert re.findall(r"^ (\d+-\d+) .*\d\b", table, re.MULTILINE) == sorted(spans)
    for span, one in zip(spans, tried, strict=True):
        assert f"{span} {one['why']}" in " ".join(below.split())
    assert max(map(len, shown.splitlines())) <= 80


def test_experiments_are_two_lines_each(rebind):
    _, *lines, _, _ = rebind("lab").out.splitlines()
    assert len(lines) == 2 * len(EXPERIMENTS)
    assert max(map(len, lines)) <= 80
    for first, second, one in zip(lines[::2], lines[1::2], EXPERIMENTS.values(), strict=True):
        name, title = first.split(maxsplit=1)
        assert name == one.name
        assert re.search(rf"{one.takes} +{one.on_gpu}$", first)
        assert one.title.startswith(re.split(r" …|  ", title)[0])
        assert one.answers.startswith(second.strip().removesuffix(" …"))
        assert len(second.split()) >= 5, "what it answers can be told from it"


def test_the_list_has_every_experiment_whole(rebind):
    shown = " ".join(rebind("lab", "list").out.split())
    for one in EXPERIMENTS.values():
        for told in (one.title, one.answers, f"two cores: {one.takes}; GPU: {one.on_gpu}"):
            assert told in shown


VERBS = re.findall(r"^## rebind (.+)$", manual(), re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_what_is_typed_as_the_manual_does(rebind, verb):
    shown = rebind(*verb.split(), "--help").out
    assert not re.search(r"<(bool|str|list.*|Path|path)>", shown), "nobody types a type"
    usage = shown.split("Usage: ")[1].split("\n")[0].strip()
    told = manual().split(f"\n## rebind {verb}\n")[1].split("```\n")[1].strip()
    assert usage.removesuffix(" COMMAND [ARGS]...") == told
    assert re.search(r"--help +-h +Show this", shown)


def test_a_missing_argument_has_the_name_help_gives_it(rebind):
    assert "Missing argument 'FACTS'" in rebind("edit", code=2).err
