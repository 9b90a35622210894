"""Setting 1 of Schlag et al.: S keys, each written once, any of them asked for. How many can a feature keep apart?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from rebind.lab.experiment import Claim, Experiment, Point, Row, Table, require_known
from rebind.lab.report import courses, curve, select, stayed_finite, told
from rebind.lab.retrieval import FEATURES, SOLVED, Recipe, Task, Training
from rebind.lab.stacks import train_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "linear": "linear (elu + 1)",
    "dpfp-1": "DPFP-1",
    "dpfp-2": "DPFP-2",
    "dpfp-3": "DPFP-3",
    "favor-64": "FAVOR+, m = 64",
    "favor-128": "FAVOR+, m = 128",
    "favor-512": "FAVOR+, m = 512",
    "softmax": "softmax",
}
# The authors' logs, one run a point with keys 64 wide: the largest S solved, and the loss at S = 600.
PUBLISHED = {
    "linear": (40, 0.452),
    "dpfp-1": (100, 0.418),
    "dpfp-2": (240, 0.326),
    "dpfp-3": (340, 0.201),
    "softmax": (340, 0.054),
}
APART = {"softmax": ", and 480"}  # solved too, and nothing between


@dataclass(frozen=True)
class Capacity(Training):
    sizes: tuple[int, ...] = tuple(range(20, 601, 20))  # S
    features: tuple[str, ...] = tuple(FEATURES)


QUICK = Capacity(
    seeds=2,
    sizes=(8, 16, 32),
    features=("linear", "dpfp-1", "dpfp-2", "softmax"),
    key_width=16,
    batch=32,
    rate=3e-3,
    steps=300,
    every=100,
)


def batches(config: Capacity) -> list[list[Point]]:
    """One for each feature and size: the seeds train together."""
    require_known("feature", config.features, FEATURES)
    return [
        [{"feature": feature, "size": size, "seed": seed} for seed in range(config.seeds)]
        for feature in config.features
        for size in config.sizes
    ]


def measure(config: Capacity, points: Sequence[Point], device: torch.device) -> list[Row]:
    return next(side_by_side(config, [points], device))[1]


def side_by_side(
    config: Capacity, batches: Sequence[Sequence[Point]], device: torch.device
) -> Iterator[tuple[int, list[Row]]]:
    jobs = []
    for batch in batches:
        task = Task(batch[0]["size"], batch[0]["size"], replacement=False)
        jobs.append((Recipe(task, batch[0]["feature"]), [point["seed"] for point in batch]))
    for job, trained in train_all(jobs, config, device):
        yield (
            job,
            [{"loss": one.loss, "steps": one.steps, "losses": one.losses, "diverged": one.diverged} for one in trained],
        )


def solved(rows: Sequence[Row]) -> tuple[float, float]:
    """The largest S that every seed solves, and the largest that most seeds solve."""
    found = curve([{"size": row["size"], "solved": row["loss"] <= SOLVED} for row in rows], "size", "solved")
    every = max((size for size, least in zip(found.x, found.low, strict=True) if least), default=0)
    most = max((size for size, share in zip(found.x, found.mean, strict=True) if share > 0.5), default=0)
    return every, most


def table(config: Capacity, rows: Sequence[Row]) -> Table:
    sizes = sorted({config.sizes[0], config.sizes[len(config.sizes) // 2], config.sizes[-1]})
    lines = []
    for feature in config.features:
        some = select(rows, feature=feature)
        cells = [told(select(some, size=size), "loss") for size in sizes]
        largest, loss = PUBLISHED.get(feature, ("—", "—")) if _as_published(config) else ("—", "—")
        apart = APART.get(feature, "") if _as_published(config) else ""
        every, most = solved(some)
        lines.append([LABELS[feature], *cells, str(loss), f"{every:g}", f"{most:g}", f"{largest}{apart}"])
    losses = (f"loss at S = {size}" for size in sizes)
    reached = ("largest S solved by every seed", "by most seeds", "by the one published run")
    return Table(["φ", *losses, "published at S = 600", *reached], lines)


def _as_published(config: Capacity) -> bool:
    """Whether the numbers may be laid beside the published ones."""
    return (config.sizes, config.key_width, config.batch) == (Capacity.sizes, Capacity.key_width, Capacity.batch)


def claims(config: Capacity, rows: Sequence[Row]) -> list[Claim]:
    found = {feature: curve(select(rows, feature=feature), "size", "loss") for feature in config.features}
    order = [feature for feature in ("dpfp-3", "dpfp-2", "dpfp-1", "linear") if feature in found]
    last = [found[feature].mean[-1] for feature in order]
    grown = [one.mean[-1] / one.mean[0] for name, one in found.items() if name != "softmax"]
    made = [
        Claim(
            f"the wider φ, the lower the loss at S = {config.sizes[-1]}",
            all(a < 0.97 * b for a, b in pairwise(last)),
            " < ".join(f"{name} {loss:.3f}" for name, loss in zip(order, last, strict=True)),
        ),
        Claim("every fixed width is outgrown: its loss rises with S", min(grown) > 1.5, f"{min(grown):.1f}× or more"),
    ]
    if "softmax" in found:
        best = found["softmax"].mean[-1] < min(last)
        made.append(Claim("softmax, whose memory grows, loses least", best, f"{found['softmax'].mean[-1]:.3f}"))
    made.append(stayed_finite(rows))
    if _as_published(config):
        reached = {name: solved(select(rows, feature=name))[1] for name in PUBLISHED if name in found}
        pairs = ", ".join(f"{name} {most:g} ({PUBLISHED[name][0]})" for name, most in reached.items())
        held = all(most >= PUBLISHED[name][0] for name, most in reached.items())
        says = "most seeds of each solve what its one published run did, or more"
        made.append(Claim(says, held, f"largest S (published): {pairs}"))
    return made


def figure(config: Capacity, rows: Sequence[Row]) -> Figure:
    from rebind.lab import style

    drawn, (loss, learning) = style.panels(
        2,
        "How many keys a feature map keeps apart",
        f"S keys written once, any asked for; trained for up to {config.steps:,} steps; mean and range of "
        f"{config.seeds} seeds",
        width=5.8,
        height=4.6,
    )
    shades = (style.RED, style.CYAN, style.BLUE, style.VIOLET, "#fcd34d", style.AMBER, "#92400e", style.INK)
    colours = dict(zip(LABELS, shades, strict=True))
    for feature in config.features:
        some = select(rows, feature=feature)
        style.draw(loss, curve(some, "size", "loss"), colours[feature], LABELS[feature])
        style.draw(learning, courses(select(some, size=config.sizes[-1]), config.every), colours[feature], ms=1.5)
    loss.axhline(SOLVED, color=style.EDGE, lw=1)
    across = loss.get_yaxis_transform()
    loss.text(0.99, SOLVED, "solved", ha="right", va="bottom", fontsize=8.5, color=style.SOFT, transform=across)
    for one in (loss, learning):
        one.set_yscale("log")
    style.named(loss, "loss at the end", "S, keys", "½‖o − v‖²")
    style.named(learning, f"learning at S = {config.sizes[-1]}", "steps", "")
    style.legend_below(drawn, columns=4)
    return drawn


EXPERIMENT = Experiment(
    name="capacity",
    title="Keys written once, asked for once: what each feature map keeps apart, trained",
    answers="Schlag et al., Figures 2 and 4 (setting 1)",
    takes="for a GPU",
    on_gpu="4 min",
    config=Capacity(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    side_by_side=side_by_side,
    table=table,
    figure=figure,
    claims=claims,
)
