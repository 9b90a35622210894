"""`rebind lab` on the command line."""

from __future__ import annotations

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from rebind.cli.app import app
from rebind.lab import EXPERIMENTS

TINY = ["ttt-1d", "--quick", "widths=2,4,8", "tasks=64", "--seeds", "1"]
FAILING = ["ttt-1d", "--quick", "widths=2,4,8", "tasks=8", "outer=4", "--seeds", "1"]  # W₀ is hardly learned


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def lab(*words: str, code: int = 0):
    result = CliRunner().invoke(app, ["lab", *words])
    assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def test_without_a_name_it_lists(monkeypatch):
    document = json.loads(lab("--json").stdout)["experiments"]
    assert [one["name"] for one in document] == lab("--quiet").stdout.split() == list(EXPERIMENTS)
    assert {"name", "title", "answers", "cpu_time", "gpu_time"} == set(document[0])
    for words in ((), ("list",)):
        shown = " ".join(lab(*words).stdout.split())
        assert all(text in shown for one in EXPERIMENTS.values() for text in (one.title, one.answers, one.cpu_time))
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, lab().stdout.splitlines())) <= 80


def test_a_run_shows_its_claims_and_is_resumed(tmp_path):
    shown = lab(*TINY, "--out", str(tmp_path / "out")).stdout
    assert "batch descent with η = ½ from 0 is linear attention" in shown
    assert "✓" in shown
    assert "✗" not in shown
    assert "figure.png, figure.svg" in shown
    assert "28, 28 of them from an earlier run" in lab(*TINY, "--out", str(tmp_path / "out")).stdout


def test_a_claim_that_does_not_hold_is_named_and_fails_the_command(tmp_path):
    result = lab(*FAILING, "--out", str(tmp_path / "out"), code=1)
    assert "✗" in result.stdout
    assert re.search(r"error: \d of 7 claims do not hold: .*a learned W₀ saves more than half", result.stderr)
    assert "linear attention" not in result.stderr
    document = json.loads(lab(*FAILING, "--out", str(tmp_path / "out"), "--json", code=1).stdout)
    failed = [claim["statement"] for claim in document["claims"] if not claim["holds"]]
    assert "a learned W₀ saves more than half of them" in failed


def test_json_is_one_document(tmp_path):
    document = json.loads(lab(*TINY, "--out", str(tmp_path / "out"), "--json").stdout)
    assert document["config"]["settings"]["widths"] == [2, 4, 8]
    assert document["config"]["settings"]["seeds"] == 1
    assert {"statement", "holds", "measured"} == set(document["claims"][0])
    assert len(document["rows"]) == 28
    assert document["seconds"] > 0


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'rebind[lab]'" in lab(*TINY, "--out", str(tmp_path / "out")).stdout
    assert not (tmp_path / "out" / "figure.png").exists()


def test_without_a_folder_it_uses_one_in_runs(tmp_path):
    folder = lab(*TINY, "--quiet").stdout.strip()
    assert folder.startswith("runs/lab-ttt-1d-")
    assert (tmp_path / folder / "points.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["hopfeild"], "unknown_experiment"),
        (["hopfield", "unit=3"], "unknown_setting"),
        (["hopfield", "units"], "not_a_setting"),
        (["closed-form", "keys=square"], "unknown_keys"),
        (["hopfield", "--quick", "--device", "abacus"], "unusable_device"),
    ],
)
def test_wrong_input_is_one_line(words, code):
    result = lab(*words, "--json", code=2)
    assert json.loads(result.stdout)["error"]["code"] == code
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
