"""Rows and summaries that were forged with matching digests are refused with an error of rebind."""

from __future__ import annotations

import json
import shutil

import pytest

from rebind.errors import InputError
from rebind.evals import compare
from rebind.storage import JsonLines, check_json, seal_json, write_json
from tests.evals.runs import RAW, new_editor, run
from tests.support import raises

OPTIONS = {"raw": RAW[:2], "baselines": True}
FORGED_ROWS = [
    *(("records.jsonl", {"neighbors": bad}) for bad in (True, None, [], {"start": 3}, {"start": [None]})),
    *(("records.jsonl", {"facts": bad}) for bad in (True, [], [None], [{}], [{"start": {"prompt": {}}}])),
    *(("records.jsonl", {"choice": bad}) for bad in (None, [], [3], [{"nll": None}, {"nll": 1.0}])),
    *(("records.jsonl", change) for change in ({"edits": 99}, {"edits": "x"}, {"record": -1}, {"record": None})),
    *(("records.jsonl", change) for change in ({"texts": 3}, {"texts": [None]}, {"consequences": [[{}]]})),
    *(("drift.jsonl", change) for change in ({"kl": "x"}, {"perplexity": []}, {"edits": [3]}, {"growth": {}})),
    *(("edits.jsonl", {"records": bad}) for bad in (None, [], ["x"], [10**30], [-1])),
    *(("baselines.jsonl", change) for change in ({"baseline": "x"}, {"baseline": []}, {"record": 1}, {"facts": 3})),
]
FORGED_SUMMARIES = [
    *({"states": bad} for bad in (None, [], 3, [{}], [{"edits": "x", "records": 1, "scores": {}}])),
    *({"baselines": bad} for bad in (None, [3], [{"name": "lora", "scores": 3}])),
    *({"retention": bad} for bad in (3, [None], [{"records": [1], "scores": {}}])),
    {"skipped": [], "protocol": []},
]


@pytest.fixture(scope="module")
def finished_run(finished, tmp_path_factory):
    """The folder of a small run with baselines, and its editor."""
    editor = new_editor()
    return run(tmp_path_factory.mktemp("stored") / "run", "sequential", editor, **OPTIONS).folder, editor


@pytest.mark.parametrize(("name", "change"), FORGED_ROWS)
def test_a_forged_row_is_refused(finished_run, tmp_path, name, change):
    folder, editor = finished_run
    copy = shutil.copytree(folder, tmp_path / "run")
    rows = JsonLines(copy / name)
    first, *others = rows.read()
    rows.truncate(0)
    rows.append([{**first, **change}, *others])
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    with raises(InputError, "damaged_row"):
        run(copy, "sequential", editor, **OPTIONS)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before


def forged_copy(folder, into, name, change):
    """Return a copy of a run in which fields of a JSON file are exchanged, with a digest that matches."""
    copy = shutil.copytree(folder, into)
    fields = check_json(json.loads((copy / name).read_text()))
    write_json(copy / name, seal_json({**fields, **change}))
    return copy


@pytest.mark.parametrize("change", FORGED_SUMMARIES)
def test_a_forged_summary_is_refused(finished_run, tmp_path, change):
    folder, _ = finished_run
    assert compare([folder, forged_copy(folder, tmp_path / "same", "summary.json", {})]).rows
    copy = forged_copy(folder, tmp_path / "run", "summary.json", change)
    with raises(InputError, "summary_damaged"):
        compare([folder, copy])


@pytest.mark.parametrize("bad", [None, [], {"a": 1}, 3])
def test_a_forged_method_in_the_settings_breaks_no_comparison(finished_run, tmp_path, bad):
    folder, _ = finished_run
    copy = forged_copy(folder, tmp_path / "run", "config.json", {"method": bad})
    assert len(compare([folder, copy]).runs) == 2
