"""Capacity of one matrix without training: recall error against n/d for sums, deltas and solves.

n keys get n random values; then the memory is read at every key. The error is the mean of ‖Wk − v‖² / ‖v‖²:
0 is exact recall, and an empty memory has an error of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from rebind import plotting
from rebind.errors import InputError
from rebind.lab import style
from rebind.lab.experiment import Experiment, Figure, Point, grid, require_known
from rebind.lab.report import Claim, Curve, Table, agreement, curve, select, spread
from rebind.lab.theory import delta_errors, interference
from rebind.memory import Recursive, Write, equality, l2_normalize, ridge
from rebind.ops import scan_rule
from rebind.storage import Row

KEYS = {
    "sphere": "keys uniform on the sphere",
    "correlated": "correlated keys: spectrum 1/i",
    "model": "MLP keys of a language model, on text",
}
RULES = {
    "sum": style.line("sum", plotting.RED),
    "delta": style.line("delta, one pass", plotting.BLUE),
    "delta-many": style.line("delta, many passes", plotting.CYAN),
    "ridge": style.line("ridge", plotting.GREEN),
    "recursive": style.line("recursive, batch by batch", plotting.AMBER, **style.CROSS),
    "equality": style.line("equality", plotting.VIOLET, marker="D"),
}
FLOOR = 1e-6  # smaller errors are drawn here
WINDOW = 128  # tokens per window of text


@dataclass(frozen=True)
class ClosedForm(Experiment):
    name = "closed-form"
    title = "Recall error against n/d for sums, deltas and solves, beside theory"
    answers = '"Memory and Forgetting", how many memories can we store; the closed forms of ROME and MEMIT'
    cpu_time = "15 s"
    gpu_time = "30 s"
    quick_settings = "width=64 loads=0.125,0.25,0.5,0.75,1,1.25,1.5,2 passes=60"

    width: int = 128  # d
    loads: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5, 1.75, 2.0)
    keys: tuple[str, ...] = ("sphere", "correlated")
    model: str = "smollm2"  # the source of the keys called `model`, which are as wide as its MLPs
    layer: int = 12
    passes: int = 100  # of "delta, many passes"
    lam: float = 1e-4  # λ of ridge and recursive
    group: int = 16  # keys per recursive step

    def batches(self) -> list[list[Point]]:
        """Return one batch per kind of keys and load, in which all rules and seeds have the same keys."""
        require_known("keys", self.keys, KEYS)
        batches = []
        for setting in grid(keys=self.keys, load=self.loads):
            n = max(round(setting["load"] * self.width), 1)
            rules = [rule for rule in RULES if rule != "equality" or n <= self.width]
            batches.append([{**setting, "n": n, **point} for point in grid(rule=rules, seed=range(self.seeds))])
        return batches

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        keys, values = (x.to(device) for x in self.associations(points[0]["keys"], points[0]["n"], device))
        errors = {}
        for rule in dict.fromkeys(point["rule"] for point in points):
            residual = keys @ self._memory(rule, keys, values).mT - values
            errors[rule] = residual.square().sum((-2, -1)) / values.square().sum((-2, -1))
        return [{"error": float(errors[point["rule"]][point["seed"]])} for point in points]

    def associations(self, kind: str, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw keys and values [seeds, n, d] on the CPU, so that they are the same on any device."""
        noise = [
            torch.randn(2, n, self.width, generator=torch.Generator().manual_seed(1000 * n + seed), dtype=torch.float64)
            for seed in range(self.seeds)
        ]
        keys, values = torch.stack(noise, dim=1)
        if kind == "correlated":
            keys = keys * torch.arange(1, self.width + 1, dtype=torch.float64).rsqrt()
        if kind == "model":
            keys = self._sample(mlp_keys(self.model, self.layer, device).cpu(), n)
        return l2_normalize(keys), values

    def _sample(self, keys: Tensor, n: int) -> Tensor:
        """Choose n of the model's keys for every seed."""
        if keys.shape[-1] != self.width or len(keys) < n:
            raise InputError(
                f"Layer {self.layer} of {self.model} has {len(keys)} keys that are {keys.shape[-1]} wide",
                expected=f"{n} keys that are {self.width} wide",
                advice=f"Set width={keys.shape[-1]} and loads up to {len(keys) / keys.shape[-1]:.2f}",
                code="model_keys_do_not_fit",
            )
        generators = [torch.Generator().manual_seed(seed) for seed in range(self.seeds)]
        return torch.stack([keys[torch.randperm(len(keys), generator=generator)[:n]] for generator in generators])

    def _memory(self, rule: str, keys: Tensor, values: Tensor) -> Tensor:
        """Return the memories [seeds, d_v, d_k] after all writes."""
        memory = keys.new_zeros(keys.shape[0], values.shape[-1], keys.shape[-1])
        if rule == "ridge":
            return Write(keys, values, ridge(keys, lam=self.lam).value).apply(memory)
        if rule == "equality":
            return Write(keys, values, equality(keys).value).apply(memory)
        if rule == "recursive":
            return recursive_memory(keys, values, self.lam, self.group)
        k, v, state = keys.unsqueeze(-2), values.unsqueeze(-2), memory.unsqueeze(1)
        for _ in range(self.passes if rule == "delta-many" else 1):
            _, state = scan_rule("sum" if rule == "sum" else "delta", k, k, v, state=state)
        return state.squeeze(1)

    def table(self, rows: Sequence[Row]) -> Table:
        loads = [load for load in (0.25, 0.5, 1.0, 2.0) if load in self.loads]
        if len(loads) < 3:
            loads = sorted({*self.loads[:: max(len(self.loads) // 3, 1)], self.loads[-1]})
        lines = []
        for kind in self.keys:
            for rule, line_style in RULES.items():
                cells = [[row["error"] for row in select(rows, keys=kind, rule=rule, load=load)] for load in loads]
                lines.append([kind, line_style["label"], *(spread(cell) if cell else "–" for cell in cells)])
        return Table(["keys", "rule", *(f"n/d = {load:g}" for load in loads)], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        """Yield claims about the loads that were measured."""
        errors = {kind: {rule: curve(rows, "n", "error", keys=kind, rule=rule) for rule in RULES} for kind in self.keys}
        if {"sphere", "correlated"} <= set(self.keys):
            yield from self._theory_claims(errors["sphere"], errors["correlated"])
            yield from self._order_claims(errors["sphere"], errors["correlated"])
        if {"sphere", "model"} <= set(self.keys):
            yield from self._model_claims(rows)

    def _theory_claims(self, sphere: dict[str, Curve], correlated: dict[str, Curve]) -> Iterator[Claim]:
        d, min_n = self.width, max(self.width / 4, 1)
        if ratios := [error / interference(n, d) for n, error in sphere["sum"].points if n > min_n]:
            yield agreement("on the sphere the sum's error is (n−1)/d", ratios, 0.12)
        if ratios := [
            error / float(delta_errors(int(n), d).mean()) for n, error in sphere["delta"].points if n > min_n
        ]:
            yield agreement("the error of one pass of delta is what its recursion predicts", ratios, 0.1)
        if sphere["equality"].x:
            largest = sphere["equality"].x[-1]
            error = max(sphere["equality"].high + correlated["equality"].high)
            statement = f"equality is exact up to n = {'d' if largest == d else f'{largest:g}'}, correlated keys or not"
            yield Claim(statement, error < 1e-9, f"largest error {error:.0e}")
        if ratios := [error / (1 - d / n) for n, error in sphere["ridge"].points if n > 1.2 * d]:
            yield agreement("beyond n = d the error of least squares is 1 − d/n", ratios, 0.08)

    def _order_claims(self, sphere: dict[str, Curve], correlated: dict[str, Curve]) -> Iterator[Claim]:
        d, half = self.width, round(self.width / 2)
        gap = max(
            abs(a - b) / max(a, 1e-9)
            for errors in (sphere, correlated)
            for a, b in zip(errors["ridge"].mean, errors["recursive"].mean, strict=True)
        )
        yield Claim("recursive, batch by batch, ends where one ridge solve does", gap < 1e-4, f"largest gap {gap:.0e}")
        if sphere["sum"].has(d):
            order = [sphere[rule].at(d) for rule in ("equality", "ridge", "delta-many", "delta", "sum")]
            rises = order == sorted(order) and len(set(order)) == len(order)
            statement = "at n = d: equality < ridge < many passes < one pass < sum"
            yield Claim(statement, rises, " < ".join(f"{error:.2g}" for error in order))
        if sphere["sum"].has(2 * d):
            ratio = sphere["delta-many"].at(2 * d) / sphere["ridge"].at(2 * d)
            statement = "beyond n = d many passes with β = 1 do not reach least squares"
            yield Claim(statement, ratio > 1.5, f"{ratio:.2f} times its error at 2d")
        if sphere["sum"].has(half) and half > 1:  # a single key has no interference
            ratios = {rule: correlated[rule].at(half) / sphere[rule].at(half) for rule in ("sum", "delta")}
            measured = ", ".join(f"{rule} {ratio:.1f} times" for rule, ratio in ratios.items())
            statement = "correlation makes sums and single passes worse"
            yield Claim(statement, min(ratios.values()) > 1.3, f"{measured} the error, at d/2")

    def _model_claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        load = max((load for load in self.loads if load < 1), default=None)
        if load is None:
            return

        def mean(kind: str, rule: str) -> float:
            return fmean(row["error"] for row in select(rows, keys=kind, rule=rule, load=load))

        ratios = {rule: mean("model", rule) / mean("sphere", rule) for rule in ("sum", "delta")}
        exact = mean("model", "equality")
        yield Claim(
            f"keys of a language model disturb each other more than random ones, at n = {load:g} d",
            min(ratios.values()) > 1.3,
            ", ".join(f"{rule} {ratio:.1f} times the error" for rule, ratio in ratios.items()),
        )
        yield Claim(f"and still {load:g} d of them can have exact values", exact < 1e-9, f"error {exact:.0e}")

    def panels(self) -> list[style.Panel]:
        error = "recall error  ‖Wk − v‖² / ‖v‖²"
        return [
            style.Panel(KEYS[kind], "n / d", "load", series, error, y_scale="log", expand=_visible)
            for kind in self.keys
            for series in [style.by("rule", RULES, "error", keys=kind)]
        ]

    def figure(self, rows: Sequence[Row]) -> Figure:
        figure, panels = style.figure_of(
            self.panels(),
            rows,
            "How many associations fit in one matrix",
            f"recall error of n keys in a {self.width} × {self.width} memory; mean and range of {self.seeds} seeds; "
            "dashed: theory",
        )
        for axes, kind in zip(panels, self.keys, strict=True):
            if kind == "sphere":
                self._draw_theory(axes)
            axes.axvline(1, color=plotting.EDGE, lw=1)
            axes.set_ylim(FLOOR / 2, 30)
            style.note(axes, "10⁻⁶ or less", (min(self.loads), FLOOR), (3, 6), color=plotting.VIOLET)
        plotting.legend_below(figure, columns=len(RULES))
        return figure

    def _draw_theory(self, axes: style.Axes) -> None:
        d = self.width
        counts = [2 + (max(self.loads) * d - 2) * step / 60 for step in range(61)]
        loads = [n / d for n in counts]
        style.draw_theory(axes, loads, [interference(n, d) for n in counts])
        style.draw_theory(axes, loads, [float(delta_errors(round(n), d).mean()) for n in counts])
        above = [load for load in loads if load > 1.01]
        style.draw_theory(axes, above, [1 - 1 / load for load in above])


def _visible(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "error": max(row["error"], FLOOR)} for row in rows]


def recursive_memory(keys: Tensor, values: Tensor, lam: float, group: int) -> Tensor:
    """Return the memories [..., d_v, d_k] after recursive least squares on keys [..., n, d_k], group by group."""
    old_keys = Recursive.start(lam=lam, width=keys.shape[-1], device=keys.device)
    memory = keys.new_zeros(*keys.shape[:-2], values.shape[-1], keys.shape[-1])
    for k, v in zip(keys.split(group, dim=-2), values.split(group, dim=-2), strict=True):
        solution, old_keys = old_keys.step(k)
        memory = Write(k, v, solution.value).apply(memory)
    return memory


@cache
def mlp_keys(model: str, layer: int, device: torch.device) -> Tensor:
    """Return the inputs [n, d_k] of one layer's MLP down projection at every token of a text, in windows.

    The first key of each window is an outlier, and is left out.
    """
    from rebind.evals.drift import BUNDLED_TEXT
    from rebind.models.language_model import LanguageModel
    from rebind.models.sites import module_at
    from rebind.models.tokens import Tokens

    language_model = LanguageModel.load(model, device=device)
    sites = language_model.sites
    if layer >= len(sites):
        raise InputError(
            f"{model} has {len(sites)} layers, there is no layer {layer}",
            expected=f"a layer from 0 to {len(sites) - 1}",
            code="no_such_layer",
        )
    text = BUNDLED_TEXT.read_text(encoding="utf-8")
    ids = language_model.tokenizer(text, add_special_tokens=False).input_ids
    windows = [ids[end - WINDOW : end] for end in range(WINDOW, len(ids) + 1, WINDOW)]
    module = module_at(language_model.model, sites[layer].name)
    (keys,) = language_model.trunk.inputs([module], Tokens.left_padded(windows, device))
    return keys[:, 1:].flatten(0, 1).double()
