"""Forgetting in a stream of writes: retention against age for every rule, and the effect of reused keys.

A stream 10·d long is written; then the memory is read at every key ever written. *Retention* is ⟨Wk, v⟩ / ‖v‖²:
the part of the value that is still read. The *error* is ‖Wk − v‖² / ‖v‖², which includes interference at k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rebind import plotting
from rebind.errors import InputError
from rebind.lab import style
from rebind.lab.closed_form import recursive_memory
from rebind.lab.experiment import Experiment, Figure, Point, grid
from rebind.lab.report import Claim, Table, agreement, curve, select, spreads
from rebind.lab.theory import delta_errors, interference
from rebind.memory import get_rule, l2_normalize
from rebind.ops import scan_rule
from rebind.storage import Row

RULES = {rule: style.RULES[rule] for rule in ("sum", "mamba2", "rfa", "delta", "longhorn", "gated_delta", "recursive")}


@dataclass(frozen=True)
class Forgetting(Experiment):
    name = "forgetting"
    title = "Retention against age for every rule, and what reusing keys does"
    answers = 'Schlag et al., appendix B; "Memory and Forgetting", write-only against read-write access'
    cpu_time = "90 s"
    quick_settings = "width=64 streams=8 pools=0.125,0.25,0.5,1"

    width: int = 128  # d
    length: int = 10  # of the stream, in multiples of d
    streams: int = 32  # per seed
    alpha: float = 0.98  # α of Mamba-2 and gated delta
    beta: float = 0.1  # β of RFA; delta, Longhorn and gated delta have 1
    pools: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)  # distinct keys over d, where keys are reused
    lam: float = 1e-4  # λ of recursive

    @property
    def writes(self) -> int:
        """The length of the stream."""
        return self.length * self.width

    def batches(self) -> list[list[Point]]:
        """Return appendix B, the stream with one batch per rule, and reused keys with one batch per pool and rule."""
        for pool in self.pools:
            if 2 * self._distinct_keys(pool) > self.writes:
                raise InputError(
                    f"The pool {pool:g} has {self._distinct_keys(pool)} distinct keys for {self.writes} writes",
                    expected="two writes or more for each key",
                    advice="Leave this pool out, or raise the length",
                    code="pool_too_large",
                )
        seeds = range(self.seeds)
        stream = [
            [{"part": "stream", "rule": rule, "age": age, "seed": seed} for seed in seeds for age in self.ages()]
            for rule in RULES
        ]
        reuse = [grid(part=["reuse"], rule=[rule], pool=[pool], seed=seeds) for pool in self.pools for rule in RULES]
        return [grid(part=["appendix-b"], rule=("rfa", "delta")), *stream, *reuse]

    def ages(self) -> list[int]:
        """Return the age at which each group begins: single ages first, then wider groups."""
        ages = [0]
        while (following := max(ages[-1] + 1, round(1.35 * ages[-1]))) < self.writes:
            ages.append(following)
        return ages

    def _group(self, age: int) -> slice:
        """Return the group of ages that are averaged together, from this one on."""
        return slice(age, next((end for end in self.ages() if end > age), self.writes))

    def _distinct_keys(self, pool: float) -> int:
        return max(round(pool * self.width), 2)

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        part, rule = points[0]["part"], points[0]["rule"]
        if part == "appendix-b":
            return [_appendix_b(point["rule"]) for point in points]
        if part == "stream":
            return self._measure_stream(rule, points, device)
        return self._measure_reuse(rule, points, device)

    def _measure_stream(self, rule: str, points: Sequence[Point], device: torch.device) -> list[Row]:
        keys, values = self._draw(device)
        read = keys @ self._memory(rule, keys, values).mT
        size = values.square().sum(-1)
        measures = {
            "retention": (read * values).sum(-1) / size,
            "error": (read - values).square().sum(-1) / size,
        }
        by_age = {  # [seeds, streams, writes], the newest write first
            name: value.flip(-1).unflatten(0, (self.seeds, self.streams)) for name, value in measures.items()
        }
        return [
            {name: float(value[point["seed"], :, self._group(point["age"])].mean()) for name, value in by_age.items()}
            for point in points
        ]

    def _measure_reuse(self, rule: str, points: Sequence[Point], device: torch.device) -> list[Row]:
        """Write every key repeatedly, each time with a new value; compare reads with its latest and previous values."""
        keys, values = self._draw(device)
        pool = self._distinct_keys(points[0]["pool"])
        distinct = keys[:, :pool]
        generator = torch.Generator().manual_seed(pool)
        # In rounds, so that every key has a latest and a previous value.
        rounds = [torch.randperm(pool, generator=generator) for _ in range(self.writes // pool + 1)]
        order = torch.cat(rounds)[-self.writes :]
        read = distinct @ self._memory(rule, distinct[:, order.to(device)], values).mT
        last_two = torch.stack([(order == key).nonzero().flatten()[-2:] for key in range(pool)]).to(device)
        before, latest = values[:, last_two[:, 0]], values[:, last_two[:, 1]]
        size = latest.square().sum(-1)
        measures = {
            "error": (read - latest).square().sum(-1) / size,
            "latest": (read * latest).sum(-1) / size,
            "before": (read * before).sum(-1) / before.square().sum(-1),
        }
        by_seed = {name: value.unflatten(0, (self.seeds, -1)).mean((1, 2)) for name, value in measures.items()}
        return [{name: float(value[point["seed"]]) for name, value in by_seed.items()} for point in points]

    def _draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw unit keys and values [seeds · streams, writes, d]."""
        shape = (2, self.streams, self.writes, self.width)
        generators = [torch.Generator().manual_seed(seed) for seed in range(self.seeds)]
        noise = [torch.randn(shape, generator=generator, dtype=torch.float64) for generator in generators]
        keys, values = torch.cat(noise, dim=1).to(device)
        return l2_normalize(keys), values

    def _memory(self, rule: str, keys: Tensor, values: Tensor) -> Tensor:
        """Return the memories [streams, d_v, d_k] after the streams."""
        if rule == "recursive":
            return recursive_memory(keys, values, self.lam, self.width)
        k, v = keys.unsqueeze(-2), values.unsqueeze(-2)
        return scan_rule(rule, k, k, v, **self._gates(rule))[1].squeeze(1)

    def _gates(self, rule: str) -> dict[str, Any]:
        alpha, beta = {"alpha": self.alpha}, {"beta": self.beta}
        return {"mamba2": alpha, "gated_delta": alpha, "rfa": beta}.get(rule, {})

    def expected_retention(self, rule: str, age: int) -> float:
        """Return η (α (1 − ε/d))^age, averaged over a group of ages; for least squares d/n, at any age."""
        if rule == "recursive":
            return 1 / self.length
        key = torch.eye(1, self.width, dtype=torch.float64)[0]
        factors = get_rule(rule).coefficients(key, **self._gates(rule))
        fading = float(factors.decay * (1 - factors.erase / self.width))
        group = self._group(age)
        return float(factors.write) * fmean(fading**age for age in range(group.start, group.stop))

    def _expected_delta_errors(self, ages: Sequence[int]) -> list[float]:
        errors = delta_errors(self.writes, self.width).flip(0)
        return [float(errors[self._group(age)].mean()) for age in ages]

    def table(self, rows: Sequence[Row]) -> Table:
        ages = [min(self.ages(), key=lambda age: abs(age - multiple * self.width)) for multiple in (0, 1, 4)]
        pool, lines = self.pools[-1], []
        for rule, line_style in RULES.items():
            by_age = [select(rows, part="stream", rule=rule, age=age) for age in ages]
            cells = [spreads(group, name, digits=2)[0] for name in ("retention", "error") for group in by_age]
            cells += spreads(select(rows, part="reuse", rule=rule, pool=pool), "latest", "before", digits=2)
            lines.append([line_style["label"], *cells])
        header = [f"{name} at age {age}" for name in ("retention", "error") for age in ages]
        return Table(["rule", *header, f"reused keys ({pool:g} d): latest", "the one before"], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        d = self.width
        stream = {rule: select(rows, part="stream", rule=rule) for rule in RULES}
        retention = {rule: curve(stream[rule], "age", "retention") for rule in RULES}
        error = {rule: curve(stream[rule], "age", "error") for rule in ("sum", "delta")}
        gaps = {
            rule: fmean(abs(value - self.expected_retention(rule, int(age))) for age, value in retention[rule].points)
            for rule in RULES
            if rule != "sum"  # where interference hides the retention at single ages
        }
        worst = max(gaps, key=lambda rule: gaps[rule])
        yield Claim(
            "every rule's retention is η(α(1 − ε/d))^age, recursive's d/n at any age",
            max(gaps.values()) < 0.02,
            f"mean gap at most {gaps[worst]:.3f}, of {worst}",
        )
        old = [age for age in self.ages() if age >= d / 4]
        expected = self._expected_delta_errors(old)
        ratios = [error["delta"].at(age) / theory for age, theory in zip(old, expected, strict=True)]
        yield agreement("delta's error grows with age as its recursion predicts", ratios, 0.1)
        mean_retention = fmean(retention["sum"].at(age) for age in old)
        noise = error["sum"].at(4 * d) / interference(self.writes, d)
        yield Claim(
            "sum retains everything, at the price of an error of n/d",
            abs(mean_retention - 1) < 0.05 and abs(noise - 1) < 0.1,
            f"retention {mean_retention:.3f}, error over theory {noise:.3f}",
        )
        first = {row["rule"]: row["first"] for row in select(rows, part="appendix-b")}
        yield Claim(
            "appendix B: delta leaves the other key as it was, the gated rule scales it by 1 − β",
            abs(first["delta"] - 1) < 1e-12 and abs(first["rfa"] - 0.5) < 1e-12,
            f"delta {first['delta']:g}, RFA {first['rfa']:g}",
        )
        yield from self._reuse_claims(rows)

    def _reuse_claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        reuse = {rule: select(rows, part="reuse", rule=rule, pool=self.pools[0]) for rule in RULES}
        missed = {rule: fmean(row["error"] for row in reuse[rule]) for rule in ("delta", "sum", "recursive")}
        yield Claim(
            "for reused keys delta reads the latest value, sum and recursive do not",
            missed["delta"] < 0.25 < 0.7 < min(missed["sum"], missed["recursive"]),
            ", ".join(f"error of {rule} {value:.2g}" for rule, value in missed.items()),
        )
        stale = {rule: fmean(row["before"] / row["latest"] for row in group) for rule, group in reuse.items()}
        yield Claim(
            "recursive least squares averages the values of a reused key, delta has dropped the earlier one",
            0.7 < stale["recursive"] < 1.4 and abs(stale["delta"]) < 0.1,
            f"the one before over the latest: recursive {stale['recursive']:.2f}, delta {stale['delta']:.2f}",
        )

    def panels(self) -> list[style.Panel]:
        ages = partial(style.Panel, x_label="age: writes since", x="age", x_scale="symlog")
        retention = style.by("rule", RULES, "retention", part="stream")
        error = style.by("rule", RULES, "error", part="stream")
        reuse = style.by("rule", RULES, "error", part="reuse")
        return [
            ages("retention  ⟨Wk, v⟩ / ‖v‖²", series=retention),
            ages("error  ‖Wk − v‖² / ‖v‖²", series=error, y_scale="log"),
            style.log_panel("error of the latest value, keys reused", "distinct keys / d", "pool", reuse),
        ]

    def figure(self, rows: Sequence[Row]) -> Figure:
        figure, (retention, error, reuse) = style.figure_of(
            self.panels(),
            rows,
            "What a stream leaves of each write",
            f"{self.length}·d random associations through a memory {self.width} wide, then all of them read; α = "
            f"{self.alpha:g} (Mamba-2, gated delta), β = {self.beta:g} (RFA), else 1; {self.seeds} seeds; "
            "dashed: theory",
        )
        ages = self.ages()
        for rule in RULES:
            style.draw_theory(retention, ages, [self.expected_retention(rule, age) for age in ages])
        style.draw_theory(error, ages, self._expected_delta_errors(ages))
        for axes in (retention, error):
            axes.set_xlim(0, self.writes)
        for axes in (error, reuse):
            style.mark_level(axes, 1, "an empty memory")
        reuse.set_xscale("log", base=2)
        error.set_ylim(0.01, 30)  # at age 0 delta has no error
        plotting.legend_below(figure, columns=len(RULES))
        return figure


def _appendix_b(rule: str, beta: float = 0.5) -> Row:
    """Store two orthonormal keys, then give the second a new value with β = ½ (Schlag et al., appendix B)."""
    keys, values = torch.eye(2, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    memory = values[:2].mT @ keys
    after = get_rule(rule).write(keys[1], values[2], beta=beta).apply(memory)
    first, second = after @ keys[0], after @ keys[1]
    return {"first": float(first[0]), "second_old": float(second[1]), "second_new": float(second[2])}
