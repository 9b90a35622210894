"""`rebind lab` as it is typed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rebind.cli.app import app
from rebind.lab.catalogue import EXPERIMENTS

TINY = ["ttt-1d", "--quick", "widths=2,4,8", "tasks=8", "outer=4", "--seeds", "1"]


@pytest.fixture(autouse=True)
def wide(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def lab(*words: str, code: int = 0):
    result = CliRunner().invoke(app, ["lab", *words])
    assert result.exit_code == code, (
        f"{words}: {result.exit_code}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
    )
    return result


def test_without_a_name_it_lists():
    shown = lab().stdout
    for experiment in EXPERIMENTS.values():
        assert experiment.name in shown
        assert experiment.takes in shown
        assert experiment.on_gpu in shown
    assert {"name", "title", "answers", "takes", "on_gpu"} == set(json.loads(lab("--json").stdout)["experiments"][0])
    assert lab("--quiet").stdout.split() == lab("list", "--quiet").stdout.split() == list(EXPERIMENTS)


def test_a_run_shows_its_claims_and_leaves_its_folder(tmp_path):
    shown = lab(*TINY, "--out", str(tmp_path / "out")).stdout
    assert "✓" in shown
    assert "batch descent with η = ½ from 0 is linear attention" in shown
    assert "figure.png" in shown
    assert "figure.svg" in shown
    again = lab(*TINY, "--out", str(tmp_path / "out")).stdout
    assert "of them from before" in again


def test_json_is_one_document(tmp_path):
    document = json.loads(lab(*TINY, "--out", str(tmp_path / "out"), "--json").stdout)
    assert document["config"]["settings"]["widths"] == [2, 4, 8]
    assert document["config"]["settings"]["seeds"] == 1
    assert {"says", "holds", "got"} == set(document["claims"][0])
    assert len(document["rows"]) == 28


def test_a_figure_asks_for_matplotlib_only_where_it_is_missing(tmp_path, monkeypatch):
    def broken(figure, stem):
        raise ValueError("nothing to draw")

    with monkeypatch.context() as patched:
        patched.setattr("rebind.lab.style.save", broken)
        result = lab(*TINY, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out" / "figure.png").exists()
    assert "pip install" not in result.stdout + result.stderr
    for module in ("rebind.lab.run", "rebind.cli.commands.lab"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    result = lab(*TINY, "--out", str(tmp_path / "out"))
    assert "no figure: pip install 'rebind[lab]'" in result.stdout + result.stderr


def test_help_leaves_the_seeds_to_the_experiment():
    assert "Seeds a point. Default: the experiment's own." in lab("--help").stdout


def test_without_a_folder_it_takes_one_in_runs(tmp_path):
    folder = lab(*TINY, "--quiet").stdout.strip()
    assert folder.startswith("runs/lab-ttt-1d-")
    assert (tmp_path / folder / "points.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hopfeild"], "unknown experiment 'hopfeild', expected one of capacity,"),
        (["hopfield", "unit=3"], "unknown setting 'unit'"),
        (["hopfield", "units"], "expected key=value"),
        (["hopfield", "units=many"], "units is 'many', expected a whole number"),
        (["closed-form", "keys=square"], "keys are square, expected some of sphere, correlated"),
        (["capacity", "--quick", "features=dpfp-9"], "unknown feature 'dpfp-9'"),
        (["overwrite", "--quick", "rules=adam"], "unknown rule 'adam'"),
        (["overwrite", "--quick", "features=softmax"], "expected sum alone with softmax"),
        (["forgetting", "--quick", "pools=8"], "pool 8 has 512 distinct keys and the stream 640 writes"),
        (["hopfield", "--quick", "--device", "abacus"], "device 'abacus' cannot be used here"),
    ],
)
def test_what_cannot_be_used_is_one_line(words, says):
    result = lab(*words, code=2)
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
