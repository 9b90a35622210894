"""What the benchmark says it measured, it measured."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from rebind.bench import clock
from rebind.bench.clock import Floors, race
from rebind.bench.contenders import contenders, forward, inputs
from rebind.bench.figure import draw, lines
from rebind.bench.memory import peak
from rebind.bench.scan import Row, Setup, parse_shape
from rebind.bench.table import spared, tables
from rebind.cli.app import app
from rebind.errors import InputError

SHAPE = (1, 40, 2, 8)


def row(name: str, rule: str, shape: str, both: float) -> dict:
    return {"name": name, "rule": rule, "shape": shape, "both": both, "peak_mib": both}


DOCUMENT = {
    "note": "cpu, float32; medians",
    "machine": {"processor": "a CPU", "threads": 2, "gpu": "none", "torch": "2"},
    "rows": [
        row("ours", "gated delta", "1x64x8x64", 1.0),
        row("ours", "gated delta", "1x128x8x64", 2.0),
        row("ours", "sum", "1x128x8x64", 1.0),
        row("peer", "gated delta", "1x128x8x64", 6.0),
        row("peer", "gated delta", "1x64x8x64", 3.0),
        row("ours", "gated delta", "8x64x8x64", 7.0),
        row("ours", "gated delta, decoding", "1x1x8x64", 0.1),
    ],
}


def test_everybody_computes_the_same():
    leaves = inputs(SHAPE, "cpu", torch.float64)
    field, _ = contenders("cpu")
    ours = {c.rule: forward(c.run, leaves) for c in field if c.name == "ours"}
    peers = [c for c in field if c.name != "ours" and c.rule in ours]
    assert {c.name for c in peers} >= {"loop"}
    for peer in peers:
        found = forward(peer.run, leaves) * (SHAPE[3] ** 0.5 if peer.scaled else 1.0)
        assert torch.allclose(found.double(), ours[peer.rule], atol=1e-5), peer.name


def test_floors_are_the_articles():
    gated = Floors.of((1, 1, 1, 128), "gated delta", torch.bfloat16)
    assert (gated.bytes_forward, gated.bytes_both) == (1032, 1032 + 1808)
    assert (round(gated.flops_forward / 1e3), round(gated.flops_both / 1e3)) == (167, 167 + 393)
    softmax = Floors.of((1, 640, 1, 128), "softmax", torch.bfloat16)
    chunks = Floors.of((1, 640, 1, 128), "gated delta", torch.bfloat16)
    assert softmax.flops_forward == pytest.approx(chunks.flops_forward, rel=0.02), "they cross at 640 tokens"


@pytest.fixture
def several(monkeypatch):
    """More than one thread, as far as the clock knows."""
    monkeypatch.setattr(clock, "alone", lambda device: False)


def test_one_threads_time_is_the_processors(monkeypatch):
    monkeypatch.setattr(clock, "alone", lambda device: True)
    assert clock.timed(lambda: time.sleep(0.05), "cpu") < 10


@pytest.mark.usefixtures("several")
def test_disturbed_timings_are_left_out(monkeypatch):
    # Timing by timing; after one that was disturbed it is asked again until all is still.
    taken = iter([False, True, False, False, True, True, False, False])
    monkeypatch.setattr(clock.Others, "disturb", property(lambda self: next(taken)))
    ticks = iter([500.0, 500.0, 1.0, 100.0, 2.0, 100.0, 3.0])  # ms: two to see how long it takes, then the rounds
    monkeypatch.setattr(clock, "timed", lambda call, device, inner=1: next(ticks))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert race({"x": lambda: None}, "cpu", 3, 60.0) == clock.Race({"x": 2.0}, True)
    assert not list(ticks)


@pytest.mark.usefixtures("several")
def test_a_machine_that_is_never_calm_is_said(monkeypatch):
    monkeypatch.setattr(clock.Others, "disturb", property(lambda self: True))
    found = race({"x": lambda: time.sleep(1e-3)}, "cpu", 3, 1e-3)
    assert not found.calm
    assert found.medians["x"] >= 1


@pytest.mark.parametrize(("cores", "disturb"), [(0.0, False), (1.0, True)])
def test_others_are_everybody_but_ourselves(cores, disturb, monkeypatch):
    monkeypatch.setattr(clock, "_busy", lambda: time.process_time() + cores * time.perf_counter())
    others = clock.Others()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.1:
        pass
    assert others.disturb is disturb


def test_memory_grows_with_the_inputs():
    (ours,) = (c for c in contenders("cpu")[0] if (c.name, c.rule) == ("ours", "gated delta"))
    size = 8192 * 8 * 64 * 4 / 2**20  # one of q, k, v
    found = peak(ours, (1, 8192, 8, 64), "cpu", torch.float32)
    assert found is not None
    assert 8 * size < found < 25 * size, "inputs, their gradients, the output and its cotangent, states and T0"


def test_lines_of_one_family():
    where, found = lines(DOCUMENT, "both")
    assert where == "batch 1, 8 heads of 64"
    assert found == {("ours", "gated delta"): [(64, 1.0), (128, 2.0)], ("peer", "gated delta"): [(64, 3.0), (128, 6.0)]}


def test_figures(tmp_path):
    paths = tmp_path / "a.png", tmp_path / "a.svg"
    assert draw(DOCUMENT, *paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "3.0× ours" in paths[1].read_text()
    assert not draw(DOCUMENT | {"rows": DOCUMENT["rows"][:1]}, tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_setup():
    assert len(Setup.of("cpu", quick=True).shapes) == 2
    assert Setup.of("cpu").dtype == torch.float32
    with pytest.raises(InputError, match="expected one of gated delta"):
        Setup.of("cpu", rules=("dleta",))
    with pytest.raises(InputError, match="expected BxTxHxD"):
        parse_shape("1x2x3")


# Tables

NUMBERS = {
    "forward": 1111.0, "both": 2222.0, "kernels_forward": 3333.0, "kernels_both": 4444.0, "peak_mib": 55555.0,
    "first_s": 66.66, "first_both_s": 77.77, "error": 8e-08, "io_both": 0.91, "flop_both": 0.92,
}  # fmt: skip
TOLD = ("1111", "2222", "3333", "4444", "55555", "66.66", "77.77", "8e-08", "91%", "92%")
HEADS = ("fwd ms", "both ms", "fwd alone", "both alone", "MiB", "first s", "then s", "error", "I/O", "FLOP")


def printed(row: Row, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(*tables([row], width))
    return shown.get().splitlines()


@pytest.mark.parametrize("width", [120, 100, 80, 60, 40, 30])
@pytest.mark.parametrize("gpu", [False, True])
def test_numbers_are_whole_or_left_out_and_said(width, gpu):
    given = {name: value for name, value in NUMBERS.items() if gpu or not name.startswith("kernels")}
    row = Row("1x64x8x64", "gated delta", "transformers", **given)
    shown = printed(row, width)
    assert max(map(len, shown)) <= width
    assert "…" not in "".join(shown)
    rule = next(place for place, line in enumerate(shown) if "──" in line)
    heads, cells, told = shown[:rule], " ".join(shown[rule:]).split(), spared([row], width) or ""
    for head, number in zip(HEADS, TOLD, strict=True):
        there = any(head in line for line in heads)
        assert (number in cells) is there
        assert (head in told) is (not there and (gpu or "alone" not in head))


def test_first_calls_are_what_a_screen_of_80_does_without():
    row = Row("1x64x8x64", "gated delta", "transformers", **{**NUMBERS, "kernels_forward": None, "kernels_both": None})
    other = replace(row, shape="1x128x8x64")
    assert spared([row, other], 80) == "too narrow for the first calls (first s, then s): they are in the JSON file"
    assert spared([row, other], 100) is None


def test_what_nobody_measured_has_no_column():
    decoding = Row("1x1x8x64", "gated delta, decoding", "ours", forward=0.125)
    shown = "\n".join(printed(decoding, 80))
    assert "fwd ms" in shown
    assert not any(head in shown for head in HEADS[1:])
    assert spared([decoding], 30) is None


def test_a_device_that_is_none_is_refused_in_words(tmp_path):
    told = CliRunner().invoke(app, ["bench", "scan", "--device", "foo", "--out", str(tmp_path)])
    assert told.exit_code == 2
    assert "device 'foo' cannot be used here" in told.stderr
    assert "expected cpu, cuda or mps: try cpu" in told.stderr
