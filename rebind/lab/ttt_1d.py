"""Learning at test time in one dimension: a scalar memory learns a line, and a line with a jump in its slope.

Keys are scalars, values are v = w*·k plus noise. With the query q = 1 the output is the memory itself, so outputs are
trajectories of W. Then the same in d dimensions: how many tokens it takes to fill the state ("juicing the state"),
from W₀ = 0 and from a W₀ that was learned on other tasks of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rebind import plotting
from rebind.lab import style
from rebind.lab.experiment import Experiment, Figure, Point, grid
from rebind.lab.report import Claim, Table, agreement, curve, select, slope, spread, spreads
from rebind.memory import Recursive, Write, l2_normalize, ttt
from rebind.ops import scan_rule
from rebind.storage import Row

RULES = {rule: style.RULES[rule] for rule in ("sum", "mamba2", "rfa", "delta", "longhorn", "gated_delta")}
MODES = {  # of gradient descent
    "online": style.line("online", plotting.BLUE),
    "mini-batch": style.line("mini-batches of 16", plotting.VIOLET),
    "batch": style.line("batch", plotting.AMBER),
}
MINI_BATCHES = {"online": 1, "mini-batch": 16, "batch": None}  # tokens whose gradients are taken at one state
STARTS = {
    "zero": style.line("online, from W₀ = 0", plotting.BLUE),
    "learned": style.line("online, from a learned W₀", plotting.CYAN),
    "solved": style.line("least squares, from 0", plotting.GREEN),
}
TASK_SPREAD = 0.5  # distance of a task from the mean task, relative to the length of the mean
LEARNED_ERROR = 0.1  # share of the squared error at which a task counts as learned


@dataclass(frozen=True)
class Ttt1d(Experiment):
    name = "ttt-1d"
    title = "A scalar memory learns a line and a step; how many tokens the state takes to fill"
    answers = '"Memory and Forgetting", 1-D learning at test time, Theorem 1, juicing the state'
    cpu_time = "20 s"
    quick_settings = "widths=2,4,8,16 tasks=64 outer=80"

    tokens: int = 128
    noise: float = 0.1
    rate: float = 0.05  # η of test-time training, which determines every rule's gate
    alpha: float = 0.99  # α of gated delta
    widths: tuple[int, ...] = (2, 4, 8, 16, 32, 64)  # d of the tasks where tokens are counted
    tasks: int = 128  # over which the count is averaged
    outer: int = 300  # steps that learn W₀

    def batches(self) -> list[list[Point]]:
        seeds = range(self.seeds)
        tasks = [grid(part=["trajectory"], task=[task], by=[*RULES, *MODES], seed=seeds) for task in ("line", "step")]
        juicing = [
            grid(part=["juicing"], width=[width], start=STARTS, seed=[seed]) for width in self.widths for seed in seeds
        ]
        return [*tasks, grid(part=["theorem"], seed=seeds), *juicing]

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        match points[0]["part"]:
            case "trajectory":
                return [self._trajectory(point, device) for point in points]
            case "theorem":
                return [{"gap": self._gap_to_attention(point["seed"], device)} for point in points]
            case _:
                return self._count_tokens(points, device)

    def slopes(self, task: str) -> Tensor:
        """Return w* at every token: 1 throughout, or −1 from the middle on."""
        target = torch.ones(self.tokens, dtype=torch.float64)
        if task == "step":
            target[self.tokens // 2 :] = -1
        return target

    def _trajectory(self, point: Point, device: torch.device) -> Row:
        """Return the memory after every token."""
        generator = torch.Generator().manual_seed(point["seed"])
        k, noise = torch.randn(2, self.tokens, 1, generator=generator, dtype=torch.float64)
        k = k.clamp(-2, 2).to(device)
        v = self.slopes(point["task"]).to(device)[:, None] * k + self.noise * noise.to(device)
        if point["by"] in MODES:
            start, mini_batch = (k.new_zeros(1, 1),), MINI_BATCHES[point["by"]]
            memory = ttt.run(ttt.Linear(), start, torch.ones_like(k), k, v, rate=self.rate, mini_batch=mini_batch).out
        else:
            k, v = k[None, :, None], v[None, :, None]
            memory = scan_rule(point["by"], torch.ones_like(k), k, v, **self._gates(point["by"]))[0]
        return {"memory": memory.flatten().tolist()}

    def _gates(self, rule: str) -> dict[str, Any]:
        step = 2 * self.rate  # the gradient of a squared error has a factor of two
        gates: dict[str, dict[str, Any]] = {
            "sum": {},
            "mamba2": {"alpha": 1 - step, "dt": step},
            "gated_delta": {"alpha": self.alpha, "beta": step},
        }
        return gates.get(rule, {"beta": step})

    def _gap_to_attention(self, seed: int, device: torch.device) -> float:
        """Compare batch descent with η = ½ from W₀ = 0 with linear attention, d = 8 (Theorem 1)."""
        generator = torch.Generator().manual_seed(seed)
        q, k, v = torch.randn(3, self.tokens, 8, generator=generator, dtype=torch.float64).to(device)
        trained = ttt.run(ttt.Linear(), (k.new_zeros(8, 8),), q, k, v, rate=0.5, mini_batch=None).out
        attended = scan_rule("sum", q[None, :, None], k[None, :, None], v[None, :, None])[0][0, :, 0]
        return float((trained - attended).abs().max() / attended.abs().max())

    def _count_tokens(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        """Count tokens until a tenth of the error is left, on average over tasks."""
        width = points[0]["width"]
        generator = torch.Generator().manual_seed(1000 * width + points[0]["seed"])
        mean = torch.randn(width, generator=generator, dtype=torch.float64)
        mean = mean / mean.norm() * math.sqrt(width)
        starts = {"learned": self._learned_start(mean, generator)}
        slopes, keys = (x.to(device) for x in _draw_tasks(self.tasks, 4 * width, mean, generator))
        rows = []
        for point in points:
            start = starts.get(point["start"], torch.zeros_like(mean))
            states = (_least_squares if point["start"] == "solved" else _online)(start.to(device), slopes, keys)
            error = (states - slopes.unsqueeze(1)).square().sum(-1).mean(0) / slopes.square().sum(-1).mean()
            rows.append({"tokens": _first_below(error.tolist()), "off": float((start - mean).norm() / mean.norm())})
        return rows

    def _learned_start(self, mean: Tensor, generator: torch.Generator) -> Tensor:
        """Learn W₀ in an outer loop: descend on the loss after d/2 tokens, over fresh tasks."""
        start = torch.zeros_like(mean, requires_grad=True)
        optimizer = torch.optim.Adam([start])
        for step in range(self.outer):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / self.outer)
            slopes, keys = _draw_tasks(32, max(len(mean) // 2, 1), mean, generator)
            loss = (_online(start, slopes, keys)[:, -1] - slopes).square().sum(-1).mean() / len(mean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return start.detach()

    def table(self, rows: Sequence[Row]) -> Table:
        names = {rule: line_style["label"] for rule, line_style in RULES.items()} | {
            mode: f"descent, {mode}" for mode in MODES
        }
        lines = []
        for task in ("line", "step"):
            target = float(self.slopes(task)[-1])
            for by, name in names.items():
                ends = [row["memory"][-1] for row in select(rows, part="trajectory", task=task, by=by)]
                lines.append([f"{task}: W at the end, w* = {target:g}", name, spread(ends)])
        for width in self.widths:
            for start, line_style in STARTS.items():
                cells = spreads(select(rows, part="juicing", width=width, start=start), "tokens")
                lines.append([f"tokens to a tenth of the error, d = {width}", line_style["label"], *cells])
        gap = max(row["gap"] for row in select(rows, part="theorem"))
        lines.append(["Theorem 1: batch descent against linear attention", "largest difference", f"{gap:.0e}"])
        return Table(["measured", "by", "value"], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        gap = max(row["gap"] for row in select(rows, part="theorem"))
        yield Claim("batch descent with η = ½ from 0 is linear attention", gap < 1e-12, f"largest difference {gap:.0e}")
        online, delta = (select(rows, part="trajectory", by=by) for by in ("online", "delta"))
        gap = max(
            abs(a - b)
            for online_row, delta_row in zip(online, delta, strict=True)
            for a, b in zip(online_row["memory"], delta_row["memory"], strict=True)
        )
        statement = "online descent with rate η is the delta rule with β = 2η"
        yield Claim(statement, gap < 1e-12, f"largest difference {gap:.0e}")
        steps = {by: select(rows, part="trajectory", task="step", by=by) for by in [*RULES, *MODES]}
        distance = {by: max(abs(row["memory"][-1] + 1) for row in group) for by, group in steps.items()}
        follow = ("delta", "longhorn", "gated_delta", "rfa", "mamba2", "online")
        reported = ("delta", "gated_delta", "rfa", "sum", "batch")
        yield Claim(
            "after the slope jumps, every rule that decays or corrects finds the new one; sums do not",
            max(distance[by] for by in follow) <= 0.35 and min(distance["sum"], distance["batch"]) > 0.5,
            "off by " + ", ".join(f"{by} {distance[by]:.2f}" for by in reported),
        )
        tokens = {start: curve(rows, "width", "tokens", part="juicing", start=start) for start in STARTS}
        wide = [(width, count) for width, count in tokens["zero"].points if width >= 4]
        power = slope([width for width, _ in wide], [count for _, count in wide])
        yield Claim("the tokens to learn a task grow as d", 0.85 < power < 1.2, f"slope {power:.2f}")
        ratios = [count / expected_tokens(int(width), "zero") for width, count in tokens["zero"].points]
        yield agreement("their number is what (1 − 1/d)^t predicts", ratios, 0.15)
        shares = [a / b for a, b in zip(tokens["learned"].mean, tokens["zero"].mean, strict=True)]
        measured = f"{min(shares):.2f} to {max(shares):.2f} of them remain"
        yield Claim("a learned W₀ saves more than half of them", max(shares) < 0.5, measured)
        shares = [count / width for width, count in tokens["solved"].points]
        yield Claim(
            "least squares needs nine tenths of d: one direction per token",
            all(abs(share - (1 - LEARNED_ERROR)) < 0.08 for share in shares),
            f"{min(shares):.2f} d to {max(shares):.2f} d",
        )

    def panels(self) -> list[style.Panel]:
        rules = {rule: RULES[rule] for rule in ("rfa", "gated_delta", "longhorn", "delta")}  # sum is off the scale
        rules["rfa"] = {**rules["rfa"], "label": "RFA; Mamba-2 with dt = 1 − α"}  # which are the same here
        paths = [
            style.Panel(
                title, "tokens", "t", style.by("by", looks, "w", task=task), "W", expand=_by_token, markers=False
            )
            for title, task, looks in (
                ("a line: w* = 1", "line", rules),
                ("a step: the slope jumps to −1", "step", rules),
                ("the same, by gradient descent: Theorem 1", "step", MODES),
            )
        ]
        juicing = style.by("start", STARTS, "tokens", part="juicing")
        title = "tokens until a tenth of the error is left"
        return [*paths, style.log_panel(title, "d", "width", juicing)]

    def figure(self, rows: Sequence[Row]) -> Figure:
        figure, (line, step, modes, juicing) = style.figure_of(
            self.panels(),
            rows,
            "Learning at test time, one token at a time",
            f"a scalar memory W reads v = w*·k + noise, η = {self.rate:g}; mean and range of {self.seeds} seeds; "
            "dashed: w*, in the last panel theory",
        )
        for axes, task in ((line, "line"), (step, "step"), (modes, "step")):
            style.draw_theory(axes, range(1, self.tokens + 1), self.slopes(task).tolist())
            axes.set_ylim(-1.6, 1.6)
        summed = curve(_by_token(select(rows, part="trajectory", task="step", by="sum")), "t", "w")
        scaled = [2 * self.rate * memory for memory in summed.mean[::6]]
        circles: dict[str, Any] = {"ms": 4.5, "mfc": "none", "mec": plotting.RED, "mew": 1.2}
        modes.plot(summed.x[::6], scaled, "o", label="linear attention, times 2η", **circles)
        modes.set_ylim(-1.8, 1.5 * max(scaled))
        for start in STARTS:
            style.draw_theory(juicing, self.widths, [expected_tokens(width, start) for width in self.widths])
        juicing.set_xscale("log", base=2)
        juicing.set_yscale("log", base=2)
        plotting.legend(line, loc="lower right")
        plotting.legend(modes, loc="upper left", ncols=2)
        plotting.legend(juicing, loc="upper left")
        return figure


def expected_tokens(width: int, start: str) -> float:
    """Return the number of tokens that theory predicts.

    Online, each unit key removes 1/d of the error, so (1 − 1/d)^t of it remains after t tokens. Least squares learns
    one direction per token.
    """
    if start == "solved":
        return (1 - LEARNED_ERROR) * width
    first_error = 1.0 if start == "zero" else TASK_SPREAD**2 / (1 + TASK_SPREAD**2)
    return math.log(LEARNED_ERROR / first_error) / math.log(1 - 1 / width)


def _draw_tasks(count: int, length: int, mean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw slopes w* [count, d] around a mean, and unit keys [count, T, d]."""
    offsets = torch.randn(count, len(mean), generator=generator, dtype=mean.dtype)
    keys = torch.randn(count, length, len(mean), generator=generator, dtype=mean.dtype)
    return mean + TASK_SPREAD * offsets, l2_normalize(keys)


def _online(start: Tensor, slopes: Tensor, keys: Tensor) -> Tensor:
    """Return the memories [tasks, T + 1, d] before and after each token of delta writes with β = 1, values w*·k."""
    states = [start.expand_as(slopes)]
    for key in keys.unbind(1):
        error = ((slopes - states[-1]) * key).sum(-1, keepdim=True)
        states.append(states[-1] + error * key)
    return torch.stack(states, dim=1)


def _least_squares(start: Tensor, slopes: Tensor, keys: Tensor) -> Tensor:
    """Return the same memories for recursive least squares."""
    old_keys = Recursive.start(lam=1e-9, width=keys.shape[-1], device=keys.device)
    states = [start.expand_as(slopes).unsqueeze(1)]  # [tasks, 1, d] each
    for key in keys.split(1, dim=1):
        solution, old_keys = old_keys.step(key)
        value = (slopes.unsqueeze(1) * key).sum(-1, keepdim=True)
        states.append(Write(key, value, solution.value).apply(states[-1]))
    return torch.cat(states, dim=1)


def _first_below(errors: Sequence[float]) -> float:
    """Return the token at which the error falls below `LEARNED_ERROR`, interpolated; the last one if it never does."""
    for token, (before, after) in enumerate(pairwise(errors)):
        if after <= LEARNED_ERROR:
            return token + (before - LEARNED_ERROR) / (before - after)
    return float(len(errors))


def _by_token(rows: Sequence[Row]) -> list[Row]:
    """Return one row per token of each trajectory."""
    return [{"t": t, "w": w} for row in rows for t, w in enumerate(row["memory"], 1)]
