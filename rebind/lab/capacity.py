"""Setting 1 of Schlag et al.: S keys, each written once, any of them asked for. How many can a feature keep apart?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from rebind.lab.experiment import Claim, Experiment, Point, Row, Table
from rebind.lab.report import Curve, curve, select, spread
from rebind.lab.retrieval import FEATURES, SOLVED, Model, Task, Training, train

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
    return [
        [{"feature": feature, "size": size, "seed": seed} for seed in range(config.seeds)]
        for feature in config.features
        for size in config.sizes
    ]


def measure(config: Capacity, points: Sequence[Point], device: torch.device) -> list[Row]:
    size = points[0]["size"]
    models = [Model("sum", point["seed"]) for point in points]
    trained = train(models, Task(size, size, replacement=False), points[0]["feature"], config, device)
    return [{"loss": one.loss, "steps": one.steps, "losses": one.losses} for one in trained]


def solved(found: Curve, most: float = 2 * SOLVED) -> float:
    """The largest S at which the mean loss is about that at which training ends."""
    return max((size for size, loss in zip(found.x, found.mean, strict=True) if loss <= most), default=0)


def table(config: Capacity, rows: Sequence[Row]) -> Table:
    sizes = sorted({config.sizes[0], config.sizes[len(config.sizes) // 2], config.sizes[-1]})
    lines = []
    for feature in config.features:
        some = select(rows, feature=feature)
        cells = [spread([row["loss"] for row in select(some, size=size)]) for size in sizes]
        lines.append([LABELS[feature], *cells, f"{solved(curve(some, 'size', 'loss')):g}"])
    return Table(["φ", *(f"loss at S = {size}" for size in sizes), "largest S solved"], lines)


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
        paths = [
            {"step": (turn + 1) * config.every, "loss": value}
            for row in select(some, size=config.sizes[-1])
            for turn, value in enumerate(row["losses"])
        ]
        style.draw(learning, curve(paths, "step", "loss"), colours[feature])
    loss.axhline(SOLVED, color=style.EDGE, lw=1)
    style.note(loss, "solved", SOLVED)
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
    config=Capacity(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    table=table,
    figure=figure,
    claims=claims,
)
