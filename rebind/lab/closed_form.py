"""How many associations fit in one matrix, without training: recall error against n/d for sums, deltas and solves.

n keys get n random values; then every key is asked. The error is ‖Wk − v‖² over ‖v‖², on average: 0 is exact recall, 1
is what an empty memory scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.lab.experiment import Claim, Config, Experiment, Point, Row, Table
from rebind.lab.real import mlp_keys
from rebind.lab.report import Curve, curve, select, spread
from rebind.lab.theory import delta_errors, interference, least_squares
from rebind.memory import Recursive, Write, equality, l2_normalise, ridge
from rebind.ops import scan_rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEYS = {
    "sphere": "keys uniform on the sphere",
    "correlated": "correlated keys: spectrum 1/i",
    "model": "MLP keys of a language model, on text",
}
RULES = {
    "sum": "sum",
    "delta": "delta, one pass",
    "delta-many": "delta, many passes",
    "ridge": "ridge",
    "recursive": "recursive, batch by batch",
    "equality": "equality",
}
FLOOR = 1e-6  # what is exact is drawn here


@dataclass(frozen=True)
class ClosedForm(Config):
    width: int = 128  # d
    loads: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5, 1.75, 2.0)
    keys: tuple[str, ...] = ("sphere", "correlated")
    model: str = "smollm2"  # of the keys called `model`, which are as wide as its MLPs
    layer: int = 12
    passes: int = 100  # of delta's many
    lam: float = 1e-4  # λ of ridge and recursive
    group: int = 16  # keys of one recursive step


QUICK = ClosedForm(width=64, loads=(0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0), passes=60)


def batches(config: ClosedForm) -> list[list[Point]]:
    """One for each kind of keys and each load: all rules and seeds see the same keys."""
    unknown = [kind for kind in config.keys if kind not in KEYS]
    if unknown:
        raise InputError(
            f"keys are {', '.join(config.keys)}, expected some of {', '.join(KEYS)}: leave {unknown[0]} out"
        )
    return [
        [
            {"keys": kind, "load": load, "n": n, "rule": rule, "seed": seed}
            for rule in RULES
            if rule != "equality" or n <= config.width
            for seed in range(config.seeds)
        ]
        for kind in config.keys
        for load in config.loads
        for n in [max(round(load * config.width), 1)]
    ]


def measure(config: ClosedForm, points: Sequence[Point], device: torch.device) -> list[Row]:
    first = points[0]
    keys, values = _associations(first["keys"], config, first["n"], device)
    keys, values = keys.to(device), values.to(device)  # [seeds, n, d]
    rules = dict.fromkeys(point["rule"] for point in points)
    errors = {rule: _error(_write(rule, keys, values, config), keys, values) for rule in rules}
    return [{"error": float(errors[point["rule"]][point["seed"]])} for point in points]


def _associations(kind: str, config: ClosedForm, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys and values of every seed, drawn on the CPU: the same on any device."""
    drawn = []
    for seed in range(config.seeds):
        generator = torch.Generator().manual_seed(1000 * n + seed)
        drawn.append(torch.randn(2, n, config.width, generator=generator, dtype=torch.float64))
    keys, values = torch.stack(drawn, dim=1)
    if kind == "correlated":
        keys = keys * torch.arange(1, config.width + 1, dtype=torch.float64).rsqrt()
    if kind == "model":
        read = _model_keys(config.model, config.layer, device)
        if read.shape[-1] != config.width or len(read) < n:
            raise InputError(
                f"{config.model} has {len(read)} keys of width {read.shape[-1]}, expected {n} of width {config.width}: "
                f"set width={read.shape[-1]} and loads up to {len(read) / read.shape[-1]:.2f}"
            )
        order = [torch.randperm(len(read), generator=torch.Generator().manual_seed(s)) for s in range(config.seeds)]
        keys = torch.stack([read[some[:n]] for some in order])
    return l2_normalise(keys), values


@cache
def _model_keys(model: str, layer: int, device: torch.device) -> Tensor:
    return mlp_keys(model, layer, device).cpu()


def _write(rule: str, keys: Tensor, values: Tensor, config: ClosedForm) -> Tensor:
    """The memories [seeds, d_v, d_k] once everything is written."""
    empty = keys.new_zeros(keys.shape[0], values.shape[-1], keys.shape[-1])
    if rule in ("sum", "delta", "delta-many"):
        k, v, state = keys.unsqueeze(-2), values.unsqueeze(-2), empty.unsqueeze(1)
        for _ in range(config.passes if rule == "delta-many" else 1):
            _, state = scan_rule("sum" if rule == "sum" else "delta", k, k, v, state=state)
        return state.squeeze(1)
    if rule == "ridge":
        return Write(keys, values, ridge(keys, lam=config.lam).value).apply(empty)
    if rule == "equality":
        return Write(keys, values, equality(keys).value).apply(empty)
    known, memory = Recursive.start(lam=config.lam, width=config.width, device=keys.device), empty
    for k, v in zip(keys.split(config.group, dim=-2), values.split(config.group, dim=-2), strict=True):
        solution, known = known.step(k)
        memory = Write(k, v, solution.value).apply(memory)
    return memory


def _error(memory: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (keys @ memory.mT - values).square().sum((-2, -1)) / values.square().sum((-2, -1))


def table(config: ClosedForm, rows: Sequence[Row]) -> Table:
    loads = [load for load in (0.25, 0.5, 1.0, 2.0) if load in config.loads]
    loads = loads if len(loads) > 2 else sorted({*config.loads[:: max(len(config.loads) // 3, 1)], config.loads[-1]})
    lines = []
    for kind in config.keys:
        for rule, label in RULES.items():
            cells = [[row["error"] for row in select(rows, keys=kind, rule=rule, load=load)] for load in loads]
            lines.append([kind, label, *(spread(cell) if cell else "–" for cell in cells)])
    return Table(["keys", "rule", *(f"n/d = {load:g}" for load in loads)], lines)


def claims(config: ClosedForm, rows: Sequence[Row]) -> list[Claim]:
    made = _drawn_claims(config, rows) if {"sphere", "correlated"} <= set(config.keys) else []
    return made + (_model_claims(config, rows) if {"sphere", "model"} <= set(config.keys) else [])


def _model_claims(config: ClosedForm, rows: Sequence[Row]) -> list[Claim]:
    at = max((load for load in config.loads if load < 1), default=None)
    if at is None:
        return []

    def mean(kind: str, rule: str) -> float:
        return fmean(row["error"] for row in select(rows, keys=kind, rule=rule, load=at))

    worse = {rule: mean("model", rule) / mean("sphere", rule) for rule in ("sum", "delta")}
    exact = mean("model", "equality")
    return [
        Claim(
            f"a language model's keys disturb each other more than random ones, at n = {at:g} d",
            min(worse.values()) > 1.3,
            ", ".join(f"{rule} {ratio:.1f}×" for rule, ratio in worse.items()),
        ),
        Claim(f"and still {at:g} d of them can be given exact values", exact < 1e-9, f"error {exact:.0e}"),
    ]


def _drawn_claims(config: ClosedForm, rows: Sequence[Row]) -> list[Claim]:
    """A claim about a load is made only where that load was measured."""
    drawn = ("sphere", "correlated")
    found = {(kind, rule): curve(select(rows, keys=kind, rule=rule), "n", "error") for kind in drawn for rule in RULES}
    return [*_theory_claims(config.width, found), *_order_claims(config.width, found)]


def _theory_claims(d: int, found: dict[tuple[str, str], Curve]) -> list[Claim]:
    sphere = {rule: found["sphere", rule] for rule in RULES}
    ratios = [got / interference(n, d) for n, got in _pairs(sphere["sum"]) if n > max(d / 4, 1)]
    passed = [got / float(delta_errors(int(n), d).mean()) for n, got in _pairs(sphere["delta"]) if n > max(d / 4, 1)]
    unfit = [got / least_squares(n, d) for n, got in _pairs(sphere["ridge"]) if n > 1.2 * d]
    made = []
    if ratios:
        says = "on the sphere the sum's error is (n−1)/d"
        made.append(Claim(says, _near(ratios, 0.12), f"measured over theory {_range(ratios)}"))
    if passed:
        says = "one pass of delta errs as its recursion predicts"
        made.append(Claim(says, _near(passed, 0.1), f"ratio {_range(passed)}"))
    if found["sphere", "equality"].x:
        most = found["sphere", "equality"].x[-1]
        exact = max(max(found[kind, "equality"].high) for kind in ("sphere", "correlated"))
        says = f"equality is exact up to n = {'d' if most == d else f'{most:g}'}, correlated keys or not"
        made.append(Claim(says, exact < 1e-9, f"largest error {exact:.0e}"))
    if unfit:
        says = "beyond n = d least squares misses 1 − d/n"
        made.append(Claim(says, _near(unfit, 0.08), f"measured over theory {_range(unfit)}"))
    return made


def _order_claims(d: int, found: dict[tuple[str, str], Curve]) -> list[Claim]:
    sphere = {rule: found["sphere", rule] for rule in RULES}
    apart = max(
        abs(a - b) / max(a, 1e-9)
        for kind in ("sphere", "correlated")
        for a, b in zip(found[kind, "ridge"].mean, found[kind, "recursive"].mean, strict=True)
    )
    says = "recursive batch by batch ends where one ridge solve does"
    made = [Claim(says, apart < 1e-4, f"largest gap {apart:.0e}")]
    measured = sphere["sum"]  # wherever a rule is, this one is too
    if measured.has(d):
        order = [sphere[rule].at(d) for rule in ("equality", "ridge", "delta-many", "delta", "sum")]
        rises = order == sorted(order) and len(set(order)) == len(order)
        says = "at n = d: equality < ridge < many passes < one pass < sum"
        made.append(Claim(says, rises, " < ".join(f"{one:.2g}" for one in order)))
    if measured.has(2 * d):
        vain = sphere["delta-many"].at(2 * d) / sphere["ridge"].at(2 * d)
        says = "beyond n = d many passes of β = 1 do not reach least squares"
        made.append(Claim(says, vain > 1.5, f"{vain:.2f}× its error at 2d"))
    half = round(d / 2)
    if measured.has(half) and half > 1:  # one key alone is disturbed by none
        harder = {rule: found["correlated", rule].at(half) / sphere[rule].at(half) for rule in ("sum", "delta")}
        says = "correlation makes sums and single passes worse"
        told = ", ".join(f"{rule} {ratio:.1f}×" for rule, ratio in harder.items())
        made.append(Claim(says, min(harder.values()) > 1.3, f"{told} at d/2"))
    return made


def _pairs(one: Curve) -> list[tuple[float, float]]:
    return list(zip(one.x, one.mean, strict=True))


def _near(ratios: Sequence[float], tolerance: float) -> bool:
    return all(abs(ratio - 1) < tolerance for ratio in ratios)


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def figure(config: ClosedForm, rows: Sequence[Row]) -> Figure:
    from rebind.lab import style

    drawn, axes = style.panels(
        len(config.keys),
        "How many associations fit in one matrix",
        f"recall error of n keys in a {config.width} × {config.width} memory; mean and range of {config.seeds} seeds; "
        "dashed: theory",
        width=5.2,
        height=4.6,
    )
    for one, kind in zip(axes, config.keys, strict=True):
        _panel(one, kind, config, select(rows, keys=kind))
    style.legend_below(drawn, columns=len(RULES))
    return drawn


def _panel(axes: Axes, kind: str, config: ClosedForm, rows: Sequence[Row]) -> None:
    from rebind.lab import style

    looks = {
        "sum": (style.RED, "o", "-"),
        "delta": (style.BLUE, "o", "-"),
        "delta-many": (style.CYAN, "o", "-"),
        "ridge": (style.GREEN, "o", "-"),
        "recursive": (style.AMBER, "x", "none"),
        "equality": (style.VIOLET, "D", "-"),
    }
    for rule, (colour, marker, line) in looks.items():
        found = curve([{**row, "error": max(row["error"], FLOOR)} for row in select(rows, rule=rule)], "load", "error")
        mark = {"ms": 6.5, "mew": 1.6, "zorder": 4} if marker == "x" else {}
        label = RULES[rule] if kind == config.keys[0] else None
        style.draw(axes, found, colour, label, marker=marker, ls=line, **mark)
    if kind == "sphere":
        d = config.width
        counts = [2 + (max(config.loads) * d - 2) * step / 60 for step in range(61)]
        loads = [n / d for n in counts]
        style.theory(axes, loads, [interference(n, d) for n in counts])
        style.theory(axes, loads, [float(delta_errors(round(n), d).mean()) for n in counts])
        above = [n for n in counts if n > 1.01 * d]
        style.theory(axes, [n / d for n in above], [least_squares(n, d) for n in above])
    axes.axvline(1, color=style.EDGE, lw=1)
    axes.set(yscale="log", ylim=(FLOOR / 2, 30))
    axes.annotate(
        "10⁻⁶ or less",
        (min(config.loads), FLOOR),
        xytext=(3, 6),
        textcoords="offset points",
        fontsize=8.5,
        color=style.VIOLET,
    )
    style.named(axes, KEYS[kind], "n / d", "recall error  ‖Wk − v‖² / ‖v‖²")


EXPERIMENT = Experiment(
    name="closed-form",
    title="Recall error against n/d for sums, deltas and solves, beside theory",
    answers='"Memory and Forgetting", how many memories can we store; the closed forms of ROME and MEMIT',
    takes="15 s",
    on_gpu="30 s",
    config=ClosedForm(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    table=table,
    figure=figure,
    claims=claims,
)
