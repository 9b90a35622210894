"""Learning at test time in one dimension: a scalar memory meets a line, and a line whose slope jumps, token by token.

Keys are scalars, values v = w*·k plus noise. With the query q = 1 what is read is the memory itself, so outputs are
trajectories of W. Then the same in d dimensions: how many tokens "juicing the state" takes, from W₀ = 0 and from a W₀
that was learned over other tasks of the kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rebind.lab.experiment import Claim, Config, Experiment, Point, Row, Table
from rebind.lab.report import Curve, curve, select, slope, spread
from rebind.memory import Recursive, Write, l2_normalise, ttt
from rebind.ops import scan_rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RULES = {
    "sum": "sum",
    "mamba2": "Mamba-2",
    "rfa": "RFA",
    "delta": "delta",
    "longhorn": "Longhorn",
    "gated_delta": "gated delta",
}
MODES = {"online": 1, "mini-batch": 16, "batch": None}  # tokens whose gradients are taken at one state
STARTS = {"zero": "online, from W₀ = 0", "learned": "online, from a learned W₀", "solved": "least squares, from 0"}
SPREAD = 0.5  # tasks differ from their mean by this, relative to its length
LEFT = 0.1  # share of the squared error at which a task counts as learned


@dataclass(frozen=True)
class Ttt1d(Config):
    tokens: int = 128
    noise: float = 0.1
    rate: float = 0.05  # η of test-time training, from which every rule's gate comes
    alpha: float = 0.99  # α of gated delta
    widths: tuple[int, ...] = (2, 4, 8, 16, 32, 64)  # d where tokens are counted
    tasks: int = 128  # over which they are averaged
    outer: int = 300  # steps that learn W₀


QUICK = Ttt1d(widths=(2, 4, 8, 16), tasks=64, outer=80)


def batches(config: Ttt1d) -> list[list[Point]]:
    seeds = range(config.seeds)
    tasks = [
        [{"part": "trajectory", "task": task, "by": by, "seed": seed} for by in [*RULES, *MODES] for seed in seeds]
        for task in ("line", "step")
    ]
    theorem = [{"part": "theorem", "seed": seed} for seed in seeds]
    juicing = [
        [{"part": "juicing", "width": width, "start": start, "seed": seed} for start in STARTS]
        for width in config.widths
        for seed in seeds
    ]
    return [*tasks, theorem, *juicing]


def measure(config: Ttt1d, points: Sequence[Point], device: torch.device) -> list[Row]:
    part = points[0]["part"]
    if part == "juicing":
        return _juicing(config, points, device)
    return [(_trajectory if part == "trajectory" else _theorem)(config, point, device) for point in points]


def slopes(config: Ttt1d, task: str) -> Tensor:
    """w* at every token: 1 throughout, or −1 from the middle on."""
    target = torch.ones(config.tokens, dtype=torch.float64)
    if task == "step":
        target[config.tokens // 2 :] = -1
    return target


def _trajectory(config: Ttt1d, point: Point, device: torch.device) -> Row:
    generator = torch.Generator().manual_seed(point["seed"])
    k, noise = torch.randn(2, config.tokens, 1, generator=generator, dtype=torch.float64)
    k = k.clamp(-2, 2).to(device)
    v = slopes(config, point["task"]).to(device)[:, None] * k + config.noise * noise.to(device)
    read = _descended if point["by"] in MODES else _scanned
    return {"memory": read(config, point["by"], k, v).flatten().tolist()}


def _descended(config: Ttt1d, mode: str, k: Tensor, v: Tensor) -> Tensor:
    state = (k.new_zeros(1, 1),)
    return ttt.run(ttt.Linear(), state, torch.ones_like(k), k, v, rate=config.rate, mini_batch=MODES[mode]).out


def _scanned(config: Ttt1d, rule: str, k: Tensor, v: Tensor) -> Tensor:
    step = 2 * config.rate  # of the gradient of a squared error
    gates: dict[str, Any] = {
        "sum": {},
        "mamba2": {"alpha": 1 - step, "dt": step},
        "rfa": {"beta": step},
        "delta": {"beta": step},
        "longhorn": {"beta": step},
        "gated_delta": {"alpha": config.alpha, "beta": step},
    }[rule]
    k4, v4 = k[None, :, None], v[None, :, None]
    return scan_rule(rule, torch.ones_like(k4), k4, v4, **gates)[0]


def _theorem(config: Ttt1d, point: Point, device: torch.device) -> Row:
    """Batch descent with η = ½ from W₀ = 0 against linear attention ("Memory and Forgetting", Theorem 1), d = 8."""
    generator = torch.Generator().manual_seed(point["seed"])
    q, k, v = torch.randn(3, config.tokens, 8, generator=generator, dtype=torch.float64).to(device)
    trained = ttt.run(ttt.Linear(), (k.new_zeros(8, 8),), q, k, v, rate=0.5, mini_batch=None).out
    attended = scan_rule("sum", q[None, :, None], k[None, :, None], v[None, :, None])[0][0, :, 0]
    return {"gap": float((trained - attended).abs().max() / attended.abs().max())}


def _juicing(config: Ttt1d, points: Sequence[Point], device: torch.device) -> list[Row]:
    """Tokens until a tenth of ‖w*‖² is left of the error, on average over tasks."""
    width = points[0]["width"]
    generator = torch.Generator().manual_seed(1000 * width + points[0]["seed"])
    mean = torch.randn(width, generator=generator, dtype=torch.float64)
    mean = mean / mean.norm() * math.sqrt(width)
    learned = _learned_start(config, mean, generator)
    length = 4 * width
    wanted, keys = _tasks(config.tasks, length, mean, generator)
    starts = {"zero": torch.zeros_like(mean), "learned": learned, "solved": torch.zeros_like(mean)}
    rows = []
    for point in points:
        start = starts[point["start"]].expand(config.tasks, width)
        left = _errors(point["start"] == "solved", start.to(device), wanted.to(device), keys.to(device))
        rows.append({"tokens": _first_below(left), "off": float((starts[point["start"]] - mean).norm() / mean.norm())})
    return rows


def _tasks(count: int, length: int, mean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Slopes w* [count, d] around a mean, and unit keys [count, T, d]."""
    off = torch.randn(count, len(mean), generator=generator, dtype=mean.dtype)
    keys = torch.randn(count, length, len(mean), generator=generator, dtype=mean.dtype)
    return mean + SPREAD * off, l2_normalise(keys)


def _learned_start(config: Ttt1d, mean: Tensor, generator: torch.Generator) -> Tensor:
    """W₀ by descent on the loss after half a pass of tokens, over fresh tasks: the outer loop."""
    start = torch.zeros_like(mean, requires_grad=True)
    optimiser = torch.optim.Adam([start], lr=0.05)
    for step in range(config.outer):
        optimiser.param_groups[0]["lr"] = 0.1 * (1 - step / config.outer)
        wanted, keys = _tasks(32, max(len(mean) // 2, 1), mean, generator)
        memory = _online(start.expand(32, -1), wanted, keys)[:, -1]
        loss = (memory - wanted).square().sum(-1).mean() / len(mean)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return start.detach()


def _online(start: Tensor, wanted: Tensor, keys: Tensor) -> Tensor:
    """The memories [tasks, T, d] after each token of delta writes with β = 1, for values w*·k."""
    memory, states = start, []
    for key in keys.unbind(1):
        error = ((wanted - memory) * key).sum(-1, keepdim=True)
        memory = memory + error * key
        states.append(memory)
    return torch.stack(states, dim=1)


def _errors(solved: bool, start: Tensor, wanted: Tensor, keys: Tensor) -> Tensor:
    """‖W_t − w*‖² / ‖w*‖² before the first token and after each, the mean over tasks: [T + 1]."""
    memories = _solved(start, wanted, keys) if solved else _online(start, wanted, keys)
    every = torch.cat([start.unsqueeze(1), memories], dim=1)
    left = (every - wanted.unsqueeze(1)).square().sum(-1)
    return left.mean(0) / wanted.square().sum(-1).mean()


def _solved(start: Tensor, wanted: Tensor, keys: Tensor) -> Tensor:
    """Least squares, one key at a time."""
    state = Recursive.start(lam=1e-9, width=keys.shape[-1], device=keys.device)
    memory, states = start.unsqueeze(1), []  # [tasks, 1, d]
    for key in keys.unbind(1):
        solution, state = state.step(key.unsqueeze(1))
        value = (wanted * key).sum(-1)[:, None, None]
        memory = Write(key.unsqueeze(1), value, solution.value).apply(memory)
        states.append(memory.squeeze(1))
    return torch.stack(states, dim=1)


def _first_below(left: Tensor) -> float:
    """The token at which the error passes `LEFT`, between two on a straight line."""
    errors = left.tolist()
    for index in range(1, len(errors)):
        before, now = errors[index - 1], errors[index]
        if now <= LEFT:
            return index - 1 + (before - LEFT) / (before - now)
    return float(len(errors))  # never, in the tokens there were


def expected_tokens(width: int, start: str) -> float:
    """Online, each unit key takes 1/d of the error: (1 − 1/d)^t of it is left. Least squares: a direction a token."""
    if start == "solved":
        return (1 - LEFT) * width
    begins = 1.0 if start == "zero" else SPREAD**2 / (1 + SPREAD**2)
    return math.log(LEFT / begins) / math.log(1 - 1 / width)


def table(config: Ttt1d, rows: Sequence[Row]) -> Table:
    lines = []
    for task in ("line", "step"):
        target = float(slopes(config, task)[-1])
        for by in [*RULES, *MODES]:
            last = [row["memory"][-1] for row in select(rows, part="trajectory", task=task, by=by)]
            name = RULES.get(by, f"descent, {by}")
            lines.append([f"{task}: W at the end, w* = {target:g}", name, spread(last)])
    for width in config.widths:
        for start, label in STARTS.items():
            cell = [row["tokens"] for row in select(rows, part="juicing", width=width, start=start)]
            lines.append([f"tokens to a tenth of the error, d = {width}", label, spread(cell)])
    gap = max(row["gap"] for row in select(rows, part="theorem"))
    lines.append(["Theorem 1: batch descent against linear attention", "largest difference", f"{gap:.0e}"])
    return Table(["measured", "by", "value"], lines)


def claims(config: Ttt1d, rows: Sequence[Row]) -> list[Claim]:
    gap = max(row["gap"] for row in select(rows, part="theorem"))
    ends = {by: _distance(config, rows, by) for by in [*RULES, *MODES]}
    late = [by for by in ("delta", "longhorn", "gated_delta", "rfa", "mamba2", "online") if ends[by] > 0.35]
    online = {by: select(rows, part="trajectory", by=by) for by in ("online", "delta")}
    same = max(
        abs(a - b)
        for one, other in zip(online["online"], online["delta"], strict=True)
        for a, b in zip(one["memory"], other["memory"], strict=True)
    )
    tokens = {start: curve(select(rows, part="juicing", start=start), "width", "tokens") for start in STARTS}
    wide = [(d, got) for d, got in zip(tokens["zero"].x, tokens["zero"].mean, strict=True) if d >= 4]
    grows = slope([d for d, _ in wide], [got for _, got in wide])
    ratios = [
        got / expected_tokens(int(d), "zero") for d, got in zip(tokens["zero"].x, tokens["zero"].mean, strict=True)
    ]
    saved = [a / b for a, b in zip(tokens["learned"].mean, tokens["zero"].mean, strict=True)]
    solved = [got / width for width, got in zip(tokens["solved"].x, tokens["solved"].mean, strict=True)]
    return [
        Claim("batch descent with η = ½ from 0 is linear attention", gap < 1e-12, f"largest difference {gap:.0e}"),
        Claim(
            "online descent with rate η is the delta rule with β = 2η", same < 1e-12, f"largest difference {same:.0e}"
        ),
        Claim(
            "after the slope jumps, every rule that decays or corrects finds the new one; sums do not",
            not late and min(ends["sum"], ends["batch"]) > 0.5,
            "off by " + ", ".join(f"{by} {ends[by]:.2f}" for by in ("delta", "gated_delta", "rfa", "sum", "batch")),
        ),
        Claim("tokens to learn a task grow as d", 0.85 < grows < 1.2, f"slope {grows:.2f}"),
        Claim(
            "as many as (1 − 1/d)^t predicts",
            all(abs(ratio - 1) < 0.15 for ratio in ratios),
            f"measured over theory {min(ratios):.2f} to {max(ratios):.2f}",
        ),
        Claim(
            "a learned W₀ saves more than half of them",
            max(saved) < 0.5,
            f"{min(saved):.2f} to {max(saved):.2f} are left",
        ),
        Claim(
            "least squares needs nine tenths of d: a direction a token",
            all(abs(share - (1 - LEFT)) < 0.08 for share in solved),
            f"{min(solved):.2f} d to {max(solved):.2f} d",
        ),
    ]


def _distance(config: Ttt1d, rows: Sequence[Row], by: str) -> float:
    """How far from the new slope a rule ends, the worst of the seeds."""
    return max(abs(row["memory"][-1] + 1) for row in select(rows, part="trajectory", task="step", by=by))


def figure(config: Ttt1d, rows: Sequence[Row]) -> Figure:
    from rebind.lab import style

    drawn, (line, step, modes, juicing) = style.panels(
        4,
        "Learning at test time, one token at a time",
        f"a scalar memory W reads v = w*·k + noise, η = {config.rate:g}; mean and range of {config.seeds} seeds; "
        "dashed: w*, in the last panel theory",
        columns=2,
        width=5.4,
        height=4.0,
    )
    for axes, task, title in ((line, "line", "a line: w* = 1"), (step, "step", "a step: the slope jumps to −1")):
        for rule in (
            "rfa",
            "gated_delta",
            "longhorn",
            "delta",
        ):  # sum is off the scale, Mamba-2 with these gates is RFA
            found = _path(select(rows, part="trajectory", task=task, by=rule))
            label = "RFA; Mamba-2 with dt = 1 − α" if rule == "rfa" else RULES[rule]
            style.draw(axes, found, style.RULES[rule], label, marker="")
        _frame(axes, config, task, title)
    style.legend(line, loc="lower right")
    looks = {"online": style.BLUE, "mini-batch": style.VIOLET, "batch": style.AMBER}
    for mode, colour in looks.items():
        found = _path(select(rows, part="trajectory", task="step", by=mode))
        label = f"mini-batches of {MODES[mode]}" if mode == "mini-batch" else mode
        style.draw(modes, found, colour, label, marker="")
    summed = _path(select(rows, part="trajectory", task="step", by="sum"))
    scaled = [2 * config.rate * one for one in summed.mean[::6]]
    modes.plot(
        summed.x[::6], scaled, "o", ms=4.5, mfc="none", mec=style.RED, mew=1.2, label="linear attention, times 2η"
    )
    _frame(modes, config, "step", "the same, by gradient descent: Theorem 1")
    modes.set_ylim(-1.8, 1.5 * max(scaled))
    style.legend(modes, loc="upper left", ncols=2)
    for start, colour in (("zero", style.BLUE), ("learned", style.CYAN), ("solved", style.GREEN)):
        style.draw(juicing, curve(select(rows, part="juicing", start=start), "width", "tokens"), colour, STARTS[start])
        style.theory(juicing, config.widths, [expected_tokens(width, start) for width in config.widths])
    juicing.set_xscale("log", base=2)
    juicing.set_yscale("log", base=2)
    style.named(juicing, "tokens until a tenth of the error is left", "d", "")
    style.legend(juicing, loc="upper left")
    return drawn


def _path(rows: Sequence[Row]) -> Curve:
    """Memories over time, across seeds."""
    return curve([{"t": t + 1, "w": w} for row in rows for t, w in enumerate(row["memory"])], "t", "w")


def _frame(axes: Axes, config: Ttt1d, task: str, title: str) -> None:
    from rebind.lab import style

    style.theory(axes, range(1, config.tokens + 1), slopes(config, task).tolist())
    axes.set_ylim(-1.6, 1.6)
    style.named(axes, title, "tokens", "W")


EXPERIMENT = Experiment(
    name="ttt-1d",
    title="A scalar memory learns a line and a step; how many tokens the state takes to fill",
    answers='"Memory and Forgetting", 1-D learning at test time, Theorem 1, juicing the state',
    takes="20 s",
    config=Ttt1d(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    table=table,
    figure=figure,
    claims=claims,
)
