"""`rebind eval` as its users meet it."""

from __future__ import annotations

import json
import re
from io import StringIO

import pytest
from rich.console import Console

from rebind.cli.commands.eval import _show_states
from rebind.cli.ui.terminal import Screen

RECORDS = [
    {
        "id": "france",
        "prompt": "The capital of {France} is",
        "target": "Rome",
        "old": "Paris",
        "paraphrases": ["France is ruled from"],
        "neighbors": ["The answer is"],
        "consequences": [{"prompt": "The answer of France is", "answer": "Rome"}],
    },
    {"id": "italy", "prompt": "The capital of {Italy} is", "target": "Paris", "old": "Rome"},
    {"id": "again", "prompt": "The capital of {France} is", "target": "here", "old": "Paris"},
    {"id": "broken", "prompt": "The capital is", "subject": "Spain", "target": "here"},
]
FAST = ["--steps", "2", "--moment-tokens", "256", "--free-tokens", "3", "--texts", "0"]


@pytest.fixture
def facts(tmp_path) -> str:
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)))
    return str(file)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_bundled_facts_need_no_file(rebind, model, tmp_path):
    document = rebind("eval", "--n", "2", "--model", model, *FAST, "--seed", "3", json=True).document
    folder = tmp_path / document["folder"]
    assert document["folder"].startswith("runs/memit-single-2-")
    assert (document["config"]["seed"], document["summary"]["data"]) == (3, "bundled")
    assert [state["edits"] for state in document["summary"]["states"]] == [0, 1]
    assert json.loads((folder / "summary.json").read_text()) == document["summary"]
    again = rebind("eval", "--n", "2", "--model", model, *FAST, "--seed", "3", "--quiet")
    assert again.out == document["folder"] + "\n", "the same call goes on with the same run"


def test_people_see_scores_and_where_they_are(rebind, model, facts, tmp_path):
    words = ("eval", "--facts", facts, "--n", "2", "--protocol", "sequential", "--batch", "1", "--model", model, *FAST)
    shown = rebind(*words, "--out", "a")
    for expected in ("memit on tiny, batches of 1 in sequence: 2 records", "before", "95 %", "perplexity", "edits.png"):
        assert expected in shown.out
    assert shown.err == "", "bars are for terminals"
    assert max(map(len, shown.out.splitlines())) <= 100
    rebind(*words, "--out", "b", "--method", "rome")
    both = rebind("eval", "compare", "a", "b", "--figure", "both.png")
    assert "memit" in both.out
    assert "rome" in both.out
    assert (tmp_path / "both.png").exists()
    document = rebind("eval", "compare", "a", "b", json=True).document
    assert [run["name"] for run in document["runs"]] == ["memit", "rome"]
    ended = rebind("eval", "compare", "a", "b", "--figure", str(tmp_path), code=2)
    assert ended.err == f"error: {tmp_path} is a folder, expected a file: choose another name\n"
    assert "rome" in ended.out, "what was found is shown all the same"
    assert rebind("eval", "compare", "a", "b", "--quiet").out.startswith("| run | edits |")


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
@pytest.mark.parametrize(
    "names", [("memit", "rome"), ("memit-sequential-200-3f2a91c0", "memit-sequential-200-9b1c22d0")]
)
@pytest.mark.parametrize("steps", [1, 9])
def test_a_comparison_breaks_no_number_and_no_name(columns, names, steps):
    """Every number of every run stands whole under its run and its edits, in the row of its score."""
    header = ["run", "edits", "records", "S", "portability", "perplexity"]
    rows = [
        [name, f"{100 * step:,}" if step else "before", "1,234", f".{place}{step}1", f".{place}{step}2", "18.29"]
        for place, name in enumerate(names)
        for step in range(steps + 1)
    ]
    shown = Screen(Console(width=columns, file=StringIO()), Console(file=StringIO()), False, False, False)
    _show_states(shown, header, rows)
    text = shown.out.file.getvalue()
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    found = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        lines = [line for line in part.splitlines() if "──" not in line and line.strip()]
        cells = {line.split()[0]: line.split()[1:] for line in lines if line.split()[0] in header}
        edits = next(line for line in lines if line.split()[0] == "score").split()[1:]
        edits = [edit for edit in edits if edit != "after"]
        assert set(cells) == set(header[2:])
        found += list(zip(edits, *(cells[name] for name in header[2:]), strict=True))
    assert found == [tuple(row[1:]) for row in rows]
    assert all(word in text for name in names for word in name.split("-"))


def test_bad_records_are_an_error_or_counted(rebind, model, facts):
    words = ("eval", "--facts", facts, "--model", model, "--protocol", "batch", *FAST)
    refused = rebind(*words, code=2)
    assert "line 4 of records.jsonl (id broken): subject 'Spain' is not in prompt" in refused.err
    done = rebind(*words, "--skip-bad")
    assert "skipped: line 4 of records.jsonl (id broken)" in done.err
    assert "skipped: record again asks for 'here'" in done.err
    assert "2 records" in done.out
    one = rebind("eval", "--facts", facts, "--n", "1", "--model", model, *FAST).out
    assert ": 1 record of records.jsonl" in one
    alone = rebind("eval", "--facts", facts, "--n", "3", "--model", model, *FAST, json=True).document
    assert alone["summary"]["states"][0]["records"] == 3, "alone, contradictions do not meet"


def test_options_reach_the_trial(rebind, model, facts, tmp_path):
    held = tmp_path / "held.txt"
    held.write_text("The capital of Italy is Rome. " * 9)
    words = ("eval", "--facts", facts, "--n", "1", "--known", "--skip-bad", "--model", model, *FAST)
    more = ("--layers", "1", "--lam", "2.5", "--text", str(held), "--method", "alphaedit", "--out", "x")
    document = rebind(*words, *more, json=True).document
    assert document["config"]["settings"] == {"layers": [1], "lam": 2.5, "steps": 2}
    assert document["config"]["drift"]["text"] == "given"
    assert document["config"]["data"]["name"].endswith(", known")
    assert document["summary"]["states"][0]["scores"]["ES"]["value"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "memitt"), "memitt"),
        (("--protocol", "serial"), "serial"),
        (("--facts", "nowhere.json"), "error: no file nowhere.json, expected one of records: check its name"),
        (("--facts", "hf:some/where"), "hf:some/where"),
        (("--text", "nowhere.txt"), "held text nowhere.txt cannot be read"),
        (("--lam", "-1"), "lam is -1"),
        (("--lam", "inf"), "lam is inf"),
        (("--layers", "x"), "layers are 'x'"),
    ],
)
def test_bad_options_are_told_before_the_model_is_loaded(rebind, words, message):
    assert message in rebind("eval", "--model", "no-such-model.gguf", *words, code=2).err


def test_what_cannot_be_compared(rebind, tmp_path):
    assert "no summary.json" in rebind("eval", "compare", str(tmp_path), str(tmp_path), code=2).err


@pytest.mark.parametrize("verb", [("eval",), ("eval", "compare")], ids=" ".join)
def test_help_teaches(rebind, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = rebind(*verb, "--help").out
    for option in ("--json", "--quiet", "--debug"):
        assert option in shown
    assert f"rebind {' '.join(verb)}" in shown.split("Example")[-1], "the epilog has an example"
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown, "something was cut off"
