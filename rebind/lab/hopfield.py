"""The capacity of classical and modern Hopfield networks.

Classical: ±1 patterns in a Hebbian matrix; recall starts from a stored pattern, and the wrong bits are counted after
it has converged. Modern: the patterns themselves are stored; recall starts from a pattern with an eighth of its bits
flipped, and a pattern is retrieved if recall ends within 5 % of its energy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rebind import plotting
from rebind.lab import style
from rebind.lab.experiment import Experiment, Figure, Point, grid
from rebind.lab.report import Claim, Curve, Table, curve, select, spreads
from rebind.memory.hopfield import Classical, Modern
from rebind.storage import Row

BREAKDOWN = 0.138  # n/N at which a large classical network breaks down
CLOSE = 0.05  # a retrieved pattern is at least this close, relative to its energy
REDS = ("#fca5a5", "#f87171", "#dc2626", "#991b1b", "#450a0a")  # the darker, the larger the network
STEPS = 5  # of modern recall, where it takes several
RANDOM_LOADS = (0.02, 0.05, 0.1, 0.15)  # where recall starts from random states


@dataclass(frozen=True)
class Hopfield(Experiment):
    name = "hopfield"
    title = "Classical capacity and its knee, spurious states; modern capacity, β, steps"
    answers = '"Memory and Forgetting", appendix: 0.14 N memories, exponentially many, one step = one attention pass'
    cpu_time = "80 s"
    gpu_time = "22 s"
    quick_settings = (
        "units=100,300,1000 loads=0.05,0.1,0.12,0.13,0.14,0.15,0.16,0.18,0.22 probes=64 steps=40 "
        "overlaps=0,0.1,0.2,0.3,0.4 small=100 starts=100 rates=0.125,0.25,0.375,0.5,0.625 betas=0.02,0.05,0.1,0.2,0.5,1"
    )

    units: tuple[int, ...] = (100, 200, 500, 1000, 2000)  # N of the classical network
    loads: tuple[float, ...] = (0.02, 0.05, 0.08, 0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.17, 0.18, 0.2, 0.22, 0.25)
    probes: int = 200  # patterns that are recalled, at most
    steps: int = 60  # of classical recall, at most
    overlaps: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # of correlated patterns
    small: int = 200  # N of the classical network with correlated patterns and random starts
    starts: int = 200  # random states from which recall starts
    modern: tuple[int, ...] = (8, 16, 24)  # N of the modern network
    rates: tuple[float, ...] = (0.125, 0.25, 0.375, 0.4375, 0.5, 0.5625, 0.625, 0.6875, 0.75)  # log₂ M / N
    betas: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)

    def batches(self) -> list[list[Point]]:
        """Return one batch per setting, with all its seeds."""
        settings = [
            *grid(part=["load"], units=self.units, load=self.loads),
            *grid(part=["correlated"], overlap=self.overlaps),
            *grid(part=["ends"], load=RANDOM_LOADS),
            *grid(part=["modern"], units=self.modern, rate=self.rates),
            *grid(part=["beta"], beta=self.betas),
            {"part": "attention"},
        ]
        return [[{**setting, "seed": seed} for seed in range(self.seeds)] for setting in settings]

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        return [self._measure(point, torch.Generator().manual_seed(point["seed"]), device) for point in points]

    def _measure(self, point: Point, generator: torch.Generator, device: torch.device) -> Row:
        match point["part"]:
            case "load":
                count = max(round(point["load"] * point["units"]), 1)
                return {"error": self._wrong_bits(_signs((count, point["units"]), generator).to(device))}
            case "correlated":
                return {"error": self._wrong_bits(self._correlated_patterns(point["overlap"], generator).to(device))}
            case "ends":
                return self._ends(point["load"], generator)
            case "modern":
                one, several = self._distances(point["units"], point["rate"], 1.0, generator, device)
                return {"one": _share(one < CLOSE), "several": _share(several < CLOSE)}
            case "beta":
                one, several = self._distances(32, 0.25, point["beta"], generator, device)
                return {"one": float(one.mean()), "several": float(several.mean())}
            case _:
                return {"gap": _gap_to_attention(generator, device)}

    def _correlated_patterns(self, overlap: float, generator: torch.Generator) -> Tensor:
        """Draw patterns that agree with one template: any two of them have this overlap on average."""
        template = _signs((1, self.small), generator)
        noise = torch.rand(round(0.05 * self.small), self.small, generator=generator)
        return torch.where(noise < (1 + math.sqrt(overlap)) / 2, template, -template)

    def _wrong_bits(self, patterns: Tensor) -> float:
        cues = patterns[: self.probes]
        return _share(Classical.store(patterns).recall(cues, steps=self.steps).state != cues)

    def _ends(self, load: float, generator: torch.Generator) -> Row:
        """Return the shares of random starts that converge to a pattern or its negative, and to a mixture of three."""
        patterns = _signs((max(round(load * self.small), 3), self.small), generator)
        cues = _signs((self.starts, self.small), generator)
        state = Classical.store(patterns).recall(cues, mode="asynchronous", generator=generator).state
        overlaps = state @ patterns.mT / self.small
        best = overlaps.abs().topk(3, dim=-1)
        three = patterns[best.indices] * overlaps.gather(-1, best.indices).sign().unsqueeze(-1)  # [starts, 3, N]
        at_mixture = (state * three.sum(1).sign()).mean(-1) > 0.95
        at_pattern = best.values[:, 0] > 0.95
        return {"pattern": _share(at_pattern), "mixture": _share(at_mixture & ~at_pattern)}

    def _distances(
        self, units: int, rate: float, beta: float, generator: torch.Generator, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return ‖ξ − x‖² / N after one step and after several, from cues with an eighth of the bits flipped."""
        patterns = _signs((round(2 ** (rate * units)), units), generator)
        targets = patterns[torch.randint(len(patterns), (self.probes,), generator=generator)]
        flipped = torch.rand(targets.shape, generator=generator).argsort(-1) < units // 8
        cues, targets = torch.where(flipped, -targets, targets).to(device), targets.to(device)
        network = Modern(patterns.to(device), beta=beta)
        one, several = network.step(cues), network.recall(cues, steps=STEPS).state
        return (one - targets).square().mean(-1), (several - targets).square().mean(-1)

    def table(self, rows: Sequence[Row]) -> Table:
        lines = []
        for units in self.units:
            group = select(rows, part="load", units=units)
            for nominal in (0.1, 0.14, 0.18):
                load = min(self.loads, key=lambda load: abs(load - nominal))
                name = f"wrong bits at {load:g} N patterns"
                lines.append([f"classical, N = {units}", name, *spreads(select(group, load=load), "error")])
            knee = crossing(curve(group, "load", "error"))
            lines.append([f"classical, N = {units}", "load at 5 % wrong bits", f"{knee:.3f}"])
        for load in RANDOM_LOADS:
            for end in ("pattern", "mixture"):
                name = f"random starts that end at a {end}, {load:g} N"
                cells = spreads(select(rows, part="ends", load=load), end)
                lines.append([f"classical, N = {self.small}", name, *cells])
        for units in self.modern:
            for rate in self.rates:
                name = f"retrieved in one step of {round(2 ** (rate * units)):,} patterns"
                cells = spreads(select(rows, part="modern", units=units, rate=rate), "one")
                lines.append([f"modern, N = {units}", name, *cells])
        gap = max(row["gap"] for row in select(rows, part="attention"))
        lines.append(["modern", "one step against attention: largest difference", f"{gap:.0e}"])
        return Table(["network", "measured", "value"], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        """Yield claims about the loads, rates and β that were measured."""
        yield from self._classical_claims(rows)
        yield from self._modern_claims(rows)
        gap = max(row["gap"] for row in select(rows, part="attention"))
        yield Claim("one step is one attention pass", gap < 1e-12, f"largest difference {gap:.0e}")

    def _classical_claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        errors = {units: curve(rows, "load", "error", part="load", units=units) for units in self.units}
        largest = max(self.units)
        error = errors[largest]
        if min(error.x) <= 0.125 and max(error.x) >= 0.16:
            knee = crossing(error)
            statement = f"the classical network breaks down near {BREAKDOWN} N"
            yield Claim(statement, 0.125 < knee < 0.16, f"5 % wrong bits at {knee:.3f} N, N = {largest}")
        if error.has(0.1):
            measured, theory = error.at(0.1), mean_field_error(0.1)
            statement = "below that load the wrong bits are those of mean-field theory"
            yield Claim(statement, 0.5 < measured / theory < 2, f"{measured:.5f} at 0.1 N, theory {theory:.5f}")
        if error.has(0.12, 0.16) and len(errors) > 1:
            rises = {units: values.at(0.16) - values.at(0.12) for units, values in errors.items()}
            measured_rises = ", ".join(f"N = {units}: {rise:.3f}" for units, rise in rises.items())
            yield Claim(
                "the larger the network, the sharper the knee",
                rises[largest] > rises[min(self.units)] + 0.03,
                f"{measured_rises} more wrong bits at 0.16 than at 0.12",
            )
        correlated = curve(rows, "overlap", "error", part="correlated")
        if correlated.has(0) and len(correlated.x) > 1:
            first, last = correlated.mean[0], correlated.mean[-1]
            yield Claim(
                "correlated patterns are lost at a load that random ones survive",
                first < 0.01 and last > 0.05,
                f"wrong bits {first:.3f} → {last:.3f} from overlap 0 to {correlated.x[-1]:g}",
            )
        pattern, mixture = (curve(rows, "load", end, part="ends").mean for end in ("pattern", "mixture"))
        yield Claim(
            "random starts end at patterns when few are stored, and elsewhere when many are",
            pattern[0] > 0.5 > 0.3 > pattern[-1],
            " → ".join(f"{share:.2f}" for share in pattern),
        )
        statement = "mixtures of three patterns are resting places too"
        yield Claim(statement, max(mixture) > 0.01, f"up to {max(mixture):.2f} of random starts")

    def _modern_claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        shares = {units: curve(rows, "rate", "one", part="modern", units=units) for units in self.modern}
        widest = max(self.modern)
        if shares[widest].has(0.125):
            eighth = {units: share.at(0.125) for units, share in shares.items()}
            measured = ", ".join(f"N = {units}: {share:.2f}" for units, share in eighth.items())
            yield Claim("the modern network retrieves at 2^(N/8) patterns", min(eighth.values()) > 0.9, measured)
        if shares[widest].has(0.375):
            share, patterns = shares[widest].at(0.375), round(2 ** (0.375 * widest))
            statement = "and far beyond what a classical one of its size stores"
            measured = f"N = {widest}: {share:.2f} of {patterns:,} patterns, classical {BREAKDOWN * widest:.1f}"
            yield Claim(statement, share > 0.9, measured)
        one, several = (curve(rows, "beta", steps, part="beta") for steps in ("one", "several"))
        if len(one.x) > 1:
            first, last = one.mean[0], one.mean[-1]
            statement = "a small β averages the patterns, a large one picks one"
            yield Claim(statement, first > 0.8 and last < 0.01, f"error {first:.2f} → {last:.4f}")
        if one.has(0.2, 0.5):
            higher, lower = several.at(0.2) - one.at(0.2), one.at(0.5) / several.at(0.5)
            yield Claim(
                "further steps continue in the direction of the first: to the mean at β = 0.2, to the pattern at 0.5",
                higher > 0.2 and lower > 100,
                f"error {higher:.2f} higher, and {lower:,.0f} times lower",
            )

    def panels(self) -> list[style.Panel]:
        sizes = {
            units: style.line(f"N = {units}", color)
            for units, color in zip(self.units, cycle(REDS[-len(self.units) :]), strict=False)
        }
        capacities = {
            units: style.line(f"N = {units}: up to {2 ** (max(self.rates) * units):,.0f} patterns", color)
            for units, color in zip(self.modern, cycle(style.SHADES), strict=False)
        }
        ends = [
            style.Series(style.line("a pattern or its negative", plotting.BLUE), "pattern", {"part": "ends"}),
            style.Series(style.line("a mixture of three", plotting.AMBER), "mixture", {"part": "ends"}),
        ]
        steps = [
            style.Series(style.line("one step", plotting.BLUE), "one", {"part": "beta"}),
            style.Series(style.line(f"{STEPS} steps", plotting.GREEN), "several", {"part": "beta"}),
        ]
        load = style.by("units", sizes, "error", part="load")
        rates = style.by("units", capacities, "one", part="modern")
        ends_title = f"classical, N = {self.small}: share of random starts that end at"
        return [
            style.Panel("classical: wrong bits after recall", "patterns / N", "load", load),
            style.Panel(ends_title, "patterns / N", "load", ends),
            style.Panel("modern: share retrieved in one step", "log₂(patterns) / N", "rate", rates),
            style.log_panel("modern: error, 256 patterns, N = 32", "β", "beta", steps),
        ]

    def figure(self, rows: Sequence[Row]) -> Figure:
        figure, (load, ends, modern, beta) = style.figure_of(
            self.panels(),
            rows,
            "Hopfield networks, classical and modern",
            f"classical: recall from a stored pattern; modern: from one with an eighth of its bits flipped; "
            f"mean and range of {self.seeds} seeds; dashed: mean-field theory",
        )
        loads = [BREAKDOWN * step / 80 for step in range(1, 80)]
        style.draw_theory(load, loads, [mean_field_error(at) for at in loads], "N → ∞")
        load.axvline(BREAKDOWN, color=plotting.EDGE, lw=1)
        style.note(load, "0.138", (BREAKDOWN, 0.97), xycoords=("data", "axes fraction"), va="top")
        ends.set_ylim(-0.03, 1.04)
        modern.axvline(0.125, color=plotting.EDGE, lw=1)
        style.note(modern, "2^(N/8)", (0.125, 0.97), va="top")
        modern.set_ylim(0, 1.05)
        for axes, place in ((load, "upper left"), (ends, "upper right"), (modern, "lower left"), (beta, "lower left")):
            plotting.legend(axes, loc=place)
        return figure


def crossing(values: Curve, level: float = 0.05) -> float:
    """Return the x at which the curve first rises through a level, interpolated; NaN if it never does."""
    for (x, low), (next_x, high) in pairwise(values.points):
        if low < level <= high:
            return x + (level - low) / (high - low) * (next_x - x)
    return math.nan


def mean_field_error(load: float) -> float:
    """Return the share of wrong bits in a large classical network at n/N = load, 0.5 where nothing is recalled.

    Amit, Gutfreund and Sompolinsky's mean field at temperature zero: the overlap is erf(y) for the largest root y of
    y (√(2·load) + (2/√π) e^{−y²}) = erf(y). The root vanishes at 0.138.
    """

    def gap(y: float) -> float:
        return math.erf(y) - y * (math.sqrt(2 * load) + 2 / math.sqrt(math.pi) * math.exp(-y * y))

    top = 1 / math.sqrt(2 * load)  # the root lies below, because erf is at most 1
    root = max((y for y in (top * step / 4000 for step in range(1, 4001)) if gap(y) > 0 and y > 1e-2), default=0.0)
    return (1 - math.erf(root)) / 2


def _gap_to_attention(generator: torch.Generator, device: torch.device) -> float:
    """Compare one step with torch's attention, where the patterns are keys and values, in float64."""
    patterns = torch.randn(64, 32, generator=generator, dtype=torch.float64).to(device)
    queries = torch.randn(16, 32, generator=generator, dtype=torch.float64).to(device)
    step = Modern(patterns, beta=0.7).step(queries)
    attended = scaled_dot_product_attention(queries[None], patterns[None], patterns[None], scale=0.7)[0]
    return float((step - attended).abs().max())


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(2, shape, generator=generator, dtype=torch.float32) * 2 - 1


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())
