"""The benchmark measures what it says, and its tables and figures show it."""

from __future__ import annotations

import time

import pytest
import torch
from rich.console import Console

from rebind.bench.contenders import draw_inputs, find_contenders, parse_shape, peak_memory
from rebind.bench.measure import race, timed
from rebind.bench.report import draw, lines, notes, tables
from rebind.bench.scan import Measurement, ScanSetup, floors, run
from rebind.errors import InputError, UnknownNameError
from tests.support import raises

SHAPE = (1, 40, 2, 8)


def row(name: str, rule: str, shape: str, both: float) -> dict:
    return {"name": name, "rule": rule, "shape": shape, "both": both, "peak_mib": both}


DOCUMENT = {
    "note": "cpu, float32; medians",
    "machine": {"processor": "a CPU", "threads": 2, "gpu": "none", "torch": "2"},
    "rows": [
        row("ours", "gated_delta", "1x64x8x64", 1.0),
        row("ours", "gated_delta", "1x128x8x64", 2.0),
        row("ours", "sum", "1x128x8x64", 1.0),
        row("peer", "gated_delta", "1x128x8x64", 6.0),
        row("peer", "gated_delta", "1x64x8x64", 3.0),
        row("ours", "gated_delta", "8x64x8x64", 7.0),
        row("ours", "decoding", "1x1x8x64", 0.1),
    ],
}


@torch.no_grad()
def test_all_contenders_compute_the_same():
    leaves = {form: draw_inputs(SHAPE, "cpu", torch.float64, by_channel=form) for form in (False, True)}
    field, _ = find_contenders("cpu")
    ours = {c.rule: c.run(*leaves[c.by_channel]) for c in field if c.name == "ours"}
    others = [c for c in field if c.name != "ours" and c.rule in ours]
    assert {c.name for c in others} >= {"loop"}
    for other in others:
        out = other.run(*leaves[other.by_channel]) * (SHAPE[3] ** 0.5 if other.scaled else 1.0)
        assert torch.allclose(out.double(), ours[other.rule], atol=1e-5), other.name


def test_a_run_measures_the_rules_that_were_chosen():
    seen = []
    setup = ScanSetup("cpu", shapes=((1, 16, 2, 8),), rounds=3, seconds=0.1, only=("ours",), rules=("gated_delta",))
    report = run(setup, on_progress=lambda done, total, what: seen.append((done, total, what)))
    (measured,) = report.rows
    assert (measured.shape, measured.rule, measured.name) == ("1x16x2x8", "gated_delta", "ours")
    assert measured.both > measured.forward > 0
    assert measured.error < 1e-5
    assert 0 < measured.flop_both < 1
    assert seen[0] == (0, 1, "1x16x2x8: forward")


def test_floors_are_those_of_the_article():
    gated = floors((1, 1, 1, 128), "gated_delta", torch.bfloat16)
    assert gated["io"] == (1032, 1032 + 1808)
    assert tuple(round(flops / 1e3) for flops in gated["flop"]) == (167, 167 + 393)
    softmax = floors((1, 640, 1, 128), "softmax", torch.bfloat16)
    chunks = floors((1, 640, 1, 128), "gated_delta", torch.bfloat16)
    assert softmax["flop"][0] == pytest.approx(chunks["flop"][0], rel=0.02), "they cross at 640 tokens"


def test_one_thread_is_timed_in_processor_time():
    assert torch.get_num_threads() == 1
    assert timed(lambda: time.sleep(0.05), "cpu") < 10


def test_a_race_gives_medians():
    calls = {"slow": lambda: sum(range(200_000)), "fast": lambda: None}
    medians = race(calls, "cpu", 3, 0.1)
    assert medians["slow"] > medians["fast"]


def test_memory_grows_with_the_inputs():
    (ours,) = (c for c in find_contenders("cpu")[0] if (c.name, c.rule) == ("ours", "gated_delta"))
    size = 8192 * 8 * 64 * 4 / 2**20  # of q, k or v
    peak = peak_memory(ours, (1, 8192, 8, 64), "cpu", torch.float32)
    assert 8 * size < peak < 25 * size, "inputs, their gradients, the output and its gradient, states and T0"


def test_setup():
    assert len(ScanSetup("cpu", quick=True).shapes) == 2
    assert ScanSetup("cpu").dtype == torch.float32
    with raises(UnknownNameError, "unknown_rule"):
        ScanSetup("cpu", rules=("dleta",))
    for shape in (
        "1x2x3",
        "0x1x1x1",
        "1x1x1x-1",
        "1x99999999999x1x8",
        "99999x99999x99999x99999",
        f"{'1' * 5_000}x1x1x1",
    ):
        with raises(InputError, "invalid_shape"):
            parse_shape(shape)
    with raises(UnknownNameError, "unknown_implementation"):
        run(ScanSetup("cpu", only=("nobody",)))


def test_lines_of_one_family():
    where, drawn = lines(DOCUMENT, "both")
    assert where == "batch 1, 8 heads of 64"
    assert drawn == {("ours", "gated_delta"): [(64, 1.0), (128, 2.0)], ("peer", "gated_delta"): [(64, 3.0), (128, 6.0)]}


def test_figures(tmp_path):
    paths = tmp_path / "a.png", tmp_path / "a.svg"
    assert draw(DOCUMENT, *paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "3.0× ours" in paths[1].read_text()
    assert not draw(DOCUMENT | {"rows": DOCUMENT["rows"][:1]}, tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


NUMBERS = {
    "forward": 1111.0, "both": 2222.0, "kernels_forward": 3333.0, "kernels_both": 4444.0, "peak_mib": 55555.0,
    "first_s": 66.66, "first_both_s": 77.77, "error": 8e-08, "io_both": 0.91, "flop_both": 0.92,
}  # fmt: skip
SHOWN = ("1111", "2222", "3333", "4444", "55555", "66.66", "77.77", "8e-08", "91%", "92%")
HEADS = ("fwd ms", "both ms", "fwd alone", "both alone", "MiB", "first s", "then s", "error", "I/O", "FLOP")


def printed(row: Measurement, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(*tables([row], width))
    return shown.get().splitlines()


@pytest.mark.parametrize("width", [120, 80, 60, 40])
@pytest.mark.parametrize("gpu", [False, True])
def test_numbers_are_complete_or_left_out_with_a_note(width, gpu):
    numbers = {name: value for name, value in NUMBERS.items() if gpu or not name.startswith("kernels")}
    row = Measurement("1x64x8x64", "gated_delta", "transformers", **numbers)
    shown = printed(row, width)
    assert max(map(len, shown)) <= width
    assert "…" not in "".join(shown)
    rule = next(place for place, line in enumerate(shown) if "──" in line)
    heads, cells, note = shown[:rule], " ".join(shown[rule:]).split(), "".join(notes([row], width))
    for head, number in zip(HEADS, SHOWN, strict=True):
        there = any(head in line for line in heads)
        assert (number in cells) is there
        assert (head in note) is (not there and (gpu or "alone" not in head))


def test_empty_columns_are_left_out_without_a_note():
    decoding = Measurement("1x1x8x64", "decoding", "ours", forward=0.125)
    shown = "\n".join(printed(decoding, 80))
    assert "fwd ms" in shown
    assert not any(head in shown for head in HEADS[1:])
    assert not list(notes([decoding], 30))
