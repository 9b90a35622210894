"""The benchmark of a growing dense memory, on a tiny model."""

from __future__ import annotations

import pytest

from benchmarks import dense_scale
from benchmarks.dense_scale import Rows, Scale, made_names
from tests import tiny
from tests.edit.editors import open_editor

TEXT = "\n".join(tiny.SENTENCES * 10)


def test_names_are_made_the_same_way_every_time():
    names = made_names(500)
    assert len(set(names)) == 500
    assert made_names(300) == names[:300]


def test_everything_is_measured_and_the_model_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(dense_scale, "WINDOW", 16)
    monkeypatch.setattr(dense_scale, "REPEATS", 1)
    editor = open_editor()
    editor.edited.dense.load(1)
    rows = Rows(editor, 1, 300, framed=3, forward=200)
    row = Scale(rows, TEXT, 200).measure(300, ledger=True)
    assert row["facts"] == 300
    assert row["rows"] >= 300
    assert row["file MB"] == pytest.approx(row["MB"], rel=0.2)
    assert 0 < row["read, prompt"] < 100
    assert 0 <= row["fires"] <= 1
    assert {"save", "load", "attach", "open", "add one", "undo one", "missed", "right"} <= set(row)
    assert not editor.ledger.edits
    assert not editor.edited.dense.memories
