"""Multi-query associative recall: how much of what was said does a state of so many numbers give back?

Zoology's task (`rebind.lab.recall` has it), plotted as published work plots it: accuracy against the size of the state,
one line a rule. All rules are the same layer at the same width, so their models have the same parameters but for gates;
attention, whose state grows with the sequence, stands beside them. A model is trained at several rates, and the best
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from rebind.lab.experiment import Claim, Experiment, Point, Row, Table, require_known
from rebind.lab.recall import NORMALISERS, SOFTMAX, Model, Recall, Task, parameters, state
from rebind.lab.recall_training import train
from rebind.lab.report import Curve, curve, select, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "sum": "sum",
    "mamba2": "Mamba-2",
    "longhorn": "Longhorn",
    "delta": "delta",
    "gated_delta": "gated delta",
    SOFTMAX: "softmax attention",
}


@dataclass(frozen=True)
class Mqar(Recall):
    rules: tuple[str, ...] = tuple(NORMALISERS)
    widths: tuple[int, ...] = (32, 64, 128, 256)
    seeds: int = 2


QUICK = Mqar(
    seeds=3,
    rules=("sum", "delta", SOFTMAX),
    widths=(8, 16, 24),
    vocabulary=48,
    trained=("16x4", "32x8"),
    tested=("16x4", "24x6", "32x8"),
    layers=1,
    heads=1,
    rates=(3e-2,),
    batch=24,
    steps=250,
    every=50,
    sequences=64,
)


def batches(config: Mqar) -> list[list[Point]]:
    """One for each rule and width: rates and seeds train together."""
    require_known("rule", config.rules, NORMALISERS)
    for size in (*config.trained, *config.tested):
        Task.parse(size, config.vocabulary)
    return [
        [
            {"rule": rule, "width": width, "rate": rate, "seed": seed}
            for rate in config.rates
            for seed in range(config.seeds)
        ]
        for rule in config.rules
        for width in config.widths
    ]


def measure(config: Mqar, points: Sequence[Point], device: torch.device) -> list[Row]:
    rule, width = points[0]["rule"], points[0]["width"]
    trained = train([Model(point["rate"], point["seed"]) for point in points], rule, width, config, device)
    sizes = {"state": state(rule, width, config), "parameters": parameters(rule, width, config)}
    return [{**sizes, "accuracies": one.accuracies, "steps": one.steps, "course": one.course} for one in trained]


def hardest(config: Mqar) -> int:
    """Which of the tested sizes has most pairs and is no longer than what was trained."""
    longest = max(length for length, _ in _sizes(config.trained))
    within = [(pairs, at) for at, (length, pairs) in enumerate(_sizes(config.tested)) if length <= longest]
    return max(within)[1]


def best(config: Mqar, rows: Sequence[Row]) -> list[Row]:
    """Of each rule, width and seed the rate that ends best, with its `accuracy` at the hardest size."""
    at = hardest(config)
    found: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        place = row["rule"], row["width"], row["seed"]
        if place not in found or row["accuracies"][at] > found[place]["accuracy"]:
            found[place] = {**row, "accuracy": row["accuracies"][at]}
    return list(found.values())


def _sizes(written: Sequence[str]) -> list[tuple[int, int]]:
    """Length and pairs of each size."""
    return [(int(length), int(pairs)) for length, _, pairs in (size.partition("x") for size in written)]


def table(config: Mqar, rows: Sequence[Row]) -> Table:
    chosen, lines = best(config, rows), []
    for rule in config.rules:
        for width in config.widths:
            some = select(chosen, rule=rule, width=width)
            cells = [spread([row["accuracies"][at] for row in some], 2) for at in range(len(config.tested))]
            rates = ", ".join(f"{rate:.2g}" for rate in sorted({row["rate"] for row in some}))
            lines.append(
                [LABELS[rule], str(width), f"{some[0]['parameters']:,}", f"{some[0]['state']:,}", rates, *cells]
            )
    sizes = [f"{pairs} in {length}" for length, pairs in _sizes(config.tested)]
    return Table(["rule", "width", "parameters", "state", "rate", *sizes], lines)


def claims(config: Mqar, rows: Sequence[Row]) -> list[Claim]:
    """About the best of all trainings: what a state can hold, not how surely it is found."""
    chosen = best(config, rows)
    top = {rule: curve(select(chosen, rule=rule), "width", "accuracy").high for rule in config.rules}
    length, pairs = _sizes(config.tested)[hardest(config)]
    told = f"{pairs} pairs in {length} tokens"
    made = []
    if SOFTMAX in top:
        got = top[SOFTMAX][-1]
        made.append(Claim(f"attention recalls {told}", 0.95 < got <= 1, f"{got:.3f} at the largest width"))
    if "sum" in top and len(config.widths) > 1:
        rises = all(b > a - 0.05 for a, b in zip(top["sum"], top["sum"][1:], strict=False))
        made.append(
            Claim(
                f"the sum's accuracy at {told} rises with its state",
                rises and top["sum"][-1] > top["sum"][0] + 0.2,
                ", ".join(f"{got:.2f}" for got in top["sum"]),
            )
        )
    if {"sum", "delta"} <= set(top):
        ahead = [d - s for d, s in zip(top["delta"], top["sum"], strict=True)]
        made.append(
            Claim(
                f"with a state of the same size delta recalls no less than sum of {told}, to 0.1",
                min(ahead) > -0.1,
                ", ".join(f"{one:+.2f}" for one in ahead),
            )
        )
    return made


def figure(config: Mqar, rows: Sequence[Row]) -> Figure:
    from rebind.lab import style

    chosen = best(config, rows)
    middle = config.widths[len(config.widths) // 2 - (len(config.widths) % 2 == 0)]
    drawn, (left, centre, right) = style.panels(
        3,
        "What a state of fixed size gives back",
        f"multi-query associative recall, a vocabulary of {config.vocabulary:,}, {config.layers} "
        f"layer{'s' if config.layers > 1 else ''}; the best of the rates, mean and range of {config.seeds} seeds",
        height=4.2,
    )
    length, pairs = _sizes(config.tested)[hardest(config)]
    colours = {**style.RULES, SOFTMAX: style.INK}
    for rule in config.rules:
        some, colour = select(chosen, rule=rule), colours[rule]
        look: dict[str, Any] = {"ls": (0, (4, 2.5))} if rule == SOFTMAX else {}
        style.draw(left, curve(some, "state", "accuracy"), colour, LABELS[rule], **look)
        here = select(some, width=middle)
        style.draw(centre, _by_pairs(config, here), colour, **look)
        style.draw(right, _course(config, here), colour, ms=2.4, **look)
    left.set(xscale="log")
    style.named(left, f"{pairs} pairs in {length} tokens", "numbers in a layer's state", "answers that are right")
    centre.set(xscale="log")
    counts = sorted({pairs for _, pairs in _sizes(config.tested)})
    centre.set_xticks(counts, [str(one) for one in counts])
    centre.minorticks_off()
    style.named(centre, f"Width {middle}", "pairs (in longer sequences)", "answers that are right")
    beyond = [count for count in counts if count > pairs]
    if beyond:
        centre.axvspan((pairs * beyond[0]) ** 0.5, counts[-1] * 1.15, color=style.FAINT, alpha=0.5, lw=0, zorder=0)
        centre.text(
            counts[-1] * 1.1, 0.94, "longer than\ntrained", ha="right", va="top", fontsize=8.5, color=style.SOFT
        )
    style.named(right, f"Width {middle}, {pairs} pairs in {length} tokens", "step", "answers that are right")
    for one in (left, centre, right):
        one.set_ylim(-0.03, 1.04)
    style.legend_below(drawn, columns=len(config.rules))
    return drawn


def _by_pairs(config: Mqar, rows: Sequence[Row]) -> Curve:
    """Accuracy against pairs; sizes with as many pairs are averaged."""
    found = []
    for row in rows:
        for pairs in {pairs for _, pairs in _sizes(config.tested)}:
            some = [got for got, (_, n) in zip(row["accuracies"], _sizes(config.tested), strict=True) if n == pairs]
            found.append({"pairs": pairs, "accuracy": fmean(some)})
    return curve(found, "pairs", "accuracy")


def _course(config: Mqar, rows: Sequence[Row]) -> Curve:
    """Accuracy against steps, to where the last seed ends; one that ended sooner stays where it was."""
    evaluations = max(len(row["course"]) for row in rows)
    found = []
    for row in rows:
        course = row["course"] + [row["course"][-1]] * (evaluations - len(row["course"]))
        steps = [min(config.every * (at + 1), config.steps) for at in range(evaluations)]
        found += [{"step": step, "accuracy": got} for step, got in zip(steps, course, strict=True)]
    return curve(found, "step", "accuracy")


EXPERIMENT = Experiment(
    name="mqar",
    title="Multi-query associative recall: accuracy against the size of the state",
    answers="the recall of Zoology and Based (Arora et al.), accuracy against state size",
    takes="for a GPU",
    on_gpu="under 45 min",  # 2,539 s of seven runs, six of them beside other programs
    config=Mqar(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    table=table,
    figure=figure,
    claims=claims,
)
