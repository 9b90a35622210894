"""Our scan beside the peers: forward, forward + backward, peak memory, first call, and decoding, in one run.

Peers are whatever can be imported: flash-linear-attention, transformers' torch fallback of gated delta, torch's
causal attention, and the token-by-token loop. Every round times each of them once, so that a change in the machine's
load meets all alike; medians are reported. On a GPU each is also timed as a CUDA graph: small problems take the host
longer than the device, and a model that is compiled or recorded pays for the kernels alone. Floors are the bytes that
must be moved and the multiplications of the chunk form, at the rates that this machine copies and multiplies at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rebind.bench.clock import Floors, Rates, clocked, race, recorded
from rebind.bench.contenders import RULES, Contender, Shape, both, contenders, decoders, forward, inputs, ours
from rebind.bench.machine import machine
from rebind.bench.memory import peak
from rebind.errors import InputError
from rebind.files import write_atomically

GPU_SHAPES: tuple[Shape, ...] = (
    (8, 2048, 16, 64),
    (4, 4096, 16, 128),
    (1, 2048, 32, 128),
    (1, 8192, 32, 128),
    (1, 32768, 32, 128),
    (4, 8192, 32, 128),
    (1, 131072, 4, 128),
    (64, 512, 8, 64),
)
CPU_SHAPES: tuple[Shape, ...] = ((1, 512, 8, 64), *((1, 2048 * 2**n, 8, 64) for n in range(6)))
QUICK = {"cpu": ((1, 512, 8, 64), (1, 2048, 8, 64)), "cuda": ((1, 2048, 32, 128), (1, 8192, 32, 128))}
DECODING = {"cpu": ((1, 8, 64), (256, 8, 64)), "cuda": ((1, 32, 128), (256, 32, 128))}  # (B, H, D)


@dataclass(frozen=True)
class Setup:
    """What is measured, and for how long."""

    device: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    rounds: int = 30  # at most
    seconds: float = 15.0  # on each column of a shape's table, about
    only: tuple[str, ...] = ()  # contenders; none named: all
    rules: tuple[str, ...] = ()  # none named: all, and decoding

    @classmethod
    def of(
        cls,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        shapes: tuple[Shape, ...] = (),
        *,
        quick: bool = False,
        **rest: Any,
    ) -> Setup:
        """What suits this machine, where nothing is said."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"device is {device!r} and torch sees no CUDA device here: use --device cpu")
        kind = "cpu" if device == "cpu" else "cuda"
        shapes = shapes or (QUICK[kind] if quick else CPU_SHAPES if kind == "cpu" else GPU_SHAPES)
        made = cls(device, dtype or (torch.float32 if kind == "cpu" else torch.bfloat16), shapes, **rest)
        for rule in made.rules:
            if rule not in RULES:
                raise InputError(f"rule is {rule!r}, expected one of {', '.join(RULES)}: choose one of these")
        return replace(made, rounds=min(made.rounds, 5), seconds=min(made.seconds, 3.0)) if quick else made


@dataclass
class Row:
    """One contender at one shape. Times in milliseconds, medians; None where it was not or could not be measured."""

    shape: str
    rule: str
    name: str
    forward: float | None = None
    both: float | None = None  # forward and backward
    kernels_forward: float | None = None  # replayed as a CUDA graph: what is left without the host's part
    kernels_both: float | None = None
    peak_mib: float | None = None  # of forward and backward, the inputs included
    first_s: float | None = None  # the first forward call, compilation included
    first_both_s: float | None = None  # the first forward and backward, after that
    error: float | None = None  # of the output, relative, against float64
    io_forward: float | None = None  # the floor's share of the time
    io_both: float | None = None
    flop_forward: float | None = None
    flop_both: float | None = None
    calm: bool = True  # whether other programs left the machine alone
    note: str = ""

    def add_floors(self, floors: Floors, rates: Rates) -> None:
        if forward := self.kernels_forward or self.forward:
            self.io_forward = 1e3 * floors.bytes_forward / rates.bytes_a_s / forward
            self.flop_forward = 1e3 * floors.flops_forward / rates.flops_a_s / forward
        if both := self.kernels_both or self.both:
            self.io_both = 1e3 * floors.bytes_both / rates.bytes_a_s / both
            self.flop_both = 1e3 * floors.flops_both / rates.flops_a_s / both


@dataclass
class Report:
    """All that was measured, so far."""

    note: str
    machine: dict[str, str | int]
    missing: list[str]  # peers that are not here
    rows: list[Row] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"title": "scan", "note": self.note, "machine": self.machine, "missing": self.missing, "rows": rows}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(self.document(), indent=2, ensure_ascii=False) + "\n").encode())


def name_of(shape: Shape) -> str:
    return "x".join(map(str, shape))


def parse_shape(text: str) -> Shape:
    """A shape as it is written.

    >>> parse_shape("1x2048x8x64")
    (1, 2048, 8, 64)
    """
    parts = [int(part) if part.isdecimal() else 0 for part in text.strip().split("x")]
    if len(parts) != 4 or min(parts) < 1:
        raise InputError(f"shape is {text!r}, expected BxTxHxD, such as 1x2048x8x64: correct it")
    b, t, h, d = parts
    return b, t, h, d


def run(
    setup: Setup,
    *,
    told: Callable[[int, int, str], None] = lambda done, total, doing: None,
    found: Callable[[Report, list[Row]], None] = lambda report, rows: None,
) -> Report:
    """Measure everything. `told` hears how far it is, `found` gets each shape's rows as soon as they are known."""
    if setup.device.startswith("cuda:"):
        torch.cuda.set_device(setup.device)
    everybody, missing = contenders(setup.device)
    chosen = [
        c for c in everybody if (not setup.only or c.name in setup.only) and (not setup.rules or c.rule in setup.rules)
    ]
    if not chosen:
        names = ", ".join(dict.fromkeys(c.name for c in everybody))
        raise InputError(f"nobody here is named {', '.join(setup.only)}, expected some of {names}: choose among these")
    rates = Rates.of(setup.device, setup.dtype)
    note = (
        f"{setup.device}, {str(setup.dtype).removeprefix('torch.')}; medians; MiB: peak of both, with the "
        f"inputs; floors as a share of the time, at {rates.bytes_a_s / 1e9:.0f} GB/s copied and "
        f"{rates.flops_a_s / 1e12:.2f} TFLOP/s multiplied"
    )
    report = Report(note, machine("triton", "fla", "transformers"), missing)
    total = len(setup.shapes) + (not setup.rules)
    for done, shape in enumerate(setup.shapes):

        def doing(what: str, done: int = done, shape: Shape = shape) -> None:
            told(done, total, f"{name_of(shape)}: {what}")

        rows = _measure(shape, [c for c in chosen if c.takes(shape)], setup, doing)
        for row in rows:
            row.add_floors(Floors.of(shape, row.rule, setup.dtype), rates)
        report.rows += rows
        found(report, rows)
    if not setup.rules:
        told(total - 1, total, "decoding")
        rows = _decoding(setup)
        report.rows += rows
        found(report, rows)
    return report


def _measure(shape: Shape, chosen: list[Contender], setup: Setup, doing: Callable[[str], None]) -> list[Row]:
    """Every contender, at one shape."""
    leaves = inputs(shape, setup.device, setup.dtype)
    slope = torch.randn_like(leaves[2])
    rows = [Row(name_of(shape), c.rule, c.name) for c in chosen]
    doing("first calls")
    truths = _truth(leaves) if leaves[0].numel() <= 2**24 else {}
    forwards: dict[int, Callable[[], object]] = {}
    boths: dict[int, Callable[[], object]] = {}
    for index, (c, row) in enumerate(zip(chosen, rows, strict=True)):

        def once(c: Contender = c) -> Tensor:
            return forward(c.run, leaves)

        def again(c: Contender = c) -> None:
            both(c.run, leaves, slope)

        try:
            row.first_s, out = clocked(once, setup.device)
            if c.rule in truths:
                exact = truths[c.rule]
                out = out.double() * (shape[3] ** 0.5 if c.scaled else 1.0)
                row.error = float((out - exact).norm() / exact.norm())
            forwards[index] = once
        except Exception as problem:  # whatever a peer may raise
            row.note = _complaint(problem)
            continue
        try:
            row.first_both_s, _ = clocked(again, setup.device)
            boths[index] = again
        except Exception as problem:
            row.note = f"no backward: {_complaint(problem)}"
    del truths
    doing("forward")
    _race(rows, "forward", forwards, setup)
    doing("forward and backward")
    _race(rows, "both", boths, setup)
    doing("memory")
    for index in boths:
        rows[index].peak_mib = peak(chosen[index], shape, setup.device, setup.dtype)
    return rows


def _race(rows: list[Row], column: str, calls: dict[int, Callable[[], object]], setup: Setup) -> None:
    """As called, and on a GPU also as kernels alone."""
    replays = {index: replay for index, call in calls.items() if (replay := recorded(call, setup.device)) is not None}
    for name, ready in ((column, calls), (f"kernels_{column}", replays)):
        if not ready:
            continue
        found = race(ready, setup.device, setup.rounds, setup.seconds)
        for index, ms in found.medians.items():
            setattr(rows[index], name, ms)
            rows[index].calm &= found.calm


def _truth(leaves: list[Tensor]) -> dict[str, Tensor]:
    """The output of each rule in float64."""
    if leaves[0].device.type == "mps":
        return {}
    exact = [x.detach().double() for x in leaves]
    return {rule: ours(rule)(*exact) for rule in RULES[:3]}


def _decoding(setup: Setup) -> list[Row]:
    """One token for every sequence of a batch."""
    rows: list[Row] = []
    for batch, heads, d in DECODING["cpu" if setup.device == "cpu" else "cuda"]:
        leaves = [x.detach() for x in inputs((batch, 1, heads, d), setup.device, setup.dtype)]
        state = torch.zeros(batch, heads, d, d, device=setup.device)
        ready: dict[int, Callable[[], object]] = {}
        for name, decode in decoders(setup.device).items():
            if setup.only and name not in setup.only:
                continue
            row = Row(f"{batch}x1x{heads}x{d}", "gated delta, decoding", name)

            def once(
                decode: Callable[[list[Tensor], Tensor], object] = decode,
                leaves: list[Tensor] = leaves,
                state: Tensor = state,
            ) -> object:
                return decode(leaves, state)

            try:
                row.first_s, _ = clocked(once, setup.device)
                ready[len(rows)] = once
            except Exception as problem:
                row.note = _complaint(problem)
            rows.append(row)
        _race(rows, "forward", ready, setup)
    return rows


def _complaint(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:160]
