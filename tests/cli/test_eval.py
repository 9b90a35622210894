"""`rebind eval` and `rebind eval compare`."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rebind.cli.commands.analysis.eval import print_states
from rebind.cli.ui import Terminal
from rebind.edit import DEFAULT_METHOD
from rebind.storage import read_sealed_json

from .conftest import write_records

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
    return write_records(tmp_path, *RECORDS)


def test_the_bundled_facts_need_no_file(rebind, model):
    words = ("eval", "--limit", "2", "--model", model, *FAST, "--seed", "3")
    document = rebind(*words, json=True).document
    assert document["folder"].startswith(f"runs/{DEFAULT_METHOD}-single-2-")
    assert (document["config"]["seed"], document["summary"]["data"]) == (3, "bundled")
    assert [state["edits"] for state in document["summary"]["states"]] == [0, 1]
    assert read_sealed_json(Path(document["folder"]) / "summary.json") == document["summary"]
    assert rebind(*words, "--quiet").out == document["folder"] + "\n", "the same command resumes the same run"


@pytest.mark.parametrize("method", ["dense", "memit"])
def test_the_dense_memory_is_evaluated_like_the_weights(rebind, model, method):
    words = ("eval", "--limit", "2", "--protocol", "sequential", "--batch", "1", "--method", method)
    document = rebind(*words, "--model", model, *FAST, json=True).document
    assert [state["edits"] for state in document["summary"]["states"]] == [0, 1, 2]
    assert document["summary"]["states"][-1]["scores"]["ES"]["value"] is not None


def test_runs_are_shown_and_compared(rebind, fails, model, facts, tmp_path):
    words = (
        "eval",
        "--facts",
        facts,
        "--limit",
        "2",
        "--protocol",
        "sequential",
        "--batch",
        "1",
        "--model",
        model,
        *FAST,
    )
    shown = rebind(*words, "--out", "a", "--method", "memit")
    for expected in (
        "memit on tiny, batches of 1 in sequence: 2 records",
        "before",
        "95 %",
        "perplexity",
        "report.png",
        "written",
    ):
        assert expected in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    rebind(*words, "--out", "b", "--method", "rome")
    both = rebind("eval", "compare", "a", "b", "--figure", "both.png")
    assert "memit" in both.out
    assert "rome" in both.out
    assert Path("both.png").exists()
    document = rebind("eval", "compare", "a", "b", json=True).document
    assert [run["name"] for run in document["runs"]] == ["memit", "rome"]
    assert rebind("eval", "compare", "a", "b", "--quiet").out.startswith("| run | edits |")
    assert fails("eval", "compare", "a").code == "too_few_runs"


@pytest.mark.parametrize("columns", [120, 80, 40])
@pytest.mark.parametrize(
    "names", [("memit", "rome"), ("memit-sequential-200-3f2a91c0", "memit-sequential-200-9b1c22d0")]
)
def test_a_comparison_breaks_no_number_and_no_name(columns, names):
    """Every number of every run stands whole under its run and its edits, in the row of its score."""
    header = ["run", "edits", "records", "S", "portability", "perplexity"]
    rows = [
        [name, f"{100 * step:,}" if step else "before", "1,234", f".{place}{step}1", f".{place}{step}2", "18.29"]
        for place, name in enumerate(names)
        for step in range(5)
    ]
    terminal = Terminal()
    terminal.out = Console(width=columns, file=StringIO())
    print_states(terminal, header, rows)
    text = terminal.out.file.getvalue()
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    found = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        lines = [line.split() for line in part.splitlines() if "──" not in line and line.strip()]
        cells = {line[0]: line[1:] for line in lines if line[0] in header}
        edits = [word for word in next(line for line in lines if line[0] == "score")[1:] if word != "after"]
        found += list(zip(edits, *(cells[name] for name in header[2:]), strict=True))
    assert found == [tuple(row[1:]) for row in rows]
    assert all(word in text for name in names for word in name.split("-"))


def test_bad_records_are_an_error_or_counted(rebind, fails, model, facts):
    words = ("eval", "--facts", facts, "--model", model, "--protocol", "batch", *FAST)
    assert "line 4 of facts.jsonl (id broken)" in fails(*words).problem.lower()
    done = rebind(*words, "--skip-bad")
    assert done.err.count("skipped: ") == 2, "an invalid record, and one that contradicts another"
    assert "2 records" in done.out
    alone = rebind("eval", "--facts", facts, "--limit", "3", "--model", model, *FAST, json=True).document
    assert alone["summary"]["states"][0]["records"] == 3, (
        "with the single protocol, records cannot contradict each other"
    )


def test_options_reach_the_evaluation(rebind, model, facts, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The capital of Italy is Rome. " * 9)
    words = ("eval", "--facts", facts, "--limit", "1", "--known", "--skip-bad", "--model", model, *FAST)
    more = ("--layers", "1", "--lam", "2.5", "--text", text, "--method", "alphaedit", "--out", "x")
    document = rebind(*words, *more, json=True).document
    assert document["config"]["settings"] == {"layers": [1], "lam": 2.5, "steps": 2}
    assert document["config"]["data"]["name"].endswith(", known")
    assert document["summary"]["states"][0]["scores"]["ES"]["value"] == 0
