"""Our scan beside other implementations: forward, backward, peak memory, first call, and decoding, in one run.

The others are whatever can be imported: flash-linear-attention, the torch fallback of gated delta in transformers,
torch's causal attention, and the token-by-token loop. Medians are reported. On a GPU each is also timed as a CUDA
graph: small problems take the host longer than the device, and a model that is compiled or recorded pays for the
kernels alone. Floors are the bytes that must be moved and the multiplications of the chunk form, at the rates at which
this machine copies and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rebind.bench import contenders
from rebind.bench.contenders import (
    NAMES,
    OUR_RULES,
    RULES,
    USUAL_RULES,
    Contender,
    Shape,
    find_decoders,
    name_of,
    parse_shape,
)
from rebind.bench.measure import clocked, machine, measure_rates, race, try_to_record
from rebind.errors import InputError
from rebind.memory.checks import unknown_name, usable_device
from rebind.storage import write_json

CHUNK = 64  # of the floors: the chunk size that GPU kernels use
SHAPES = {
    "cpu": "1x512x8x64 1x2048x8x64 1x4096x8x64 1x8192x8x64 1x16384x8x64 1x32768x8x64 1x65536x8x64",
    "cuda": "8x2048x16x64 4x4096x16x128 1x2048x32x128 1x8192x32x128 1x32768x32x128 4x8192x32x128 1x131072x4x128 "
    "64x512x8x64",
}
QUICK = {"cpu": "1x512x8x64 1x2048x8x64", "cuda": "1x2048x32x128 1x8192x32x128"}
DECODING = {"cpu": ((1, 1, 8, 64), (256, 1, 8, 64)), "cuda": ((1, 1, 32, 128), (256, 1, 32, 128))}


class ScanSetup:
    """What is measured, and for how long."""

    def __init__(
        self,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        shapes: tuple[Shape, ...] = (),
        *,
        quick: bool = False,
        rounds: int = 30,  # at most
        seconds: float = 15.0,  # per column of a shape's table, about
        only: tuple[str, ...] = (),  # contenders; empty: all
        rules: tuple[str, ...] = (),  # empty: the usual ones, and decoding
    ) -> None:
        """Fill in what suits this machine."""
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        usable_device(self.device)
        for kind, chosen, names in (("rule", rules, RULES), ("implementation", only, NAMES)):
            for name in chosen:
                if name not in names:
                    raise unknown_name(kind, name, names)
        self.kind = "cpu" if self.device == "cpu" else "cuda"
        self.dtype = dtype or (torch.float32 if self.kind == "cpu" else torch.bfloat16)
        self.shapes = shapes or tuple(map(parse_shape, (QUICK if quick else SHAPES)[self.kind].split()))
        self.rounds, self.seconds = (min(rounds, 5), min(seconds, 3.0)) if quick else (rounds, seconds)
        self.only, self.rules = only, rules


@dataclass
class Measurement:
    """One contender at one shape. Times in milliseconds, medians; None if it was not or could not be measured."""

    shape: str
    rule: str  # or "decoding"
    name: str
    forward: float | None = None
    both: float | None = None  # forward and backward
    kernels_forward: float | None = None  # replayed as a CUDA graph: without the host's part
    kernels_both: float | None = None
    peak_mib: float | None = None  # of forward and backward, the inputs included
    first_s: float | None = None  # the first forward call, compilation included
    first_both_s: float | None = None  # the first forward and backward, after that
    error: float | None = None  # of the output, relative, against float64
    io_forward: float | None = None  # the floor as a share of the time
    io_both: float | None = None
    flop_forward: float | None = None
    flop_both: float | None = None
    note: str = ""

    def add_floors(self, amounts: dict[str, tuple[float, float]], rates: dict[str, float]) -> None:
        """Fill in the floors' shares of the times."""
        for kind, pair in amounts.items():
            for column, amount in zip(("forward", "both"), pair, strict=True):
                if ms := getattr(self, f"kernels_{column}") or getattr(self, column):
                    setattr(self, f"{kind}_{column}", 1e3 * amount / rates[kind] / ms)


def floors(shape: Shape, rule: str, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Count what the chunk form cannot do without, forward and for both passes: bytes ("io") and FLOPs ("flop").

    Forward, q, k, v and the coefficients are read and the output is written; backward, these and the output's
    gradient are read and the gradients are written. Products are counted one by one, as docs/scan.md does.
    """
    b, t, h, d = shape
    numbers = {"delta": 1, "sum": 0, "softmax": 0}.get(rule, 2)
    coefficients = numbers - 1 + d if contenders.decays_by_channel(rule) else numbers
    row = d * dtype.itemsize
    moved, moved_back = 4 * row + 4 * coefficients, 7 * row + 8 * coefficients
    if rule == "softmax":
        work, work_back = 2 * t * d, 5 * t * d
    elif rule == "sum":
        work, work_back = 2 * (2 * CHUNK * d + 2 * d * d), 2 * (5 * CHUNK * d + 4 * d * d)
    else:
        work, work_back = 2 * (4 * CHUNK * d + 3 * d * d + CHUNK**2 // 3), 2 * (10 * CHUNK * d + 7 * d * d)
    count = b * t * h
    return {"io": (count * moved, count * (moved + moved_back)), "flop": (count * work, count * (work + work_back))}


@dataclass
class ScanReport:
    """All measurements so far."""

    note: str
    machine: dict[str, str | int]
    missing: list[str]  # implementations that are not installed
    rows: list[Measurement] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return {"title": "scan", **asdict(self)}

    def save(self, path: Path) -> None:
        """Write everything to a JSON file."""
        write_json(path, self.document())


def run(
    setup: ScanSetup,
    *,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    on_shape: Callable[[ScanReport, list[Measurement]], None] = lambda report, rows: None,
) -> ScanReport:
    """Measure everything.

    `on_progress` is called with the number of finished shapes, their total and what comes next; `on_shape` with each
    shape's rows as soon as they are known.
    """
    if setup.device.startswith("cuda:"):
        torch.cuda.set_device(setup.device)
    available, missing = contenders.find_contenders(setup.device, setup.only or NAMES)
    chosen = [c for c in available if c.rule in (setup.rules or USUAL_RULES)]
    if not chosen:
        raise InputError(
            "None of these implementations has one of these rules",
            advice="Choose other {only}, or other {rules}",
            settings={"only": None, "rules": None},
            code="nothing_to_measure",
        )
    rates = measure_rates(setup.device, setup.dtype)
    note = (
        f"{setup.device}, {str(setup.dtype).removeprefix('torch.')}; medians; MiB: peak of both, with the "
        f"inputs; floors as a share of the time, at {rates['io'] / 1e9:.0f} GB/s copied and "
        f"{rates['flop'] / 1e12:.2f} TFLOP/s multiplied"
    )
    report = ScanReport(note, machine("triton", "fla", "transformers"), missing)
    decoding = () if setup.rules else DECODING[setup.kind]
    for done, shape in enumerate((*setup.shapes, *decoding)):
        if done < len(setup.shapes):
            field = [c for c in chosen if c.takes(shape)]
        else:
            field = [c for c in find_decoders(shape, setup.device) if c.name in (setup.only or NAMES)]

        def progress(what: str, done: int = done, shape: Shape = shape) -> None:
            on_progress(done, len(setup.shapes) + len(decoding), f"{name_of(shape)}: {what}")

        rows = _measure(shape, field, setup, progress)
        for row in rows:
            if row.rule in RULES:
                row.add_floors(floors(shape, row.rule, setup.dtype), rates)
        report.rows += rows
        on_shape(report, rows)
    return report


def _measure(
    shape: Shape, chosen: list[Contender], setup: ScanSetup, progress: Callable[[str], None]
) -> list[Measurement]:
    """Measure every contender at one shape."""
    forms = {c.by_channel for c in chosen}
    inputs = {form: contenders.draw_inputs(shape, setup.device, setup.dtype, by_channel=form) for form in forms}
    slope = torch.randn_like(next(iter(inputs.values()))[2])
    rows = [Measurement(name_of(shape), c.rule, c.name) for c in chosen]
    truths: dict[str, Tensor] = {}  # the output of each of our rules in float64
    if slope.numel() <= 2**24 and slope.device.type != "mps":
        exact = {form: [x.detach().double() for x in leaves] for form, leaves in inputs.items()}
        truths = {c.rule: contenders.our_scan(c.rule)(*exact[c.by_channel]) for c in chosen if c.rule in OUR_RULES}
        del exact
    forward: dict[int, Callable[[], object]] = {}
    both: dict[int, Callable[[], object]] = {}
    with torch.no_grad():
        progress("forward")
        for index, (c, row) in enumerate(zip(chosen, rows, strict=True)):
            call = partial(c.run, *inputs[c.by_channel])
            try:
                row.first_s, out = clocked(call, setup.device)
                forward[index] = call
            except Exception as problem:  # other libraries may raise anything
                row.note = _first_line(problem)
                continue
            if c.rule in truths:
                true = truths[c.rule]
                out = out.double() * (shape[3] ** 0.5 if c.scaled else 1.0)
                row.error = float((out - true).norm() / true.norm())
        del truths
        _race(rows, "forward", forward, setup)
    progress("forward and backward")
    for index in forward:
        if rows[index].rule == "decoding":
            continue
        call_both = partial(contenders.run_both, chosen[index].run, inputs[chosen[index].by_channel], slope)
        try:
            rows[index].first_both_s, _ = clocked(call_both, setup.device)
            both[index] = call_both
        except Exception as problem:
            rows[index].note = f"no backward: {_first_line(problem)}"
    _race(rows, "both", both, setup)
    progress("memory")
    for index in both:
        rows[index].peak_mib = contenders.peak_memory(chosen[index], shape, setup.device, setup.dtype)
    return rows


def _race(rows: list[Measurement], column: str, calls: dict[int, Callable[[], object]], setup: ScanSetup) -> None:
    """Time the calls as they are, and on a GPU also as kernels alone."""
    recorded = ((index, try_to_record(call, setup.device)) for index, call in calls.items())
    replays = {index: replay for index, replay in recorded if replay is not None}
    for name, ready in ((column, calls), (f"kernels_{column}", replays)):
        if ready:
            for index, ms in race(ready, setup.device, setup.rounds, setup.seconds).items():
                setattr(rows[index], name, ms)


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:160]
