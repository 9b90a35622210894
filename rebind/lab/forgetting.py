"""What a stream of writes leaves of each of them: retention against age for every rule, and what reusing keys does.

A stream 10·d long is written, then every association ever written is asked for. *Retention* is ⟨Wk, v⟩ / ‖v‖²: how much
of the value itself is still read. The *error* is ‖Wk − v‖² / ‖v‖², which also counts what others left at k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.lab.experiment import Claim, Config, Experiment, Point, Row, Table
from rebind.lab.report import curve, select, spread
from rebind.lab.theory import delta_errors, interference
from rebind.memory import Recursive, Write, get_rule, l2_normalise
from rebind.ops import scan_rule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES = ("sum", "mamba2", "rfa", "delta", "longhorn", "gated_delta", "recursive")
LABELS = {
    "sum": "sum",
    "mamba2": "Mamba-2",
    "rfa": "RFA",
    "delta": "delta",
    "longhorn": "Longhorn",
    "gated_delta": "gated delta",
    "recursive": "recursive",
}


@dataclass(frozen=True)
class Forgetting(Config):
    width: int = 128  # d
    length: int = 10  # the stream is so many times d long
    streams: int = 32  # a seed
    alpha: float = 0.98  # α of Mamba-2 and gated delta
    beta: float = 0.1  # β of RFA; delta, Longhorn and gated delta have 1
    pools: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)  # distinct keys, over d, where they are reused
    lam: float = 1e-4  # λ of recursive


QUICK = Forgetting(width=64, streams=8, pools=(0.125, 0.25, 0.5, 1.0))


def batches(config: Forgetting) -> list[list[Point]]:
    """Appendix B; one batch a rule for the stream; one a pool and rule for reused keys."""
    length = config.length * config.width
    for pool in config.pools:
        if 2 * _distinct(config, pool) > length:
            raise InputError(
                f"pool {pool:g} has {_distinct(config, pool)} distinct keys and the stream {length} writes, expected "
                f"two or more for each key: leave it out of pools, or raise length"
            )
    seeds = range(config.seeds)
    smallest = [{"part": "appendix-b", "rule": rule} for rule in ("rfa", "delta")]
    stream = [
        [{"part": "stream", "rule": rule, "age": age, "seed": seed} for seed in seeds for age in _ages(config)]
        for rule in RULES
    ]
    reuse = [
        [{"part": "reuse", "rule": rule, "pool": pool, "seed": seed} for seed in seeds]
        for pool in config.pools
        for rule in RULES
    ]
    return [smallest, *stream, *reuse]


def measure(config: Forgetting, points: Sequence[Point], device: torch.device) -> list[Row]:
    part = points[0]["part"]
    if part == "appendix-b":
        return [_appendix_b(point["rule"]) for point in points]
    return (_stream if part == "stream" else _reuse)(config, points, device)


def _appendix_b(rule: str, beta: float = 0.5) -> Row:
    """Two orthonormal keys are stored; then the second gets a new value with β = ½ (Schlag et al., appendix B)."""
    keys, values = torch.eye(2, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    memory = values[:2].mT @ keys
    after = get_rule(rule).write(keys[1], values[2], beta=beta).apply(memory)
    first, second = after @ keys[0], after @ keys[1]
    return {"first": float(first[0]), "second_old": float(second[1]), "second_new": float(second[2])}


def _stream(config: Forgetting, points: Sequence[Point], device: torch.device) -> list[Row]:
    length = config.length * config.width
    keys, values = _drawn(config, length, device)
    read = keys @ _written(config, points[0]["rule"], keys, values).mT
    size = values.square().sum(-1)
    retention = ((read * values).sum(-1) / size).flip(-1)  # the newest first
    error = ((read - values).square().sum(-1) / size).flip(-1)
    rows = []
    for point in points:
        mine = slice(point["seed"] * config.streams, (point["seed"] + 1) * config.streams)
        some = slice(*_group(config, point["age"]))
        rows.append({"retention": float(retention[mine, some].mean()), "error": float(error[mine, some].mean())})
    return rows


def _reuse(config: Forgetting, points: Sequence[Point], device: torch.device) -> list[Row]:
    """Keys come again and again, each time with a new value: is the latest read, or the one before it?"""
    length = config.length * config.width
    pool = _distinct(config, points[0]["pool"])
    several, values = _drawn(config, length, device)
    generator = torch.Generator().manual_seed(pool)
    # In rounds, so that every key has a latest value and one before it.
    order = torch.cat([torch.randperm(pool, generator=generator) for _ in range(length // pool + 1)])[-length:]
    keys = several[:, :pool][:, order.to(device)]
    read = several[:, :pool] @ _written(config, points[0]["rule"], keys, values).mT
    last = torch.stack([(order == key).nonzero().flatten()[-2:] for key in range(pool)]).to(device)
    latest, before = values[:, last[:, 1]], values[:, last[:, 0]]
    size = latest.square().sum(-1)
    found = {
        "error": (read - latest).square().sum(-1) / size,
        "latest": (read * latest).sum(-1) / size,
        "before": (read * before).sum(-1) / before.square().sum(-1),
    }
    by_seed = {name: value.unflatten(0, (config.seeds, config.streams)).mean((1, 2)) for name, value in found.items()}
    return [{name: float(value[point["seed"]]) for name, value in by_seed.items()} for point in points]


def _distinct(config: Forgetting, pool: float) -> int:
    """How many keys a pool has."""
    return max(round(pool * config.width), 2)


def _drawn(config: Forgetting, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Unit keys and values of every stream of every seed, [seeds · streams, T, d]."""
    drawn = []
    for seed in range(config.seeds):
        generator = torch.Generator().manual_seed(seed)
        drawn.append(torch.randn(2, config.streams, length, config.width, generator=generator, dtype=torch.float64))
    keys, values = torch.cat(drawn, dim=1).to(device)
    return l2_normalise(keys), values


def _written(config: Forgetting, rule: str, keys: Tensor, values: Tensor) -> Tensor:
    """The memories once the streams have passed: [streams, d_v, d_k]."""
    if rule != "recursive":
        k, v = keys.unsqueeze(-2), values.unsqueeze(-2)
        return scan_rule(rule, k, k, v, **_gates(config, rule))[1].squeeze(1)
    state = Recursive.start(lam=config.lam, width=config.width, device=keys.device)
    memory = keys.new_zeros(keys.shape[0], values.shape[-1], keys.shape[-1])
    for k, v in zip(keys.split(config.width, dim=-2), values.split(config.width, dim=-2), strict=True):
        solution, state = state.step(k)
        memory = Write(k, v, solution.value).apply(memory)
    return memory


def _gates(config: Forgetting, rule: str) -> dict[str, Any]:
    return {
        "mamba2": {"alpha": config.alpha},
        "gated_delta": {"alpha": config.alpha},
        "rfa": {"beta": config.beta},
    }.get(rule, {})


def _ages(config: Forgetting) -> list[int]:
    """Where each group of ages begins: single ones first, then wider and wider."""
    length, ages = config.length * config.width, [0]
    while (following := max(ages[-1] + 1, round(1.35 * ages[-1]))) < length:
        ages.append(following)
    return ages


def expected(config: Forgetting, rule: str, age: float) -> float:
    """Retention of random unit keys: η (α (1 − ε/d))^age. Least squares spreads d directions over all n."""
    if rule == "recursive":
        return 1 / config.length
    key = torch.eye(1, config.width, dtype=torch.float64)[0]
    found = get_rule(rule).coefficients(key, **_gates(config, rule))
    return float(found.write * (found.decay * (1 - found.erase / config.width)) ** age)


def table(config: Forgetting, rows: Sequence[Row]) -> Table:
    ages = [min(_ages(config), key=lambda one: abs(one - wanted * config.width)) for wanted in (0, 1, 4)]
    widest, header = config.pools[-1], ["rule"]
    header += [f"retention at age {age}" for age in ages] + [f"error at age {age}" for age in ages]
    header += [f"reused keys ({widest:g} d): latest", "the one before"]
    lines = []
    for rule in RULES:
        mine = [select(rows, part="stream", rule=rule, age=age) for age in ages]
        reused = select(rows, part="reuse", rule=rule, pool=widest)
        cells = [[row[name] for row in some] for name in ("retention", "error") for some in mine]
        cells += [[row[name] for row in reused] for name in ("latest", "before")]
        lines.append([LABELS[rule], *(spread(cell, 2) for cell in cells)])
    return Table(header, lines)


def claims(config: Forgetting, rows: Sequence[Row]) -> list[Claim]:
    d = config.width
    kept = {rule: curve(select(rows, part="stream", rule=rule), "age", "retention") for rule in RULES}
    error = {rule: curve(select(rows, part="stream", rule=rule), "age", "error") for rule in RULES}
    gaps = {
        rule: fmean(abs(got - _expected(config, rule, int(age))) for age, got in zip(one.x, one.mean, strict=True))
        for rule, one in kept.items()
        if rule != "sum"  # whose interference drowns single ages
    }
    worst = max(gaps, key=lambda rule: gaps[rule])
    newest = delta_errors(config.length * d, d).flip(0)
    old = [age for age in _ages(config) if age >= d / 4]
    follows = [error["delta"].at(age) / float(newest[slice(*_group(config, age))].mean()) for age in old]
    whole = fmean(kept["sum"].at(age) for age in old)
    noisy = error["sum"].at(4 * d) / interference(config.length * d, d)
    b = {row["rule"]: row for row in select(rows, part="appendix-b")}
    reused = {rule: select(rows, part="reuse", rule=rule, pool=config.pools[0]) for rule in RULES}
    miss = {rule: curve(some, "pool", "error").mean[0] for rule, some in reused.items()}
    stale = {rule: fmean(row["before"] / row["latest"] for row in some) for rule, some in reused.items()}
    return [
        Claim(
            "every rule's retention is η(α(1 − ε/d))^age, recursive's d/n at any age",
            max(gaps.values()) < 0.02,
            f"mean gap at most {gaps[worst]:.3f}, of {worst}",
        ),
        Claim(
            "delta's error grows with age as its recursion predicts",
            all(abs(ratio - 1) < 0.1 for ratio in follows),
            f"measured over theory {min(follows):.3f} to {max(follows):.3f}",
        ),
        Claim(
            "sum retains all, at the price of an error of n/d",
            abs(whole - 1) < 0.05 and abs(noisy - 1) < 0.1,
            f"retention {whole:.3f}, error over theory {noisy:.3f}",
        ),
        Claim(
            "appendix B: delta leaves the other key as it was, the gated rule scales it by 1 − β",
            abs(b["delta"]["first"] - 1) < 1e-12 and abs(b["rfa"]["first"] - 0.5) < 1e-12,
            f"delta {b['delta']['first']:g}, RFA {b['rfa']['first']:g}",
        ),
        Claim(
            "of reused keys delta reads the latest value, sum and recursive do not",
            miss["delta"] < 0.25 < 0.7 < min(miss["sum"], miss["recursive"]),
            ", ".join(f"{rule} {miss[rule]:.2g}" for rule in ("delta", "sum", "recursive")),
        ),
        Claim(
            "recursive least squares averages the values of a reused key, delta has let go of the one before",
            0.7 < stale["recursive"] < 1.4 and abs(stale["delta"]) < 0.1,
            f"the one before over the latest: recursive {stale['recursive']:.2f}, delta {stale['delta']:.2f}",
        ),
    ]


def _group(config: Forgetting, age: int) -> tuple[int, int]:
    """The ages that are averaged with this one: from, to."""
    ages = [*_ages(config), config.length * config.width]
    return age, ages[ages.index(age) + 1]


def _expected(config: Forgetting, rule: str, age: int) -> float:
    return fmean(expected(config, rule, one) for one in range(*_group(config, age)))


def figure(config: Forgetting, rows: Sequence[Row]) -> Figure:
    from rebind.lab import style

    drawn, (kept, error, reuse) = style.panels(
        3,
        "What a stream leaves of each write",
        f"{config.length}·d random associations through a memory {config.width} wide, then all of them asked; α = "
        f"{config.alpha:g} (Mamba-2, gated delta), β = {config.beta:g} (RFA), else 1; {config.seeds} seeds; "
        "dashed: theory",
        width=4.9,
        height=4.6,
    )
    stream = select(rows, part="stream")
    every = [age for age in _ages(config) if age]
    for rule in RULES:
        colour, some = style.RULES[rule], select(stream, rule=rule)
        style.draw(kept, curve(some, "age", "retention"), colour, LABELS[rule])
        style.draw(error, curve(some, "age", "error"), colour)
        style.theory(kept, [0, *every], [_expected(config, rule, age) for age in [0, *every]])
        style.draw(reuse, curve(select(rows, part="reuse", rule=rule), "pool", "error"), colour)
    newest = delta_errors(config.length * config.width, config.width).flip(0)
    style.theory(error, [0, *every], [float(newest[slice(*_group(config, age))].mean()) for age in [0, *every]])
    for one in (kept, error):
        one.set_xscale("symlog", linthresh=1, linscale=0.4)
        one.set_xlim(0, config.length * config.width)
    for one in (error, reuse):
        one.set_yscale("log")
    error.set_ylim(0.01, 30)  # age 0 is exact for delta
    for one in (error, reuse):
        one.axhline(1, color=style.EDGE, lw=1)
        style.note(one, "an empty memory", 1)
    reuse.set_xscale("log", base=2)
    style.named(kept, "retention  ⟨Wk, v⟩ / ‖v‖²", "age: writes since", "")
    style.named(error, "error  ‖Wk − v‖² / ‖v‖²", "age: writes since", "")
    style.named(reuse, "error of the latest value, keys reused", "distinct keys / d", "")
    style.legend_below(drawn, columns=len(RULES))
    return drawn


EXPERIMENT = Experiment(
    name="forgetting",
    title="Retention against age for every rule, and what reusing keys does",
    answers='Schlag et al., appendix B; "Memory and Forgetting", write-only against read-write access',
    takes="90 s",
    config=Forgetting(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    table=table,
    figure=figure,
    claims=claims,
)
