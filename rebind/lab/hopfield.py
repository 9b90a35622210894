"""Hopfield networks: how many patterns the classical one holds, and how many more the modern one does.

Classical: ±1 patterns in a Hebbian matrix; recall starts from a stored pattern, and wrong bits are counted where it
comes to rest. Modern: the patterns are kept; recall starts from a pattern with an eighth of its bits flipped, and
counts as retrieved when it ends within 5 % of the pattern's energy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rebind.lab.experiment import Claim, Config, Experiment, Point, Row, Table
from rebind.lab.report import Curve, curve, select, spread
from rebind.lab.theory import hopfield_error
from rebind.memory.hopfield import Classical, Modern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KNEE = 0.138  # n/N where a large classical network breaks down
CLOSE = 0.05  # of a pattern's energy: as near as a retrieved one comes
STEPS = 5  # of modern recall, where several are made


@dataclass(frozen=True)
class Hopfield(Config):
    units: tuple[int, ...] = (100, 200, 500, 1000, 2000)  # N of the classical network
    loads: tuple[float, ...] = (0.02, 0.05, 0.08, 0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.17, 0.18, 0.2, 0.22, 0.25)
    probes: int = 200  # patterns asked for, at most
    steps: int = 60  # of classical recall, at most
    overlaps: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # of correlated patterns
    small: int = 200  # N where correlated patterns and random starts are tried
    starts: int = 200  # random ones
    modern: tuple[int, ...] = (8, 16, 24)  # N of the modern network
    rates: tuple[float, ...] = (0.125, 0.25, 0.375, 0.4375, 0.5, 0.5625, 0.625, 0.6875, 0.75)  # log₂ M / N
    betas: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


QUICK = Hopfield(
    units=(100, 300, 1000),
    loads=(0.05, 0.1, 0.12, 0.13, 0.14, 0.15, 0.16, 0.18, 0.22),
    probes=64,
    steps=40,
    overlaps=(0.0, 0.1, 0.2, 0.3, 0.4),
    small=100,
    starts=100,
    rates=(0.125, 0.25, 0.375, 0.5, 0.625),
    betas=(0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
RANDOM_LOADS = (0.02, 0.05, 0.1, 0.15)


def batches(config: Hopfield) -> list[list[Point]]:
    seeds = range(config.seeds)
    classical = [
        [{"part": "load", "units": units, "load": load, "seed": seed} for seed in seeds]
        for units in config.units
        for load in config.loads
    ]
    correlated = [[{"part": "correlated", "overlap": c, "seed": seed} for seed in seeds] for c in config.overlaps]
    ends = [[{"part": "ends", "load": load, "seed": seed} for seed in seeds] for load in RANDOM_LOADS]
    modern = [
        [{"part": "modern", "units": units, "rate": rate, "seed": seed} for seed in seeds]
        for units in config.modern
        for rate in config.rates
    ]
    betas = [[{"part": "beta", "beta": beta, "seed": seed} for seed in seeds] for beta in config.betas]
    return [*classical, *correlated, *ends, *modern, *betas, [{"part": "attention", "seed": seed} for seed in seeds]]


def measure(config: Hopfield, points: Sequence[Point], device: torch.device) -> list[Row]:
    one = {
        "load": _load,
        "correlated": _correlated,
        "ends": _ends,
        "modern": _modern,
        "beta": _beta,
        "attention": _attention,
    }[points[0]["part"]]
    return [one(config, point, torch.Generator().manual_seed(point["seed"]), device) for point in points]


def _load(config: Hopfield, point: Point, generator: torch.Generator, device: torch.device) -> Row:
    count = max(round(point["load"] * point["units"]), 1)
    patterns = _signs((count, point["units"]), generator).to(device)
    return {"error": _wrong_bits(patterns, config)}


def _correlated(config: Hopfield, point: Point, generator: torch.Generator, device: torch.device) -> Row:
    """Patterns that agree with one template: any two of them overlap by the given amount on average."""
    template = _signs((1, config.small), generator)
    count = round(0.05 * config.small)
    agree = torch.rand(count, config.small, generator=generator) < (1 + math.sqrt(point["overlap"])) / 2
    return {"error": _wrong_bits(torch.where(agree, template, -template).to(device), config)}


def _wrong_bits(patterns: Tensor, config: Hopfield) -> float:
    asked = patterns[: config.probes]
    state = Classical.store(patterns).recall(asked, steps=config.steps).state
    return float((state != asked).double().mean())


def _ends(config: Hopfield, point: Point, generator: torch.Generator, device: torch.device) -> Row:
    """Where random starts come to rest: at a pattern or its negative, at a mixture of three, elsewhere."""
    patterns = _signs((max(round(point["load"] * config.small), 3), config.small), generator)
    cues = _signs((config.starts, config.small), generator)
    state = Classical.store(patterns).recall(cues, mode="asynchronous", generator=generator).state
    overlaps = state @ patterns.mT / config.small
    best = overlaps.abs().topk(3, dim=-1)
    three = patterns[best.indices] * overlaps.gather(-1, best.indices).sign().unsqueeze(-1)  # [starts, 3, N]
    mixed = (state * three.sum(1).sign()).mean(-1) > 0.95
    pattern = best.values[:, 0] > 0.95
    return {"pattern": float(pattern.double().mean()), "mixture": float((mixed & ~pattern).double().mean())}


def _modern(config: Hopfield, point: Point, generator: torch.Generator, device: torch.device) -> Row:
    near = _recalled(point["units"], point["rate"], 1.0, config, generator, device)
    return {"one": float((near[0] < CLOSE).double().mean()), "several": float((near[1] < CLOSE).double().mean())}


def _beta(config: Hopfield, point: Point, generator: torch.Generator, device: torch.device) -> Row:
    one, several = _recalled(32, 0.25, point["beta"], config, generator, device)
    return {"one": float(one.mean()), "several": float(several.mean())}


def _recalled(
    units: int, rate: float, beta: float, config: Hopfield, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """‖ξ − x‖² / N after one step and after several, from cues with an eighth of the bits flipped."""
    patterns = _signs((round(2 ** (rate * units)), units), generator)
    asked = patterns[torch.randint(len(patterns), (config.probes,), generator=generator)]
    flipped = torch.rand(asked.shape, generator=generator).argsort(-1) < units // 8
    cue, asked = torch.where(flipped, -asked, asked).to(device), asked.to(device)
    network = Modern(patterns.to(device), beta=beta)
    one, several = network.step(cue), network.recall(cue, steps=STEPS).state
    return (one - asked).square().mean(-1), (several - asked).square().mean(-1)


def _attention(config: Hopfield, point: Point, generator: torch.Generator, device: torch.device) -> Row:
    """One step against torch's attention with the patterns as keys and values, in float64."""
    patterns = torch.randn(64, 32, generator=generator, dtype=torch.float64).to(device)
    queries = torch.randn(16, 32, generator=generator, dtype=torch.float64).to(device)
    step = Modern(patterns, beta=0.7).step(queries)
    attended = scaled_dot_product_attention(queries[None], patterns[None], patterns[None], scale=0.7)[0]
    return {"gap": float((step - attended).abs().max())}


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(2, shape, generator=generator, dtype=torch.float32) * 2 - 1


def table(config: Hopfield, rows: Sequence[Row]) -> Table:
    lines = []
    for units in config.units:
        found = curve(select(rows, part="load", units=units), "load", "error")
        for load in (0.1, 0.14, 0.18):
            near = min(config.loads, key=lambda one: abs(one - load))
            cell = [row["error"] for row in select(rows, part="load", units=units, load=near)]
            lines.append([f"classical, N = {units}", f"wrong bits at {near:g} N patterns", spread(cell)])
        lines.append([f"classical, N = {units}", "load at 5 % wrong bits", f"{knee(found):.3f}"])
    for load in RANDOM_LOADS:
        some = select(rows, part="ends", load=load)
        for name in ("pattern", "mixture"):
            cell = [row[name] for row in some]
            lines.append(
                [f"classical, N = {config.small}", f"random starts that end at a {name}, {load:g} N", spread(cell)]
            )
    for units in config.modern:
        for rate in config.rates:
            cell = [row["one"] for row in select(rows, part="modern", units=units, rate=rate)]
            count = round(2 ** (rate * units))
            lines.append([f"modern, N = {units}", f"retrieved in one step of {count:,} patterns", spread(cell)])
    gap = max(row["gap"] for row in select(rows, part="attention"))
    lines.append(["modern", "one step against attention: largest difference", f"{gap:.0e}"])
    return Table(["network", "measured", "value"], lines)


def knee(found: Curve, level: float = 0.05) -> float:
    """Where the curve first rises through the level, between two points on a straight line."""
    for index in range(1, len(found.x)):
        low, high = found.mean[index - 1], found.mean[index]
        if low < level <= high:
            return found.x[index - 1] + (level - low) / (high - low) * (found.x[index] - found.x[index - 1])
    return math.nan


def claims(config: Hopfield, rows: Sequence[Row]) -> list[Claim]:
    """A claim about a load, a rate or a β is made only where that was measured."""
    return [*_load_claims(config, rows), *_rest_claims(rows), *_modern_claims(config, rows), *_beta_claims(rows)]


def _load_claims(config: Hopfield, rows: Sequence[Row]) -> list[Claim]:
    by_units = {units: curve(select(rows, part="load", units=units), "load", "error") for units in config.units}
    largest, made = max(config.units), []
    found = by_units[largest]
    if min(found.x) <= 0.125 and max(found.x) >= 0.16:
        at = knee(found)
        says = f"the classical network breaks down near {KNEE} N"
        made.append(Claim(says, 0.125 < at < 0.16, f"5 % wrong at {at:.3f} N, N = {largest}"))
    if found.has(0.1):
        got, theory = found.at(0.1), hopfield_error(0.1)
        says = "below it the wrong bits are those of mean-field theory"
        made.append(Claim(says, 0.5 < got / theory < 2, f"{got:.5f} at 0.1 N, theory {theory:.5f}"))
    if found.has(0.12, 0.16) and len(by_units) > 1:
        rises = {units: one.at(0.16) - one.at(0.12) for units, one in by_units.items()}
        each = ", ".join(f"N = {units}: {rise:.3f}" for units, rise in rises.items())
        made.append(
            Claim(
                "the larger the network, the sharper the knee",
                rises[largest] > rises[min(config.units)] + 0.03,
                f"{each} more wrong bits at 0.16 than at 0.12",
            )
        )
    return made


def _rest_claims(rows: Sequence[Row]) -> list[Claim]:
    """Where recall from correlated patterns and from random starts comes to rest."""
    made = []
    apart = curve(select(rows, part="correlated"), "overlap", "error")
    ends = {name: curve(select(rows, part="ends"), "load", name) for name in ("pattern", "mixture")}
    if apart.has(0) and len(apart.x) > 1:
        made.append(
            Claim(
                "correlated patterns are lost at a load that random ones survive",
                apart.mean[0] < 0.01 and apart.mean[-1] > 0.05,
                f"wrong bits {apart.mean[0]:.3f} → {apart.mean[-1]:.3f} from overlap 0 to {apart.x[-1]:g}",
            )
        )
    return [
        *made,
        Claim(
            "random starts end at patterns when few are stored, and elsewhere when many are",
            ends["pattern"].mean[0] > 0.5 > 0.3 > ends["pattern"].mean[-1],
            " → ".join(f"{share:.2f}" for share in ends["pattern"].mean),
        ),
        Claim(
            "mixtures of three patterns are resting places too",
            max(ends["mixture"].mean) > 0.01,
            f"up to {max(ends['mixture'].mean):.2f} of random starts",
        ),
    ]


def _modern_claims(config: Hopfield, rows: Sequence[Row]) -> list[Claim]:
    found = {units: curve(select(rows, part="modern", units=units), "rate", "one") for units in config.modern}
    wide, made = max(config.modern), []
    if found[wide].has(0.125):
        eighth = {units: one.at(0.125) for units, one in found.items()}
        each = ", ".join(f"N = {units}: {share:.2f}" for units, share in eighth.items())
        made.append(Claim("the modern network retrieves at 2^(N/8) patterns", min(eighth.values()) > 0.9, each))
    if found[wide].has(0.375):
        share, patterns = found[wide].at(0.375), round(2 ** (0.375 * wide))
        made.append(
            Claim(
                "and far beyond what a classical one of its size holds",
                share > 0.9,
                f"N = {wide}: {share:.2f} of {patterns:,} patterns, classical {KNEE * wide:.1f}",
            )
        )
    return made


def _beta_claims(rows: Sequence[Row]) -> list[Claim]:
    one, several = (curve(select(rows, part="beta"), "beta", name) for name in ("one", "several"))
    gap, made = max(row["gap"] for row in select(rows, part="attention")), []
    if len(one.x) > 1:
        made.append(
            Claim(
                "a small β averages the patterns, a large one picks one",
                one.mean[0] > 0.8 and one.mean[-1] < 0.01,
                f"error {one.mean[0]:.2f} → {one.mean[-1]:.4f}",
            )
        )
    if one.has(0.2, 0.5):
        drift, sharper = several.at(0.2) - one.at(0.2), one.at(0.5) / several.at(0.5)
        made.append(
            Claim(
                "further steps go where the first one headed: to the mean at β = 0.2, to the pattern at 0.5",
                drift > 0.2 and sharper > 100,
                f"error {drift:.2f} higher, and {sharper:,.0f} times lower",
            )
        )
    return [*made, Claim("one step is one attention pass", gap < 1e-12, f"largest difference {gap:.0e}")]


def figure(config: Hopfield, rows: Sequence[Row]) -> Figure:
    from rebind.lab import style

    drawn, (load, ends, modern, beta) = style.panels(
        4,
        "Hopfield networks, classical and modern",
        f"classical: recall from a stored pattern; modern: from one with an eighth of its bits flipped; "
        f"mean and range of {config.seeds} seeds; dashed: mean-field theory",
        columns=2,
        width=5.4,
        height=4.0,
    )
    _draw_load(load, config, rows)
    _draw_ends(ends, config, rows)
    shades = (style.CYAN, style.BLUE, style.VIOLET, style.PINK, style.AMBER)
    for units, colour in zip(config.modern, cycle(shades), strict=False):
        found = curve(select(rows, part="modern", units=units), "rate", "one")
        style.draw(modern, found, colour, f"N = {units}: up to {2 ** (max(config.rates) * units):,.0f} patterns")
    modern.axvline(0.125, color=style.EDGE, lw=1)
    modern.annotate("2^(N/8)", (0.125, 0.03), xytext=(4, 0), textcoords="offset points", fontsize=8.5, color=style.SOFT)
    modern.set_ylim(0, 1.05)
    style.named(modern, "modern: share retrieved in one step", "log₂(patterns) / N", "")
    style.legend(modern, loc="lower left", bbox_to_anchor=(0.0, 0.1))
    for name, label, colour in (("one", "one step", style.BLUE), ("several", f"{STEPS} steps", style.GREEN)):
        style.draw(beta, curve(select(rows, part="beta"), "beta", name), colour, label)
    beta.set(xscale="log", yscale="log")
    style.named(beta, "modern: error against β, 256 patterns, N = 32", "β", "")
    style.legend(beta, loc="lower left")
    return drawn


def _draw_load(axes: Axes, config: Hopfield, rows: Sequence[Row]) -> None:
    from rebind.lab import style

    shades = ("#fca5a5", "#f87171", "#dc2626", "#991b1b", "#450a0a")
    for units, colour in zip(config.units, cycle(shades[-len(config.units) :]), strict=False):
        style.draw(axes, curve(select(rows, part="load", units=units), "load", "error"), colour, f"N = {units}")
    loads = [KNEE * step / 80 for step in range(1, 80)]
    style.theory(axes, loads, [hopfield_error(one) for one in loads], "N → ∞")
    axes.axvline(KNEE, color=style.EDGE, lw=1)
    axes.annotate(
        "0.138",
        (KNEE, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
        color=style.SOFT,
    )
    style.named(axes, "classical: wrong bits after recall", "patterns / N", "")
    style.legend(axes, loc="upper left")


def _draw_ends(axes: Axes, config: Hopfield, rows: Sequence[Row]) -> None:
    from rebind.lab import style

    some = select(rows, part="ends")
    pattern, mixture = curve(some, "load", "pattern"), curve(some, "load", "mixture")
    bottom = [0.0] * len(pattern.x)
    rest = [1 - a - b for a, b in zip(pattern.mean, mixture.mean, strict=True)]
    parts = (
        ("a pattern or its negative", pattern.mean, style.BLUE),
        ("a mixture of three", mixture.mean, style.AMBER),
        ("elsewhere", rest, style.FAINT),
    )
    for label, heights, colour in parts:
        axes.bar([f"{load:g}" for load in pattern.x], heights, bottom=bottom, color=colour, width=0.62, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 1.2)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    style.named(axes, f"classical, N = {config.small}: random starts end at", "patterns / N", "")
    style.legend(axes, loc="upper center", ncols=3, handlelength=1.0, columnspacing=1.2)


EXPERIMENT = Experiment(
    name="hopfield",
    title="Classical capacity and its knee, spurious states; modern capacity, β, steps",
    answers='"Memory and Forgetting", appendix: 0.14 N memories, exponentially many, one step = one attention pass',
    takes="80 s",
    on_gpu="22 s",
    config=Hopfield(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    table=table,
    figure=figure,
    claims=claims,
)
