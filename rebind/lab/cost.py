"""The cost of memory: attention and scans by sequence length, solves by width and number of rows.

A time is the shortest of several runs in one process; on a CPU it is processor time. The *state* is what must be stored
to process the next token: the keys and values of all tokens so far for attention, the memory for a scan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rebind import plotting
from rebind.lab import style
from rebind.lab.experiment import Experiment, Figure, Point, grid
from rebind.lab.report import Claim, Curve, Table, curve, select, slope, spread
from rebind.memory import factor, l2_normalize, ridge
from rebind.ops import scan_rule
from rebind.storage import Row

OPS = {
    "attention": style.line("softmax attention", plotting.INK),
    "sum": style.line("scan, sum", plotting.RED),
    "delta": style.line("scan, delta", plotting.BLUE),
}
SOLVES = {
    "direct": style.line("direct: factor C + KᵀK", plotting.AMBER),
    "woodbury": style.line("Woodbury, on a factor of C", plotting.GREEN),
}


@dataclass(frozen=True)
class Cost(Experiment):
    name = "cost"
    title = "Time and memory against length, and of solves against d and n, with fitted exponents"
    answers = '"Memory and Forgetting", O(n²) time against O(n) and O(1) space; Woodbury'
    cpu_time = "30 s"
    quick_settings = (
        "lengths=256,512,1024,2048,4096 heads=2 widths=128,256,512,1024 rows=16 counts=8,32,128,512 width=512"
    )

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)  # T
    heads: int = 4
    head_width: int = 64
    widths: tuple[int, ...] = (256, 512, 1024, 2048)  # d of the solves with `rows` rows
    rows: int = 32
    counts: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)  # n of the solves at `width`
    width: int = 1024
    repeats: int = 3

    def batches(self) -> list[list[Point]]:
        seeds = range(self.seeds)
        return [
            *(grid(part=["sequence"], op=OPS, length=[length], seed=seeds) for length in self.lengths),
            *(grid(part=["width"], solve=SOLVES, d=[width], n=[self.rows], seed=seeds) for width in self.widths),
            *(grid(part=["rows"], solve=SOLVES, d=[self.width], n=[count], seed=seeds) for count in self.counts),
        ]

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        if points[0]["part"] == "sequence":
            return self._time_sequences(points, device)
        return self._time_solves(points, device)

    def _time_sequences(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        shape = (3, 1, points[0]["length"], self.heads, self.head_width)
        q, k, v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        k = l2_normalize(k)
        queries, keys, values = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # as torch's attention expects
        calls: dict[str, Callable[[], object]] = {
            "attention": partial(scaled_dot_product_attention, queries, keys, values, is_causal=True),
            "sum": partial(scan_rule, "sum", q, k, v),
            "delta": partial(scan_rule, "delta", q, k, v),
        }
        state_bytes = {op: scan_rule(op, q, k, v)[1].nbytes for op in ("sum", "delta")}
        state_bytes["attention"] = k.nbytes + v.nbytes
        return [
            {"seconds": self._seconds(calls[op], device), "state_bytes": state_bytes[op]}
            for op in (point["op"] for point in points)
        ]

    def _time_solves(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        d, n = points[0]["d"], points[0]["n"]
        generator = torch.Generator().manual_seed(0)
        old_keys = torch.randn(2 * d, d, generator=generator, dtype=torch.float64).to(device)
        keys = torch.randn(n, d, generator=generator, dtype=torch.float64).to(device)
        moment = old_keys.mT @ old_keys / len(old_keys)
        calls = {
            "direct": partial(ridge, keys, moment, form="primal"),
            "woodbury": partial(ridge, keys, factor(moment), form="dual"),
        }
        return [{"seconds": self._seconds(calls[point["solve"]], device)} for point in points]

    def _seconds(self, call: Callable[[], object], device: torch.device) -> float:
        """Return the shortest duration of several runs, after one to warm up."""
        durations = []
        for _ in range(self.repeats + 1):
            started = _clock(device)
            with torch.no_grad():
                call()
            durations.append(_clock(device) - started)
        return min(durations[1:])

    def table(self, rows: Sequence[Row]) -> Table:
        lines = []
        for op, line_style in OPS.items():
            op_rows = select(rows, part="sequence", op=op)
            state = f"{op_rows[-1]['state_bytes'] / 2**20:.3g} MiB"
            lines.append([line_style["label"], *_largest(op_rows, "length", "T"), state])
        for part, x in (("width", "d"), ("rows", "n")):
            for solve, line_style in SOLVES.items():
                lines.append([line_style["label"], *_largest(select(rows, part=part, solve=solve), x, x), "–"])
        return Table(["what", "time", "grows as", "state"], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        times = {op: exponent(fastest(rows, "length", op=op)) for op in OPS}
        states = {op: curve(rows, "length", "state_bytes", op=op) for op in OPS}
        growth = {op: slope(state.x, state.mean) for op, state in states.items()}
        by_width = {solve: fastest(rows, "d", part="width", solve=solve) for solve in SOLVES}
        by_rows = {solve: exponent(fastest(rows, "n", part="rows", solve=solve)) for solve in SOLVES}
        direct, woodbury = (exponent(by_width[solve]) for solve in ("direct", "woodbury"))
        ratio = by_width["direct"].mean[-1] / by_width["woodbury"].mean[-1]
        yield Claim(
            "attention's time grows nearly as T²", 1.6 < times["attention"] < 2.4, f"T^{times['attention']:.2f}"
        )
        yield Claim(
            "a scan's time grows as T",
            all(0.7 < times[op] < 1.35 for op in ("sum", "delta")),
            ", ".join(f"{op} T^{times[op]:.2f}" for op in ("sum", "delta")),
        )
        yield Claim(
            "attention stores T keys and values, a scan one memory whatever T is",
            abs(growth["attention"] - 1) < 1e-9 and abs(growth["sum"]) < 1e-9 and abs(growth["delta"]) < 1e-9,
            ", ".join(f"{op} T^{power:.2f}" for op, power in growth.items()),
        )
        yield Claim(
            f"with few rows ({self.rows}) Woodbury's solve grows more slowly with d than the direct one, and is faster",
            woodbury < direct - 0.3 and ratio > 2,
            f"d^{woodbury:.2f} against d^{direct:.2f}; {ratio:.1f} times as fast at d = {self.widths[-1]}",
        )
        yield Claim(
            "the time of the direct solve hardly depends on n, that of Woodbury's does",
            by_rows["direct"] < by_rows["woodbury"] - 0.3,
            f"n^{by_rows['direct']:.2f} against n^{by_rows['woodbury']:.2f}",
        )

    def panels(self) -> list[style.Panel]:
        sequences = style.by("op", OPS, "seconds", part="sequence")
        states = {"attention": OPS["attention"], "delta": style.line("scans, sum and delta alike", plotting.BLUE)}
        state = style.by("op", states, "state_bytes", part="sequence")
        by_width, by_rows = (style.by("solve", SOLVES, "seconds", part=part) for part in ("width", "rows"))
        powers = partial(PowerPanel, x_scale="log", y_scale="log")
        heads = f"seconds per sequence, {self.heads} heads of {self.head_width}"
        return [
            powers(heads, "T, tokens", "length", sequences),
            style.log_panel("bytes stored for the next token", "T, tokens", "length", state),
            powers(f"seconds per solve, n = {self.rows} rows", "d", "d", by_width),
            powers(f"seconds per solve, d = {self.width}", "n", "n", by_rows),
        ]

    def figure(self, rows: Sequence[Row]) -> Figure:
        figure, panels = style.figure_of(
            self.panels(),
            rows,
            "What memory costs",
            f"the best of {self.repeats} runs, on a CPU in processor time; range of {self.seeds} such; "
            "dashed: the exponent of the largest three",
        )
        for axes in panels:
            axes.set_xscale("log", base=2)
            axes.margins(y=0.22)
            plotting.legend(axes, loc="upper left")
        return figure


class PowerPanel(style.Panel):
    """Shortest times, each curve with the straight line that is fitted to its last three points."""

    def draw_curve(self, axes: style.Axes, values: Curve, look: style.LineStyle) -> None:
        """Draw the curve and the line, with its exponent in the label."""
        times, symbol = _shortest(values), self.x_label[0]
        power = exponent(times)
        super().draw_curve(axes, times, {**look, "label": f"{look['label']}: {symbol}^{power:.2f}"})
        sizes = times.x[-3:]
        center, level = geometric_mean(sizes), geometric_mean(times.mean[-3:])
        style.draw_theory(axes, sizes, [level * (size / center) ** power for size in sizes])


def fastest(rows: Sequence[Row], x: str, **values: Any) -> Curve:
    """Return the shortest times over the seeds."""
    return _shortest(curve(rows, x, "seconds", **values))


def _shortest(times: Curve) -> Curve:
    """Return a curve through the shortest times, because other work of the machine only adds time."""
    return replace(times, mean=times.low)


def exponent(times: Curve) -> float:
    """Return the exponent over the three largest sizes, where fixed costs are negligible."""
    return slope(times.x[-3:], times.mean[-3:])


def _clock(device: torch.device) -> float:
    """Return the time in seconds: on a CPU the processor time of this process."""
    if device.type == "cpu":
        return time.process_time()
    torch.ones(1, device=device).item()  # waits for the device
    return time.perf_counter()


def _largest(rows: Sequence[Row], x: str, symbol: str) -> tuple[str, str]:
    """Format the time at the largest size, and the exponent of its growth."""
    largest = max(row[x] for row in rows)
    milliseconds = [1e3 * row["seconds"] for row in rows if row[x] == largest]
    return f"{spread(milliseconds)} ms at {symbol} = {largest}", f"{symbol}^{exponent(fastest(rows, x)):.2f}"
