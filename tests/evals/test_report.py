"""Tables, figures and runs side by side."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from rebind.errors import InputError
from rebind.evals import drift as drift_module
from rebind.evals import figures
from rebind.evals.comparison import compare
from rebind.evals.figures import draw_runs
from rebind.evals.scores import SCORES
from rebind.evals.summary import format_score, markdown_report, scores_table, states_table

from .runs import run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    for method in ("memit", "rome"):
        run(home / method, "sequential", method=method)
    return [home / "memit", home / "rome"]


def test_runs_side_by_side(runs, tmp_path):
    found = compare(runs)
    assert found.header[:5] == ["run", "edits", "records", "S", "ES"]
    assert found.header[-3:] == ["perplexity", "kl", "growth"]
    assert [row[:2] for row in found.rows[:5]] == [["memit", n] for n in ("before", "2", "4", "5")] + [
        ["rome", "before"]
    ]
    assert found.notes == []
    assert found.markdown.startswith("| run | edits |")
    draw_runs(tmp_path / "both.png", found.runs)
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


def test_runs_of_one_method_go_by_their_folders(tmp_path):
    for name in ("first", "second"):
        run(tmp_path / name, "batch")
    found = compare([tmp_path / "first", tmp_path / "second"])
    assert {row[0] for row in found.rows} == {"first", "second"}
    draw_runs(tmp_path / "new" / "both.png", found.runs)
    assert (tmp_path / "new" / "both.png").read_bytes().startswith(PNG)


def test_what_cannot_be_compared(runs, tmp_path):
    with pytest.raises(InputError) as caught:
        compare(runs[:1])
    assert caught.value.code == "too_few_runs"
    with pytest.raises(InputError) as caught:
        compare([tmp_path, tmp_path])
    assert caught.value.code == "not_a_run_folder"
    unfinished = shutil.copytree(runs[0], tmp_path / "unfinished")
    (unfinished / "summary.json").unlink()
    with pytest.raises(InputError) as caught:
        compare([runs[0], unfinished])
    assert caught.value.code == "run_not_finished"


def changed(folder: Path, into: Path, **parts: Any) -> Path:
    """A copy of a run whose config differs."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    for path, value in parts.items():
        *outer, last = path.split("__")
        functools.reduce(dict.__getitem__, outer, config)[last] = value
    (into / "config.json").write_text(json.dumps(config))
    return into


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"seed": 1}, "seed (0, 1)"),
        ({"protocol__batch": 7}, "protocol.batch (2, 7)"),
        ({"settings__lam": 2.5}, "settings.lam (None, 2.5)"),
        ({"used__targets__clamp": 9.0}, "used.targets.clamp (0.75, 9.0)"),
        ({"moments__tokens": 9}, "moments.tokens (1500, 9)"),
        ({"model__dtype": "float16"}, "model.dtype (float32, float16)"),
        ({"questions__free_tokens": 9}, "questions.free_tokens (4, 9)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_differ_are_noted(runs, tmp_path, parts, name):
    other = changed(runs[0], tmp_path / "other", **parts)
    assert compare([runs[0], other]).notes == [f"The runs differ in {name}."]


def test_settings_that_follow_from_the_method_are_not_noted(runs):
    used = [json.loads((run / "config.json").read_text())["used"] for run in runs]
    assert used[0]["layers"] != used[1]["layers"]
    assert compare(runs).notes == []


def test_folders_of_one_name_go_by_what_tells_them_apart(runs, tmp_path, monkeypatch):
    folders = [changed(runs[0], tmp_path / name / "same" / "run") for name in "xy"]
    monkeypatch.chdir(tmp_path)
    found = compare([*folders, runs[1]])
    assert [name for name, _ in found.runs][:2] == ["x/same/run", "y/same/run"]
    near = [changed(runs[0], tmp_path / name / "run") for name in "ab"]
    assert [name for name, _ in compare(near).runs] == ["a/run", "b/run"]
    with pytest.raises(InputError) as caught:
        compare([near[0], Path("a/../a/run")])
    assert caught.value.code == "run_repeated"


# What is not finite


def broken(summary: dict[str, Any], *places: int) -> dict[str, Any]:
    """The summary of a run whose perplexity left all bounds."""
    copy = json.loads(json.dumps(summary))
    for place in places:
        copy["states"][place]["drift"]["perplexity"] = None
    return copy


def test_a_perplexity_that_is_not_finite_is_said_to_be_none(runs, tmp_path):
    summary = broken(json.loads((runs[0] / "summary.json").read_text()), -1)
    before = format_score(summary["states"][0]["drift"]["perplexity"])
    assert ["perplexity", before, "not finite", "", "of text that no edit is about"] in scores_table(summary)
    header, rows = states_table([("", summary)])
    assert [row[header.index("perplexity")] == "not finite" for row in rows] == [False, False, False, True]
    assert f"| perplexity | {before} | not finite |" in markdown_report(summary)


def test_a_broken_model_has_its_row_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(drift_module, "perplexity", lambda nll, tokens: math.inf)
    result = run(tmp_path / "out", "batch")
    assert result.summary["states"][-1]["drift"]["perplexity"] is None
    assert "| perplexity | not finite | not finite |" in (tmp_path / "out" / "table.md").read_text()


def test_finite_points_are_drawn_and_the_others_marked(runs):
    summary = json.loads((runs[0] / "summary.json").read_text())
    values = [state["drift"]["perplexity"] for state in summary["states"]]
    for places in ((), (2,), (-1,), range(4)):
        figure = figures.against_edits([("memit", broken(summary, *places))])
        curve, *marks = figure.axes[1].lines
        finite = [value for value in curve.get_ydata() if not math.isnan(value)]
        assert finite == [value for at, value in enumerate(values) if at not in {place % 4 for place in places}]
        assert [len(mark.get_xdata()) for mark in marks] == ([len(places)] if places else [])
        assert any("not finite" in text.get_text() for text in figure.texts) is bool(places)


def test_what_was_not_measured_is_not_marked(runs):
    summary = json.loads((runs[0] / "summary.json").read_text())
    for state in summary["states"][1:]:
        state["drift"] = {}
    figure = figures.against_edits([("memit", summary)])
    assert len(figure.axes[1].lines) == 1
    assert not any("not finite" in text.get_text() for text in figure.texts)


# Titles


LONG = ["HuggingFaceTB/SmolLM2-135M-Instruct", "/home/someone/models/" + "a-model-of-a-very-long-name-" * 4 + "7b"]


@pytest.mark.parametrize("model", LONG)
@pytest.mark.parametrize("data", ["bundled", "hf:someone/a-dataset-of-a-name-as-long-as-this-one-or-longer:validation"])
def test_titles_stay_within_the_picture(runs, model, data):
    summary = json.loads((runs[0] / "summary.json").read_text()) | {"model": model, "data": data, "method": "alphaedit"}
    summary["batch"] = 1000
    rows = [json.loads(line) for line in (runs[0] / "records.jsonl").read_text().splitlines()]
    names = [f"somewhere-{place}/alphaedit-sequential-1000-3f2a91c{place}" for place in range(5)]
    several = [(name, summary) for name in names]
    drawn = [
        figures.scores([("after", summary)], before=True),
        figures.nll(summary, rows),
        figures.against_edits([("alphaedit", summary)]),
    ]
    for figure in (*drawn, figures.scores(several), figures.against_edits(several)):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        texts = [text for text in figure.findobj(Text) if text.get_visible() and len(text.get_text()) > 5]  # no numbers
        titles = {figure.get_suptitle()}  # holds an empty line for the subtitle
        boxes = {text.get_text(): text.get_window_extent(renderer) for text in texts if text.get_text() not in titles}
        for text, box in boxes.items():
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
            assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
        for (one, box), (other, beside) in itertools.combinations(boxes.items(), 2):
            assert not box.overlaps(beside), (one, other)


# Few scores


def with_scores(summary: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The summary of a run whose records have these scores and no others."""
    one = {"value": 0.9, "low": 0.8, "high": 1.0, "records": 3}
    states = [{**state, "scores": dict.fromkeys(names, one)} for state in summary["states"]]
    return summary | {"states": states}


@pytest.mark.parametrize(
    "names",
    [["free_consequences"], ["EA", "free"], ["EA", "free", "tokens", "free_consequences"], ["S", *SCORES]],
    ids=len,
)
@pytest.mark.parametrize("model", LONG)
@pytest.mark.filterwarnings("error")  # matplotlib warns when a layout does not fit
def test_a_figure_holds_however_few_scores_it_has(runs, names, model):
    summary = with_scores(json.loads((runs[0] / "summary.json").read_text()) | {"model": model}, names)
    two = [("memit", summary), ("rome", summary)]
    many = [(f"somewhere-{place}/alphaedit-sequential-1000-3f2a91c{place}", summary) for place in range(10)]
    for figure in (figures.scores([("after", summary)], before=True), figures.scores(two), figures.scores(many)):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        (axes,), (legend,) = figure.axes, figure.legends
        title = next(text for text in figure.findobj(Text) if text.get_text() == axes.get_title(loc="left"))
        below = axes.get_tightbbox(renderer, bbox_extra_artists=[axes.xaxis, axes.yaxis])
        for box in (title.get_window_extent(renderer), below, legend.get_window_extent(renderer)):
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1
            assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1
        assert legend.get_window_extent(renderer).y1 <= below.y0, "the legend is below the axis and its numbers"
        assert axes.get_window_extent(renderer).height >= 0.4 * figure.dpi, "there is room for what is drawn"


def test_every_fact_of_a_record_is_a_point(runs):
    summary = json.loads((runs[0] / "summary.json").read_text())
    rows = [json.loads(line) for line in (runs[0] / "records.jsonl").read_text().splitlines()]
    told = [len(some.get_offsets()) for some in figures.nll(summary, rows).axes[0].collections]
    for row in rows:
        row["also"] = [{"prompt": row["prompt"], "paraphrases": row["paraphrases"]}]
    neighbors, paraphrases, prompts = told
    again = [len(some.get_offsets()) for some in figures.nll(summary, rows).axes[0].collections]
    assert again == [neighbors, 2 * paraphrases, 2 * prompts]
