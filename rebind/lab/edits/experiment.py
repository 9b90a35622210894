"""One layer's weight as the memory of many facts: what each editing method stores, and what it disturbs.

Keys, values and the second moment of old keys are computed once, at one layer of one model, and are the same for every
method: only the gain differs. Two numbers describe each write ΔW. In the weights:

    realized     1 − Σ‖W'k − v‖² / Σ‖Wk − v‖²          for the new keys
    disturbance  tr(ΔW C ΔWᵀ) / tr(W C Wᵀ)             for the old ones, C = E[kkᵀ]

and in the model: how many of the facts it says, how many neighbors' answers stay, how far it drifts.

A ridge write (MEMIT) minimizes the missed part plus λ times the disturbance, so its curve over λ bounds all methods: no
method that realizes as much disturbs the old keys less. λ is the exchange rate between plasticity and stability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch

from rebind import plotting
from rebind.lab import style
from rebind.lab.experiment import Experiment, Figure, Point, grid, require_known
from rebind.lab.report import Claim, Table, curve, select, spread
from rebind.storage import Row

METHODS = {
    "rome": style.line("ROME, one by one", plotting.RED),
    "emmet": style.line("EMMET", plotting.VIOLET, marker="D"),
    "memit": style.line("MEMIT", plotting.BLUE),
    "batches": style.line("MEMIT, batch by batch", plotting.CYAN),
    "recursive": style.line("recursive, batch by batch", plotting.GREEN, **style.CROSS),
    "alphaedit": style.line("AlphaEdit", plotting.AMBER),
}
COLUMNS = {
    "realized": "realized",
    "disturbance": "disturbance",
    "likelier": "new object likelier",
    "exact": "said",
    "unchanged": "neighbors unchanged",
    "drift": "drift",
}


@dataclass(frozen=True)
class Edits(Experiment):
    name = "edits"
    title = "One layer's weight as the memory: efficacy and drift against the number of facts, and λ's trade"
    answers = "ROME eq. 17, MEMIT eq. 14, EMMET and AlphaEdit on the same keys; plasticity against stability"
    cpu_time = "for a GPU"
    gpu_time = "2 min"
    quick_settings = "seeds=2 model=random layer=0 counts=1,2,5,10,20 rate=0.1 moment_tokens=2000"

    model: str = "smollm2"  # or "random", a random model created on the spot
    layer: int = 2
    counts: tuple[int, ...] = (1, 2, 5, 10, 20, 60)  # facts
    methods: tuple[str, ...] = tuple(METHODS)
    group: int = 5  # facts per batch, where they come in batches
    scales: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0, 30.0, 1e2, 1e3)  # multiples of the usual λ
    neighbors: int = 2  # asked about each fact
    steps: int = 25  # of target search, at most
    rate: float = 0.5  # of target search
    clamp: float = 4.0  # of target search: ROME's bound on this model
    moment_tokens: int = 100_000

    def batches(self) -> list[list[Point]]:
        """Return one batch per order of the facts and method; then the other λ, at the largest count."""
        require_known("method", self.methods, METHODS)
        scales = [scale for scale in self.scales if scale != 1.0 or "memit" not in self.methods]
        batches = []
        for seed in range(self.seeds):
            batches += [grid(seed=[seed], method=[method], n=self.counts, scale=[1.0]) for method in self.methods]
            batches.append(grid(seed=[seed], method=["memit"], n=self.counts[-1:], scale=scales))
        return [batch for batch in batches if batch]

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        from rebind.edit.targets.objective import TargetSettings
        from rebind.lab.edits.layer import load_layer  # here, so that listing experiments does not need transformers

        targets = TargetSettings(steps=self.steps, rate=self.rate, clamp=self.clamp)
        memory = load_layer(
            self.model, self.layer, max(self.counts), self.neighbors, targets, self.moment_tokens, device
        )
        return [
            memory.measure(point["method"], point["n"], point["seed"], point["scale"], self.group) for point in points
        ]

    def table(self, rows: Sequence[Row]) -> Table:
        largest = self.counts[-1]
        groups: list[tuple[str, int, float]] = [(method, n, 1.0) for method in METHODS for n in self.counts]
        groups += [("memit", largest, scale) for scale in self.scales if scale != 1.0]
        lines = []
        for method, n, scale in groups:
            if group := select(rows, method=method, n=n, scale=scale):
                # Rounded, because the order of the facts changes the last bits.
                cells = [spread([round(row[name], 12) for row in group]) for name in COLUMNS]
                lines.append([METHODS[method]["label"], str(n), f"{scale:g}", *cells])
        return Table(["method", "facts", "λ ×", *COLUMNS.values()], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        usual = {method: select(rows, method=method, scale=1.0) for method in self.methods}
        largest = self.counts[-1]
        if "emmet" in usual:
            missed = max(abs(1 - row["realized"]) for row in usual["emmet"])
            yield Claim("EMMET realizes all facts exactly", missed < 1e-8, f"{missed:.0e} missed at most")
        if "rome" in usual and self.counts[0] == 1 and largest > 1:
            single = max(abs(1 - row["realized"]) for row in select(usual["rome"], n=1))
            many = min(row["realized"] for row in select(usual["rome"], n=largest))
            yield Claim(
                "ROME realizes one fact exactly, and with many it moves the earlier ones again",
                single < 1e-8 and many < 0.999,
                f"{single:.0e} missed of one, {1 - many:.2g} of {largest}",
            )
        if {"memit", "recursive"} <= set(usual):
            gap = max(
                abs(a[name] - b[name]) / max(abs(b[name]), 1e-9)
                for name in ("realized", "disturbance")
                for a, b in zip(usual["recursive"], usual["memit"], strict=True)
            )
            statement = "recursive, batch by batch, ends where MEMIT with all facts at once does"
            yield Claim(statement, gap < 1e-4, f"largest gap {gap:.0e}")
        ridge = select(rows, method="memit", n=largest)
        if len({row["scale"] for row in ridge}) > 2:
            others = [row for method in self.methods if method not in ("memit", "recursive") for row in usual[method]]
            yield from _lambda_claims(ridge, select(others, n=largest))

    def panels(self) -> list[style.Panel]:
        looks, largest = {method: METHODS[method] for method in self.methods}, self.counts[-1]
        new, old = (style.by("method", looks, name, scale=1.0) for name in ("likelier", "drift"))
        trade = f"λ trades one for the other, {largest} facts"
        disturbance = "disturbance  tr(ΔW C ΔWᵀ) / tr(W C Wᵀ)"
        return [
            style.Panel("New", "facts written", "n", new, "new object likelier than the old", "log"),
            style.Panel("Old", "facts written", "n", old, "drift: KL(base ‖ edited), nats", "log"),
            self._plane(trade, "drift, nats", "drift", "new object likelier", "likelier"),
            self._plane("The same in the weights", disturbance, "disturbance", "realized of Wk = v", "realized"),
        ]

    def _plane(self, title: str, x_label: str, x: str, y_label: str, y: str) -> style.Panel:
        """Return the panel with MEMIT's curve for varying λ, and a point for every method."""
        n = self.counts[-1]
        look = style.line("MEMIT, other λ", plotting.BLUE, marker=".", ms=5, alpha=0.6, zorder=2)
        points = {method: {"ms": 6.5, "zorder": 5, **METHODS[method], "ls": "none"} for method in self.methods}
        series = [style.Series(look, y, {"method": "memit", "n": n}), *style.by("method", points, y, n=n, scale=1.0)]
        return style.Panel(title, x_label, x, series, y_label, "log", expand=_by_scale)

    def figure(self, rows: Sequence[Row]) -> Figure:
        name = "a random model" if self.model == "random" else Path(self.model).name
        figure, (new, old, *planes) = style.figure_of(
            self.panels(),
            rows,
            "One layer as the memory of many facts",
            f"layer {self.layer} of {name}, the same keys and values for all methods; mean and range of {self.seeds} "
            "orders of the facts",
        )
        for axes in (new, old):
            axes.set_xticks(self.counts, [str(n) for n in self.counts])
            axes.minorticks_off()
        new.set_ylim(-0.03, 1.04)
        labels = {min(self.scales): (-8, 5, "right"), 10.0: (7, -11, "left"), max(self.scales): (2, 7, "left")}
        ridge = _by_scale(select(rows, method="memit", n=self.counts[-1]))
        for axes, x, y in zip(planes, ("drift", "disturbance"), ("likelier", "realized"), strict=True):
            axes.set_ylim(-0.05, 1.06)
            for row in ridge:
                if row["scale"] in labels:
                    right, above, side = labels[row["scale"]]
                    style.note(axes, f"λ × {row['scale']:g}", (row[x], row[y]), (right, above), ha=side)
        plotting.legend_below(figure, columns=3)
        return figure


def _by_scale(rows: Sequence[Row]) -> list[Row]:
    """Return one row per multiple of λ, the mean of the seeds."""
    scales = sorted({row["scale"] for row in rows})
    return [
        {"scale": scale, **{name: fmean(row[name] for row in select(rows, scale=scale)) for name in COLUMNS}}
        for scale in scales
    ]


def _lambda_claims(ridge: Sequence[Row], others: Sequence[Row]) -> Iterator[Claim]:
    """Yield claims about what λ does to MEMIT, and about the curve that bounds the other methods."""
    realized, disturbance, drift = (curve(ridge, "scale", name).mean for name in ("realized", "disturbance", "drift"))
    yield Claim(
        "with a larger λ less is realized, and less is disturbed",
        all(a > b for values in (realized, disturbance) for a, b in pairwise(values)),
        f"realized {realized[0]:.3f} to {realized[-1]:.3f}, disturbance {disturbance[0]:.2g} to {disturbance[-1]:.2g}",
    )
    statement = "and the model drifts less"
    yield Claim(statement, drift[-1] < 0.1 * drift[0], f"{drift[0]:.2g} nats to {drift[-1]:.2g}")
    distance = distance_to_curve(ridge, others)
    yield Claim(
        "no method lies beyond MEMIT's curve: what realizes as much disturbs no less",
        distance > -1e-5,
        f"the nearest is {abs(distance):.1g} {'beyond it' if distance < 0 else 'away'}",
    )


def distance_to_curve(ridge: Sequence[Row], others: Sequence[Row]) -> float:
    """Return the smallest excess of the others over what MEMIT minimizes, missed + price · disturbance, at every λ."""
    return min(
        (other["disturbance"] - row["disturbance"]) * row["price"] - (other["realized"] - row["realized"])
        for row in ridge
        for other in others
        if row["seed"] == other["seed"]
    )
