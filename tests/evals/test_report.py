"""Tables, figures and runs side by side."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from rebind.errors import InputError
from rebind.evals import compare, figures, read_records
from rebind.evals.figures import KEPT_LABELS, SAID_LABELS, draw_runs
from rebind.evals.summary import (
    format_score,
    framings_table,
    markdown_report,
    retention_table,
    scores_table,
    states_table,
    summarize_run,
)
from rebind.models import LanguageModel
from rebind.storage import RunFolder, seal_json, write_json
from tests.evals.runs import RAW, lines, run
from tests.support import raises

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs(finished, tmp_path_factory) -> list[Path]:
    """The folders of two sequential runs, by memit and by rome."""
    rome = run(tmp_path_factory.mktemp("runs") / "rome", "sequential", method="rome")
    return [finished("sequential").folder, rome.folder]


@pytest.fixture
def summary(finished) -> dict[str, Any]:
    """A copy of the summary of a sequential run."""
    return json.loads((finished("sequential").folder / "summary.json").read_text())


# Runs side by side


def changed(folder: Path, into: Path, **parts: Any) -> Path:
    """Return a copy of a run with other settings."""
    shutil.copytree(folder, into)
    config = RunFolder.read_config(into, "evaluation")
    for path, value in parts.items():
        *outer, last = path.split("__")
        functools.reduce(dict.__getitem__, outer, config)[last] = value
    write_json(into / "config.json", seal_json({"kind": "evaluation", **config}))
    return into


def test_runs_side_by_side(runs, tmp_path):
    both = compare(runs)
    assert both.header[:5] == ["run", "edits", "records", "free", "EA"]
    assert both.header[-3:] == ["perplexity", "kl", "growth"]
    states = [(row[0], row[1]) for row in both.rows[:5]]
    assert states == [*(("memit", edits) for edits in ("before", "2", "4", "5")), ("rome", "before")]
    used = [json.loads((run / "config.json").read_text())["used"] for run in runs]
    assert used[0]["layers"] != used[1]["layers"]
    assert both.notes == [], "settings that follow from the method are not noted"
    assert both.markdown.startswith("| run | edits |")
    draw_runs(tmp_path / "new" / "both.png", both.runs)
    assert (tmp_path / "new" / "both.png").read_bytes().startswith(PNG)


def test_runs_of_one_method_go_by_what_tells_their_folders_apart(runs, finished, tmp_path):
    batch = finished("batch").folder
    for names in (["first", "second"], ["a/run", "b/run"], ["x/same/run", "y/same/run"]):
        assert [name for name, _ in compare([changed(batch, tmp_path / name) for name in names]).runs] == names
    three = compare([tmp_path / "x/same/run", tmp_path / "y/same/run", runs[1]]).runs
    assert [name for name, _ in three][:2] == ["x/same/run", "y/same/run"]
    draw_runs(tmp_path / "both.png", three)
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


def test_what_cannot_be_compared(runs, tmp_path):
    unfinished = changed(runs[0], tmp_path / "unfinished")
    (unfinished / "summary.json").unlink()
    wrong = {
        "too_few_runs": runs[:1],
        "not_a_run_folder": [tmp_path, tmp_path],
        "run_not_finished": [runs[0], unfinished],
    }
    for code, folders in wrong.items():
        with raises(InputError, code):
            compare(folders)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"seed": 1}, "seed (0, 1)"),
        ({"protocol__batch": 7}, "protocol.batch (2, 7)"),
        ({"settings__lam": 2.5}, "settings.lam (None, 2.5)"),
        ({"used__targets__clamp": 9.0}, "used.targets.clamp (0.75, 9.0)"),
        ({"moments__tokens": 9}, "moments.tokens (600, 9)"),
        ({"model__dtype": "float16"}, "model.dtype (float32, float16)"),
        ({"questions__free_tokens": 9}, "questions.free_tokens (4, 9)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_differ_are_noted(runs, tmp_path, parts, name):
    other = changed(runs[0], tmp_path / "other", **parts)
    assert compare([runs[0], other]).notes == [f"The runs differ in {name}."]


# Numbers that are not finite


def break_perplexity(summary: dict[str, Any], *places: int) -> dict[str, Any]:
    """Return a copy of a summary in which the perplexity of some states is not finite."""
    copy = json.loads(json.dumps(summary))
    for place in places:
        copy["states"][place]["drift"]["perplexity"] = None
    return copy


def test_a_perplexity_that_is_not_finite_is_in_the_tables(summary):
    summary = break_perplexity(summary, -1)
    before = format_score(summary["states"][0]["drift"]["perplexity"])
    assert ["perplexity", before, "not finite", "", "of text that no edit is about"] in scores_table(summary)[1]
    header, rows = states_table([("", summary)])
    assert [row[header.index("perplexity")] == "not finite" for row in rows] == [False, False, False, True]
    assert f"| perplexity | {before} | not finite |" in markdown_report(summary)


def test_a_broken_model_is_reported_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModel, "text_nll", lambda *_, **__: (1e6, 10))
    result = run(tmp_path, "batch", raw=RAW[1:2])
    assert result.summary["states"][-1]["drift"]["perplexity"] is None
    assert "| perplexity | not finite | not finite |" in (tmp_path / "table.md").read_text()


def test_a_perplexity_that_is_not_finite_is_marked(summary):
    for places in ((), (2,), (-1,), range(4)):
        axes = figures.draw([("memit", break_perplexity(summary, *places))]).axes[2]
        marks = [line for line in axes.lines if line.get_marker() == "x"]
        assert [len(mark.get_xdata()) for mark in marks] == ([len(places)] if places else [])


# Tables


SCORE = {"value": 0.5, "low": 0.25, "high": 0.75, "records": 3}


def test_every_model_has_a_row_per_framing(summary):
    for state in (summary["states"][0], summary["states"][-1]):
        state["scores"] = {"free": SCORE, "EA": SCORE, "free_chat": SCORE, "S_chat": SCORE, "locality": SCORE}
    summary["baselines"] = [{"name": "prompt", "records": 3, "scores": {"free": SCORE, "choice": SCORE}}]
    header, rows = framings_table(summary)
    assert header[:5] == ["model", "framing", "free", "95 %", "EA"]
    assert rows[0] == ["before", "start", ".500", ".250 – .750", ".500", *[""] * 5]
    assert [row[:2] for row in rows[1:]] == [
        ["before", "chat"],
        ["after", "start"],
        ["after", "chat"],
        ["prompt", "start"],
    ]
    assert rows[1] == ["before", "chat", ".500", ".250 – .750", *[""] * 5, ".500"]
    header, rows = scores_table(summary)
    assert header == ["score", "before", "after", "95 %", "prompt", "meaning"]
    assert rows[0][:5] == ["locality", ".500", ".500", ".250 – .750", ""]


def test_a_sequence_shows_what_is_left_of_the_first_records(summary):
    header, rows = retention_table(summary)
    assert header == ["written", "free", "EA"]
    assert [row[0] for row in rows] == ["1 – 2", "3 – 4", "5 – 5"]
    assert "| 1 – 2 |" in markdown_report(summary)


def test_many_batches_are_put_together_by_age(finished):
    folder = finished("sequential").folder
    config = json.loads((folder / "config.json").read_text())
    config["protocol"]["batch"] = 1
    rows = [row for row in lines(folder) if row["edits"] in (0, 5)]
    many = [{**rows[index % 5], "edits": 35, "record": index} for index in range(35)]
    records = [read_records(RAW)[index % 5] for index in range(35)]
    ages = summarize_run(config, records, many, [])["retention"]
    assert [group["records"] for group in ages] == [[begin, min(begin + 4, 35)] for begin in range(0, 35, 4)]


# Layout

NAMES = [
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "bundled"),
    (
        "/home/someone/models/" + "a-model-of-a-very-long-name-" * 4 + "7b",
        "hf:someone/a-dataset-of-a-name-as-long-as-this-one-or-longer:validation",
    ),
]


def boxes_of(figure: Figure, artists: Sequence[Any]) -> list[Any]:
    """Return where the artists are drawn; all of them must be inside the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [artist.get_window_extent(canvas.get_renderer()) for artist in artists]
    for artist, box in zip(artists, boxes, strict=True):
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, artist
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, artist
    return boxes


@pytest.mark.parametrize(("model", "data"), NAMES, ids=["short", "long"])
def test_texts_are_inside_the_figure_and_do_not_overlap(summary, model, data):
    summary |= {"model": model, "data": data, "method": "alphaedit", "batch": 1000}
    scores = dict.fromkeys((*SAID_LABELS, *KEPT_LABELS), SCORE)
    summary["states"][-1]["scores"] |= scores
    summary["baselines"] = [{"name": name, "records": 5, "scores": scores} for name in ("prompt", "lora")]
    alone = {**summary, "states": summary["states"][::3], "retention": []}
    several = [(f"somewhere-{place}/alphaedit-sequential-1000-3f2a91c{place}", summary) for place in range(5)]
    for runs in ([("after", summary)], [("after", alone)], several):
        figure = figures.draw(runs)
        texts = [text for text in figure.findobj(Text) if text.get_visible() and len(text.get_text()) > 5]  # no numbers
        texts = [text for text in texts if text.get_text() != figure.get_suptitle()]  # has an empty line in it
        boxes = {text.get_text(): box for text, box in zip(texts, boxes_of(figure, texts), strict=True)}
        for (one, box), (other, beside) in itertools.combinations(boxes.items(), 2):
            assert not box.overlaps(beside), (one, other)


@pytest.mark.parametrize("names", [["free_consequences"], ["EA", "NS"], [*SAID_LABELS, *KEPT_LABELS]], ids=len)
@pytest.mark.filterwarnings("error")  # matplotlib warns when a layout does not fit
def test_a_figure_has_room_however_few_scores_it_has(summary, names):
    summary |= {"model": NAMES[1][0], "retention": []}
    summary["states"] = [{**state, "scores": dict.fromkeys(names, SCORE)} for state in summary["states"][::3]]
    many = [(f"somewhere-{place}/alphaedit-sequential-1000-3f2a91c{place}", summary) for place in range(10)]
    for figure in (figures.draw([("after", summary)]), figures.draw(many)):
        (axes, _), (legend,) = figure.axes, figure.legends
        panel, below, _ = boxes_of(figure, [axes, legend, axes.xaxis.label])
        assert below.y1 <= axes.get_tightbbox(bbox_extra_artists=[axes.xaxis, axes.yaxis]).y0, "below the axis"
        assert panel.height >= 0.4 * figure.dpi, "there is room for what is drawn"
