"""What memory costs: attention and scans against the length of a sequence, solves against their width and their rows.

Times are the best of several runs in one process; on a CPU they are processor time. *Held* is what must be kept to take
the next token: keys and values of all tokens so far for attention, the state for a scan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rebind.lab.experiment import Claim, Config, Experiment, Point, Row, Table
from rebind.lab.report import Curve, curve, select, slope, spread
from rebind.memory import factor, l2_normalise, ridge
from rebind.ops import scan_rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPS = {"attention": "softmax attention", "sum": "scan, sum", "delta": "scan, delta"}
SOLVES = {"direct": "direct: factor C + KᵀK", "woodbury": "Woodbury, on a factor of C"}


@dataclass(frozen=True)
class Cost(Config):
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)  # T
    heads: int = 4
    head_width: int = 64
    widths: tuple[int, ...] = (256, 512, 1024, 2048)  # d of the solves, for `rows` rows
    rows: int = 32
    counts: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)  # n of the solves, at `width`
    width: int = 1024
    repeats: int = 3


QUICK = Cost(
    lengths=(256, 512, 1024, 2048, 4096),
    heads=2,
    widths=(128, 256, 512, 1024),
    rows=16,
    counts=(8, 32, 128, 512),
    width=512,
)


def batches(config: Cost) -> list[list[Point]]:
    seeds = range(config.seeds)
    sequences = [
        [{"part": "sequence", "op": op, "length": length, "seed": seed} for op in OPS for seed in seeds]
        for length in config.lengths
    ]
    sizes = [("width", width, config.rows) for width in config.widths]
    sizes += [("rows", config.width, count) for count in config.counts]
    solves = [
        [{"part": part, "solve": solve, "d": d, "n": n, "seed": seed} for solve in SOLVES for seed in seeds]
        for part, d, n in sizes
    ]
    return [*sequences, *solves]


def measure(config: Cost, points: Sequence[Point], device: torch.device) -> list[Row]:
    if points[0]["part"] == "sequence":
        return _sequences(config, points, device)
    return _solves(config, points, device)


def _sequences(config: Cost, points: Sequence[Point], device: torch.device) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, points[0]["length"], config.heads, config.head_width)
    q, k, v = torch.randn(shape, generator=generator).to(device)
    k = l2_normalise(k)
    across = [one.transpose(1, 2).contiguous() for one in (q, k, v)]  # [B, H, T, D], as torch's attention takes them

    def attend() -> object:
        return scaled_dot_product_attention(across[0], across[1], across[2], is_causal=True)

    rows = []
    for point in points:
        op = point["op"]
        call = attend if op == "attention" else partial(scan_rule, op, q, k, v)
        held = _bytes(k, v) if op == "attention" else _bytes(scan_rule(op, q, k, v)[1])
        rows.append({"seconds": _seconds(call, config, device), "held": held})
    return rows


def _solves(config: Cost, points: Sequence[Point], device: torch.device) -> list[Row]:
    d, n = points[0]["d"], points[0]["n"]
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(2 * d, d, generator=generator, dtype=torch.float64).to(device)
    keys = torch.randn(n, d, generator=generator, dtype=torch.float64).to(device)
    moment = old.mT @ old / len(old)
    known = factor(moment)
    calls: dict[str, Callable[[], object]] = {
        "direct": lambda: ridge(keys, moment, form="primal"),
        "woodbury": lambda: ridge(keys, known, form="dual"),
    }
    return [{"seconds": _seconds(calls[point["solve"]], config, device)} for point in points]


def _seconds(call: Callable[[], object], config: Cost, device: torch.device) -> float:
    """The best of several, after one to warm up."""
    best = float("inf")
    for turn in range(config.repeats + 1):
        begun = _clock(device)
        with torch.no_grad():
            call()
        spent = _clock(device) - begun
        best = min(best, spent) if turn else best
    return best


def _clock(device: torch.device) -> float:
    """Seconds. On a CPU the process's own, which do not run while others have it."""
    if device.type == "cpu":
        return time.process_time()
    torch.ones(1, device=device).item()  # waits for all that was launched
    return time.perf_counter()


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fastest(rows: Sequence[Row], x: str, y: str = "seconds") -> Curve:
    """The curve through the best of the seeds: whatever else the machine does only ever adds."""
    found = curve(rows, x, y)
    return Curve(found.x, found.low, found.low, found.high)


def steepness(found: Curve, last: int = 3) -> float:
    """The exponent over the largest sizes, where overheads no longer count."""
    return slope(found.x[-last:], found.mean[-last:])


def table(config: Cost, rows: Sequence[Row]) -> Table:
    lines = []
    for op, label in OPS.items():
        some = select(rows, part="sequence", op=op)
        longest = [1e3 * row["seconds"] for row in some if row["length"] == config.lengths[-1]]
        order = f"T^{steepness(fastest(some, 'length')):.2f}"
        held = some[-1]["held"] / 2**20
        lines.append([label, f"{spread(longest)} ms at T = {config.lengths[-1]}", order, f"{held:.3g} MiB"])
    for part, x, name in (("width", "d", "d"), ("rows", "n", "n")):
        for solve, label in SOLVES.items():
            some = select(rows, part=part, solve=solve)
            largest = some[-1][x]
            cell = [1e3 * row["seconds"] for row in some if row[x] == largest]
            lines.append(
                [label, f"{spread(cell)} ms at {name} = {largest}", f"{name}^{steepness(fastest(some, x)):.2f}", "–"]
            )
    return Table(["what", "time", "grows as", "held"], lines)


def claims(config: Cost, rows: Sequence[Row]) -> list[Claim]:
    times = {op: fastest(select(rows, part="sequence", op=op), "length") for op in OPS}
    held = {op: fastest(select(rows, part="sequence", op=op), "length", "held") for op in OPS}
    orders = {op: steepness(found) for op, found in times.items()}
    kept = {op: slope(found.x, found.mean) for op, found in held.items()}
    by_width = {solve: steepness(fastest(select(rows, part="width", solve=solve), "d")) for solve in SOLVES}
    widest = {solve: fastest(select(rows, part="width", solve=solve), "d").mean[-1] for solve in SOLVES}
    by_rows = {solve: steepness(fastest(select(rows, part="rows", solve=solve), "n")) for solve in SOLVES}
    faster = widest["direct"] / widest["woodbury"]
    return [
        Claim("attention's time grows nearly as T²", 1.6 < orders["attention"] < 2.4, f"T^{orders['attention']:.2f}"),
        Claim(
            "a scan's grows as T",
            all(0.7 < orders[op] < 1.35 for op in ("sum", "delta")),
            ", ".join(f"{op} T^{orders[op]:.2f}" for op in ("sum", "delta")),
        ),
        Claim(
            "attention holds T keys and values, a scan one state whatever T",
            abs(kept["attention"] - 1) < 1e-9 and abs(kept["sum"]) < 1e-9 and abs(kept["delta"]) < 1e-9,
            ", ".join(f"{op} T^{one:.2f}" for op, one in kept.items()),
        ),
        Claim(
            f"of few rows ({config.rows}), Woodbury's solve grows slower with d than the direct one, and is faster",
            by_width["woodbury"] < by_width["direct"] - 0.3 and faster > 2,
            f"d^{by_width['woodbury']:.2f} against d^{by_width['direct']:.2f}; "
            f"{faster:.1f}× at d = {config.widths[-1]}",
        ),
        Claim(
            "the direct solve hardly minds n, Woodbury's does",
            by_rows["direct"] < by_rows["woodbury"] - 0.3,
            f"n^{by_rows['direct']:.2f} against n^{by_rows['woodbury']:.2f}",
        ),
    ]


def figure(config: Cost, rows: Sequence[Row]) -> Figure:
    from rebind.lab import style

    drawn, (times, held, width, count) = style.panels(
        4,
        "What memory costs",
        f"the best of {config.repeats} runs, on a CPU in processor time; range of {config.seeds} such; "
        "dashed: the exponent of the largest three",
        columns=2,
        width=5.4,
        height=4.0,
    )
    colours = {"attention": style.INK, "sum": style.RED, "delta": style.BLUE}
    for op, label in OPS.items():
        some = select(rows, part="sequence", op=op)
        _fitted(times, fastest(some, "length"), colours[op], label, "T")
        shown = "scans, sum and delta alike" if op == "delta" else label
        if op != "sum":
            style.draw(held, fastest(some, "length", "held"), colours[op], shown)
    for axes, part, x in ((width, "width", "d"), (count, "rows", "n")):
        for solve, colour in (("direct", style.AMBER), ("woodbury", style.GREEN)):
            _fitted(axes, fastest(select(rows, part=part, solve=solve), x), colour, SOLVES[solve], x)
    for axes in (times, held, width, count):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.margins(y=0.22)
    heads = f"{config.heads} heads of {config.head_width}"
    style.named(times, f"seconds of a sequence, {heads}", "T, tokens", "")
    style.named(held, "bytes held to go on", "T, tokens", "")
    style.named(width, f"seconds of a solve, n = {config.rows} rows", "d", "")
    style.named(count, f"seconds of a solve, d = {config.width}", "n", "")
    for axes in (times, held, width, count):
        style.legend(axes, loc="upper left")
    return drawn


def _fitted(axes: Axes, found: Curve, colour: str, label: str, x: str) -> None:
    """The curve, and the straight line fitted to its last three points."""
    from rebind.lab import style

    power = steepness(found)
    style.draw(axes, found, colour, f"{label}: {x}^{power:.2f}")
    places = found.x[-3:]
    centre, level = geometric_mean(places), geometric_mean(found.mean[-3:])
    style.theory(axes, places, [level * (place / centre) ** power for place in places])


EXPERIMENT = Experiment(
    name="cost",
    title="Time and memory against length, and of solves against d and n, with fitted exponents",
    answers='"Memory and Forgetting", O(n²) time against O(n) and O(1) space; Woodbury',
    takes="30 s",
    config=Cost(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    table=table,
    figure=figure,
    claims=claims,
)
