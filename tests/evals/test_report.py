"""Tables, figures and runs side by side."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from rebind.errors import InputError
from rebind.evals import report

from .test_run import quick, run  # noqa: F401 - a fixture

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs(quick, tmp_path_factory):  # noqa: F811
    home = tmp_path_factory.mktemp("runs")
    for method in ("memit", "rome"):
        run(home / method, "sequential", method=method)
    return [home / "memit", home / "rome"]


def test_runs_side_by_side(runs, tmp_path):
    found = report.compare(runs)
    assert found.header[:5] == ["run", "edits", "records", "S", "ES"]
    assert found.header[-3:] == ["perplexity", "kl", "growth"]
    assert [row[:2] for row in found.rows[:5]] == [["memit", n] for n in ("before", "2", "4", "5")] + [
        ["rome", "before"]
    ]
    assert found.notes == []
    assert found.markdown.startswith("| run | edits |")
    report.draw_comparison(tmp_path / "both.png", found)
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


def test_what_runs_do_not_share_is_said(runs, tmp_path):
    shutil.copytree(runs[1], tmp_path / "rome")
    file = tmp_path / "rome" / "config.json"
    config = json.loads(file.read_text())
    config["data"]["digest"] = "other"
    file.write_text(json.dumps(config))
    assert report.compare([runs[0], tmp_path / "rome"]).notes == [
        "The runs differ in their records: compare with care."
    ]


def test_runs_of_one_method_go_by_their_folders(tmp_path):
    for name in ("first", "second"):
        run(tmp_path / name, "batch")
    found = report.compare([tmp_path / "first", tmp_path / "second"])
    assert {row[0] for row in found.rows} == {"first", "second"}
    report.draw_comparison(tmp_path / "new" / "both.png", found)
    assert (tmp_path / "new" / "both.png").read_bytes().startswith(PNG)


def test_what_cannot_be_compared(tmp_path):
    with pytest.raises(InputError, match="got 1 run, expected two"):
        report.compare([tmp_path])
    with pytest.raises(InputError, match=r"no summary.json in .*expected a folder that `rebind eval` made"):
        report.compare([tmp_path, tmp_path])
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(InputError, match=r"summary.json cannot be read"):
        report.compare([tmp_path, tmp_path])


def test_without_matplotlib_there_are_numbers_still(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = run(tmp_path / "out", "batch", figures=True).folder
    assert (folder / "table.md").exists()
    assert not list(folder.glob("*.png"))
    run(tmp_path / "other", "batch", method="rome")
    with pytest.raises(InputError, match="figures need matplotlib"):
        report.draw_comparison(tmp_path / "x.png", report.compare([folder, tmp_path / "other"]))
