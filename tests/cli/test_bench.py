"""`rebind bench` as its users meet it."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from rebind.bench import scan
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.terminal import Screen

FAST = ["--shapes", "1x16x2x8,1x32x2x8", "--rules", "gated delta", "--only", "ours,loop", "--seconds", "0.1"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch, tmp_path):
    monkeypatch.setattr("rebind.bench.scan.peak", lambda *_: 1.0)  # a process each
    monkeypatch.chdir(tmp_path)


def test_people_see_a_table_and_where_it_is(rebind, tmp_path):
    shown = rebind("bench", "scan", *FAST, "--rounds", "3")
    for expected in ("1x16x2x8", "1x32x2x8", "ours", "loop", "both ms", "written to runs/bench/scan-cpu.json"):
        assert expected in shown.out
    assert shown.err == "", "bars are for terminals"
    assert max(map(len, shown.out.splitlines())) <= 100
    for suffix in ("json", "png", "svg"):
        assert (tmp_path / "runs" / "bench" / f"scan-cpu.{suffix}").stat().st_size


def test_a_narrow_screen_is_told_once_what_it_lacks(rebind, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = rebind("bench", "scan", *FAST, "--rounds", "3").out
    assert " ".join(shown.split()).count("too narrow for the first calls (first s, then s)") == 1
    assert max(map(len, shown.splitlines())) <= 60


def test_programs_get_one_document(rebind, tmp_path):
    document = rebind("bench", "scan", *FAST, "--out", "here", "--threads", "1", json=True).document
    assert [(row["shape"], row["name"]) for row in document["rows"]] == [
        (shape, name) for shape in ("1x16x2x8", "1x32x2x8") for name in ("ours", "loop")
    ]
    assert all(row["both"] > row["forward"] > 0 and row["error"] < 1e-5 for row in document["rows"])
    assert document["machine"]["threads"] == 1
    assert document["written"] == ["here/scan-cpu.json", "here/scan-cpu.png", "here/scan-cpu.svg"]
    assert json.loads((tmp_path / "here" / "scan-cpu.json").read_text())["rows"] == document["rows"]
    assert rebind("bench", "scan", *FAST, "--quiet").out == "runs/bench/scan-cpu.json\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shapes", "1x2"], "shape is '1x2', expected BxTxHxD"),
        (["--rules", "dleta"], "rule is 'dleta', expected one of gated delta"),
        (["--only", "nobody"], "nobody here is named nobody, expected some of ours"),
        (["--dtype", "int8"], "dtype is 'int8', expected one of"),
    ],
)
def test_bad_input(rebind, words, says):
    assert says in rebind("bench", "scan", *words, code=2).err


def test_a_place_that_cannot_be_written_is_refused_before_the_work(rebind, monkeypatch):
    monkeypatch.setattr(scan, "run", lambda *_, **__: pytest.fail("too late"))
    told = rebind("bench", "scan", *FAST, "--out", __file__, code=2).err
    assert "is a file, expected a folder: name another with --out" in told


def test_no_table_is_written_on_the_line_of_the_bar(rebind, monkeypatch):
    drawn, show, run = [], Screen.show, scan.run

    @contextmanager
    def draw(self):
        drawn.append(self)
        try:
            yield self
        finally:
            drawn.clear()

    def shown(self, *lines, **options):
        assert not drawn
        show(self, *lines, **options)

    def stopped(*given, **named):
        run(*given, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(Bars, "drawn", draw)
    monkeypatch.setattr(Screen, "show", shown)
    assert "both ms" in rebind("bench", "scan", *FAST, "--rounds", "3").out
    monkeypatch.setattr(scan, "run", stopped)
    kept = rebind("bench", "scan", *FAST, "--rounds", "3", code=130).out
    assert "1x16x2x8" in kept, "shapes that were done are shown"
