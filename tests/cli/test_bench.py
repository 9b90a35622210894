"""`rebind bench scan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rebind.bench import contenders, scan

SHAPES = ["--shapes", "1x16x2x8,1x32x2x8", "--rules", "gated_delta"]
FAST = ["bench", "scan", *SHAPES, "--only", "ours,loop", "--seconds", "0.1", "--rounds", "3"]


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch):
    monkeypatch.setattr(contenders, "peak_memory", lambda *_: 1.0)  # a process for each measurement of memory


def test_people_see_a_table_per_shape(rebind):
    shown = rebind(*FAST)
    for expected in ("1x16x2x8", "1x32x2x8", "ours", "loop", "wrote runs/bench/scan-cpu.json"):
        assert expected in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


def test_programs_get_one_document(rebind):
    document = rebind(*FAST, "--out", "here", "--threads", "1", json=True).document
    assert [(row["shape"], row["name"]) for row in document["rows"]] == [
        (shape, name) for shape in ("1x16x2x8", "1x32x2x8") for name in ("ours", "loop")
    ]
    assert document["machine"]["threads"] == 1
    assert document["written"] == ["here/scan-cpu.json", "here/scan-cpu.png", "here/scan-cpu.svg"]
    assert json.loads(Path("here/scan-cpu.json").read_text())["rows"] == document["rows"]
    assert all(Path(file).stat().st_size for file in document["written"])


def test_invalid_names_are_refused(rebind):
    for words in (["--shapes", "1x2"], ["--rules", "dleta"], ["--only", "nobody"]):
        rebind("bench", "scan", *words, code=2)


def test_finished_shapes_are_shown_after_an_interrupt(rebind, monkeypatch):
    run = scan.run

    def interrupted(*arguments, **options):
        run(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(scan, "run", interrupted)
    assert "1x16x2x8" in rebind(*FAST, "--shapes", "1x16x2x8", code=130).out
