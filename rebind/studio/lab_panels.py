"""The curves of the lab's experiments while they are measured: a few panels per experiment, each with its series.

The figure of an experiment is drawn once, at the end, and needs all its points. These panels show the same quantities
from the first point on. A panel of a new experiment is one function here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from rebind import plotting
from rebind.lab import closed_form, cost, forgetting, style, ttt_1d
from rebind.lab.closed_form import ClosedForm
from rebind.lab.consolidation import experiment as consolidation
from rebind.lab.consolidation.experiment import LifeOfFacts
from rebind.lab.edits import experiment as edits
from rebind.lab.experiment import Experiment, Row
from rebind.lab.hopfield import STEPS, Hopfield
from rebind.lab.mqar.experiment import Mqar
from rebind.lab.report import curve, learning_curve, select
from rebind.lab.retrieval import capacity
from rebind.lab.retrieval.capacity import Capacity
from rebind.lab.retrieval.overwrite import Overwrite

Expand: TypeAlias = Callable[[Sequence[Row]], Sequence[Row]]
SHADES = (plotting.CYAN, plotting.BLUE, plotting.VIOLET, plotting.PINK, plotting.AMBER)


@dataclass(frozen=True)
class Series:
    """One curve: the rows that belong to it and the column that it shows."""

    label: str
    color: str
    y: str
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """Some curves over one quantity. `expand` turns rows that hold a list into one row per item."""

    title: str
    x_label: str
    x: str
    series: Sequence[Series]
    x_scale: str = "linear"  # or "log", or "symlog", which shows 0 too
    y_scale: str = "linear"
    expand: Expand = list

    def to_json(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the panel with what is measured so far: the mean and the range over the seeds at each x."""
        rows, series = self.expand(rows), []
        for one in self.series:
            values = curve([row for row in select(rows, **one.where) if one.y in row], self.x, one.y)
            numbers = {"x": values.x, "mean": values.mean, "low": values.low, "high": values.high}
            series.append({"label": one.label, "color": one.color, **numbers})
        names = ("title", "x_label", "x_scale", "y_scale")
        return {**{name: getattr(self, name) for name in names}, "series": series}


def panels(experiment: Experiment) -> list[Panel]:
    """Return the panels of an experiment."""
    return PANELS[experiment.name](experiment)


def by(column: str, looks: Mapping[Any, style.LineStyle], y: str, **where: Any) -> list[Series]:
    """Return one series per value of a column that has a look."""
    return [Series(look["label"], look["color"], y, {**where, column: value}) for value, look in looks.items()]


def _closed_form(experiment: ClosedForm) -> list[Panel]:
    return [
        Panel(f"recall error, {closed_form.KEYS[keys]}", "n / d", "load", series, y_scale="log")
        for keys in experiment.keys
        for series in [by("rule", closed_form.RULES, "error", keys=keys)]
    ]


def _forgetting(experiment: Experiment) -> list[Panel]:
    stream = partial(by, "rule", forgetting.RULES, part="stream")
    reuse = by("rule", forgetting.RULES, "error", part="reuse")
    age = "age: writes since"
    return [
        Panel("retention ⟨Wk, v⟩ / ‖v‖²", age, "age", stream("retention"), "symlog"),
        Panel("error ‖Wk − v‖² / ‖v‖²", age, "age", stream("error"), "symlog", "log"),
        Panel("error of the latest value, keys reused", "distinct keys / d", "pool", reuse, "log", "log"),
    ]


def _hopfield(experiment: Hopfield) -> list[Panel]:
    load = [
        Series(f"N = {units}", color, "error", {"part": "load", "units": units})
        for units, color in zip(experiment.units, SHADES, strict=False)
    ]
    ends = [("pattern", "a pattern", plotting.BLUE), ("mixture", "a mixture of three", plotting.AMBER)]
    modern = [
        Series(f"N = {units}", color, "one", {"part": "modern", "units": units})
        for units, color in zip(experiment.modern, SHADES, strict=False)
    ]
    beta = [("one", "one step", plotting.BLUE), ("several", f"{STEPS} steps", plotting.GREEN)]
    return [
        Panel("classical: wrong bits after recall", "patterns / N", "load", load),
        Panel(
            f"classical, N = {experiment.small}: random starts end at",
            "patterns / N",
            "load",
            [Series(label, color, y, {"part": "ends"}) for y, label, color in ends],
        ),
        Panel("modern: share retrieved in one step", "log₂(patterns) / N", "rate", modern),
        Panel(
            "modern: error, 256 patterns, N = 32",
            "β",
            "beta",
            [Series(label, color, y, {"part": "beta"}) for y, label, color in beta],
            "log",
            "log",
        ),
    ]


def _ttt_1d(experiment: Experiment) -> list[Panel]:
    rules = {name: ttt_1d.RULES[name] for name in ("rfa", "gated_delta", "longhorn", "delta")}
    learning = [
        Panel(title, "tokens", "t", by("by", looks, "memory", task=task), expand=_by_token)
        for title, task, looks in [
            ("a line: the memory W, w* = 1", "line", rules),
            ("a step: the slope jumps to −1", "step", rules),
            ("the same, by gradient descent", "step", {name: ttt_1d.MODES[name] for name in ("online", "mini-batch")}),
        ]
    ]
    juicing = by("start", ttt_1d.STARTS, "tokens", part="juicing")
    return [*learning, Panel("tokens until a tenth of the error is left", "d", "width", juicing, "log", "log")]


def _by_token(rows: Sequence[Row]) -> list[Row]:
    trajectories = select(rows, part="trajectory")
    return [{**row, "t": t, "memory": w} for row in trajectories for t, w in enumerate(row["memory"], 1)]


def _cost(experiment: Experiment) -> list[Panel]:
    panel = partial(Panel, x_scale="log", y_scale="log")
    sequence = partial(by, "op", cost.OPS, part="sequence")
    solve = partial(by, "solve", cost.SOLVES, "seconds")
    return [
        panel("seconds per sequence", "T, tokens", "length", sequence("seconds")),
        panel("bytes stored for the next token", "T, tokens", "length", sequence("state_bytes")),
        panel("seconds per solve, few rows", "d", "d", solve(part="width")),
        panel("seconds per solve, one width", "n", "n", solve(part="rows")),
    ]


def _mqar(experiment: Mqar) -> list[Panel]:
    looks = {rule: style.RULES[rule] for rule in experiment.rules}
    widest = max(experiment.widths)
    course = _course("course", experiment.every, "rule", width=widest)
    return [
        Panel("accuracy", "size of the state", "state", by("rule", looks, "accuracy"), "log", expand=experiment.best),
        Panel(f"learning, width {widest}", "steps", "step", by("rule", looks, "value"), expand=course),
    ]


def _capacity(experiment: Capacity) -> list[Panel]:
    looks = {feature: capacity.FEATURES[feature] for feature in experiment.features}
    largest = experiment.sizes[-1]
    course = _course("losses", experiment.every, "feature", size=largest)
    return [
        Panel("loss at the end", "S, keys", "size", by("feature", looks, "loss"), y_scale="log"),
        Panel(
            f"learning at S = {largest}", "steps", "step", by("feature", looks, "value"), y_scale="log", expand=course
        ),
    ]


def _overwrite(experiment: Overwrite) -> list[Panel]:
    looks = {rule: style.RULES[rule] for rule in experiment.rules}
    largest, feature = experiment.sizes[-1], experiment.features[0]
    course = _course("losses", experiment.every, "rule", size=largest, feature=feature)
    ends = by("rule", looks, "loss", feature=feature)
    return [
        Panel(f"loss at the end, φ = {feature}", "S, distinct keys", "size", ends, y_scale="log"),
        Panel(f"learning at S = {largest}", "steps", "step", by("rule", looks, "value"), y_scale="log", expand=course),
    ]


def _course(column: str, every: int, group: str, **where: Any) -> Expand:
    """Return rows {group, step, value} of the learning curves in a column, the mean of the seeds at each step."""

    def expand(rows: Sequence[Row]) -> list[Row]:
        rows = select(rows, **where)
        names = dict.fromkeys(row[group] for row in rows)
        curves = {name: learning_curve(select(rows, **{group: name}), column, every) for name in names}
        return [{group: name, "step": x, "value": y} for name, one in curves.items() for x, y in one.points]

    return expand


def _edits(experiment: edits.Edits) -> list[Panel]:
    looks = {method: edits.METHODS[method] for method in experiment.methods}
    method = partial(by, "method", looks, scale=1.0)
    trade = [
        Series("realized", plotting.BLUE, "realized", {"method": "memit", "n": experiment.counts[-1]}),
        Series("disturbance", plotting.RED, "disturbance", {"method": "memit", "n": experiment.counts[-1]}),
    ]
    return [
        Panel("new object likelier than the old", "facts written", "n", method("likelier"), "log"),
        Panel("drift, nats", "facts written", "n", method("drift"), "log"),
        Panel("λ trades new for old (MEMIT)", "λ, times the usual", "scale", trade, "log"),
    ]


def _consolidation(experiment: LifeOfFacts) -> list[Panel]:
    method = partial(by, "method", {name: consolidation.METHODS[name] for name in experiment.methods})
    moved = {"method": "consolidated"}
    places = [
        Series("in the dense memory", plotting.VIOLET, "in_memory", moved),
        Series("in the weights", plotting.BLUE, "in_weights", moved),
    ]
    return [
        Panel("facts said", "facts written", "n", method("said")),
        Panel("the first facts said", "facts written", "n", method("first")),
        Panel("drift, nats", "facts written", "n", method("drift")),
        Panel("facts in each memory", "facts written", "n", places),
    ]


PANELS: dict[str, Callable[[Any], list[Panel]]] = {
    "closed-form": _closed_form,
    "forgetting": _forgetting,
    "hopfield": _hopfield,
    "ttt-1d": _ttt_1d,
    "cost": _cost,
    "mqar": _mqar,
    "capacity": _capacity,
    "overwrite": _overwrite,
    "edits": _edits,
    "consolidation": _consolidation,
}
