"""One layer's weight as the memory of many facts: what each editing method stores, and what it costs.

Keys, values and the moment of old keys are found once, at one layer of one model, and every method is given the same
ones: what differs is the gain. Two things are asked of each write ΔW. Of the weights alone:

    realised     1 − Σ‖W'k − v‖² / Σ‖Wk − v‖²          of the new keys
    disturbance  tr(ΔW C ΔWᵀ) / tr(W C Wᵀ)             of the old ones, C = E[kkᵀ]

and of the model: how many of the facts it says, how many neighbours' answers stay, how far it drifts.

A ridge write (MEMIT) minimises missed + λ · disturbed, so as λ runs its curve bounds all methods: whatever realises as
much disturbs the old keys no less. λ is thereby the exchange rate of plasticity and stability.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rebind.errors import InputError
from rebind.lab.experiment import Claim, Config, Experiment, Point, Row, Table, require_known
from rebind.lab.report import curve, select, spread
from rebind.memory import Write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact
    from rebind.edit.methods import Old

TOY = "toy"  # a random model made on the spot (`rebind.lab.toy`)
METHODS = {
    "rome": "ROME, one by one",
    "emmet": "EMMET",
    "memit": "MEMIT",
    "batches": "MEMIT, batch by batch",
    "recursive": "recursive, batch by batch",
    "alphaedit": "AlphaEdit",
}


@dataclass(frozen=True)
class Edits(Config):
    from_zero = ("layer",)

    model: str = "smollm2"
    layer: int = 2
    counts: tuple[int, ...] = (1, 2, 5, 10, 20, 60)  # facts
    methods: tuple[str, ...] = tuple(METHODS)
    group: int = 5  # facts of a batch, where they come in batches
    scales: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0, 30.0, 1e2, 1e3)  # of λ: times the keys' own
    neighbours: int = 2  # asked about each fact
    steps: int = 25  # of the search for targets, at most
    rate: float = 0.5  # its steps' length
    clamp: float = 4.0  # its bound: what ROME has on this model
    moment_tokens: int = 100_000


QUICK = Edits(
    seeds=2,
    model=TOY,
    layer=0,
    counts=(1, 2, 5, 10, 20),
    rate=0.1,
    moment_tokens=2_000,
)


def batches(config: Edits) -> list[list[Point]]:
    """One for each order of the facts and method; those of λ, at the largest count, come after the others."""
    require_known("method", config.methods, METHODS)
    made = []
    for seed in range(config.seeds):
        for method in config.methods:
            made.append([{"seed": seed, "method": method, "n": n, "scale": 1.0} for n in config.counts])
        others = [scale for scale in config.scales if scale != 1.0 or "memit" not in config.methods]
        made.append([{"seed": seed, "method": "memit", "n": config.counts[-1], "scale": scale} for scale in others])
    return [one for one in made if one]


@dataclass(frozen=True, eq=False)
class Memory:
    """What every method is given: a layer of a model, facts as keys and values, and what is known of old keys."""

    editor: Editor
    module: nn.Module
    facts: Sequence[Fact]
    keys: Tensor  # [n, d_k] float64
    values: Tensor  # [n, d_v] float64
    old: Old
    neighbours: Sequence[Fact]
    answers: Sequence[str]  # the unedited model's first words to the neighbours

    def order(self, seed: int, n: int) -> list[int]:
        """The first n facts in the order of a seed."""
        return random.Random(seed).sample(range(len(self.facts)), len(self.facts))[:n]


def measure(config: Edits, points: Sequence[Point], device: torch.device) -> list[Row]:
    memory = prepared(config, device)
    return [_measured(memory, point, config) for point in points]


def _measured(memory: Memory, point: Point, config: Edits) -> Row:
    from rebind.edit.solve.layer_writes import suitable_lambda, unchanged
    from rebind.models.sites import memory_of, write_memory

    chosen = memory.order(point["seed"], point["n"])
    keys, values = memory.keys[chosen], memory.values[chosen]
    before = memory_of(memory.module).double()
    lam = point["scale"] * suitable_lambda(keys, memory.old.factored)
    after = written(point["method"], before, keys, values, memory.old, lam, config.group)
    asked = _missed(before, keys, values)
    worth = _energy(before, memory.old)
    found = {
        "realised": 1 - _missed(after, keys, values) / asked,
        "disturbance": _energy(after - before, memory.old) / worth,
        "price": lam * worth / asked,  # of disturbance, in shares of what is asked
    }
    with unchanged([memory.module]):
        write_memory(memory.module, after)
        return found | _answers(memory, [memory.facts[index] for index in chosen])


def written(method: str, before: Tensor, keys: Tensor, values: Tensor, old: Old, lam: float, group: int) -> Tensor:
    """The weights [d_v, d_k] after a method has written all keys and values. λ is for all of them, at once or not."""
    from rebind.edit.methods import get_method

    require_known("method", [method], METHODS)
    chosen = get_method("memit" if method == "batches" else method)
    lam = lam if chosen.lam is None else chosen.lam
    size = group if method in ("batches", "recursive") else len(keys)
    after, earlier = before, keys[:0]
    for k, v in zip(keys.split(size), values.split(size), strict=True):
        after = Write(k, v, chosen.gain(k, old, lam, earlier)).apply(after)
        earlier = torch.cat([earlier, k])
    return after


def _missed(weights: Tensor, keys: Tensor, values: Tensor) -> float:
    return float((keys @ weights.mT - values).square().sum())


def _energy(weights: Tensor, old: Old) -> float:
    """tr(W C Wᵀ) = E‖Wk‖² over old keys, by the factor that the methods solve with: never negative."""
    return float((weights @ old.factored.lower).square().sum())


def _answers(memory: Memory, facts: Sequence[Fact]) -> Row:
    """What the model as it stands makes of the facts, of the neighbours and of unrelated text."""
    asked = [*facts, *(replace(fact, target=fact.old or fact.target, old=None) for fact in facts), *memory.neighbours]
    scores = memory.editor.score(asked)
    new, true, near = scores[: len(facts)], scores[len(facts) : 2 * len(facts)], scores[2 * len(facts) :]
    return {
        "said": fmean(score.exact for score in new),
        "likelier": fmean(n.nll < t.nll for n, t in zip(new, true, strict=True)),
        "kept": fmean(score.says == answer for score, answer in zip(near, memory.answers, strict=True)),
        "drift": memory.editor.drift().kl,
    }


@lru_cache(maxsize=1)
def prepared(config: Edits, device: torch.device) -> Memory:
    """The model, and what is asked of its layer: one search for all facts, methods and numbers of them."""
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact
    from rebind.edit.targets.optimize import TargetSettings
    from rebind.evals.records import bundled
    from rebind.models.sites import module_at

    records = sorted(bundled(), key=lambda record: record.fact.tags)[: max(config.counts)]
    if len(records) < max(config.counts):
        raise InputError(f"counts go to {max(config.counts)}, there are {len(records)} facts: name no larger one")
    facts = [record.fact for record in records]
    if config.model == TOY:
        from rebind.lab.toy import toy

        made, tokens = toy(records), config.moment_tokens
        editor = Editor(made.model.to(device), made.tokenizer, corpus=made.corpus, moment_tokens=tokens, guard=None)
    else:
        editor = Editor(config.model, device=device, moment_tokens=config.moment_tokens, guard=None)
    editor.drift()  # what the base model says is kept
    neighbours = [
        Fact("{}", one.prompt, one.answer or record.fact.target)
        for record in records
        for one in record.neighbours[: config.neighbours]
    ]
    answers = [score.says for score in editor.score(neighbours)]
    targets = TargetSettings(steps=config.steps, rate=config.rate, clamp=config.clamp)
    edit = editor.rewrite_many(facts, method="memit", layers=(config.layer,), targets=targets, force=True)
    editor.undo(edit.id)
    (site,) = edit.sites
    write, module, old = edit.write(site), module_at(editor.model, site), editor.weights.old[site]
    keys, values = (tensor.to(old.moment) for tensor in (write.keys, write.values))
    return Memory(editor, module, facts, keys, values, old, neighbours, answers)


def table(config: Edits, rows: Sequence[Row]) -> Table:
    lines = []
    for method, label in METHODS.items():
        for n in config.counts:
            some = select(rows, method=method, n=n, scale=1.0)
            if some:
                lines.append([label, str(n), "1", *_cells(some)])
    most = config.counts[-1]
    for scale in config.scales:
        if scale != 1.0:
            lines.append(["MEMIT", str(most), f"{scale:g}", *_cells(select(rows, method="memit", n=most, scale=scale))])
    return Table(["method", "facts", "λ ×", *COLUMNS.values()], lines)


COLUMNS = {
    "realised": "realised",
    "disturbance": "disturbance",
    "likelier": "new object likelier",
    "said": "said",
    "kept": "neighbours kept",
    "drift": "drift",
}


def _cells(rows: Sequence[Row]) -> list[str]:
    return [spread([round(row[name], 12) for row in rows]) for name in COLUMNS]  # orders alone differ in the last bits


def claims(config: Edits, rows: Sequence[Row]) -> list[Claim]:
    most = config.counts[-1]
    plain = {method: select(rows, method=method, scale=1.0) for method in config.methods}
    made = _exact(config, plain)
    if {"memit", "recursive"} <= set(plain):
        gap = max(
            abs(a[name] - b[name]) / max(abs(b[name]), 1e-9)
            for name in ("realised", "disturbance")
            for a, b in zip(plain["recursive"], plain["memit"], strict=True)
        )
        says = "recursive, batch by batch, ends where MEMIT all at once does"
        made.append(Claim(says, gap < 1e-4, f"largest gap {gap:.0e}"))
    ridge = select(rows, method="memit", n=most)
    if len({row["scale"] for row in ridge}) > 2:
        realised, disturbance, drift = (
            curve(ridge, "scale", name).mean for name in ("realised", "disturbance", "drift")
        )
        made += [
            Claim(
                "with λ falls what is realised, and what is disturbed",
                all(a > b for one in (realised, disturbance) for a, b in pairwise(one)),
                f"realised {realised[0]:.3f} to {realised[-1]:.3f}, disturbance {disturbance[0]:.2g} to "
                f"{disturbance[-1]:.2g}",
            ),
            Claim(
                "and the model drifts less",
                drift[-1] < 0.1 * drift[0],
                f"{drift[0]:.2g} nats to {drift[-1]:.2g}",
            ),
        ]
        apart = [method for method in config.methods if method not in ("memit", "recursive")]
        slack = _slack(ridge, [row for method in apart for row in select(plain[method], n=most)])
        made.append(
            Claim(
                "no method lies beyond MEMIT's curve: what realises as much disturbs no less",
                slack > -1e-5,
                f"the nearest is {slack:.1g} on the wrong side of it"
                if slack < 0
                else f"the nearest is {slack:.1g} off",
            )
        )
    return made


def _exact(config: Edits, plain: dict[str, list[Row]]) -> list[Claim]:
    made = []
    if "emmet" in plain:
        missed = max(abs(1 - row["realised"]) for row in plain["emmet"])
        made.append(Claim("EMMET's facts are all realised exactly", missed < 1e-8, f"{missed:.0e} missed at most"))
    if "rome" in plain and config.counts[0] == 1 and config.counts[-1] > 1:
        alone = max(abs(1 - row["realised"]) for row in select(plain["rome"], n=1))
        many = min(row["realised"] for row in select(plain["rome"], n=config.counts[-1]))
        made.append(
            Claim(
                "ROME realises one fact exactly, and of many it moves the earlier ones again",
                alone < 1e-8 and many < 0.999,
                f"{alone:.0e} missed of one, {1 - many:.2g} of {config.counts[-1]}",
            )
        )
    return made


def _slack(ridge: Sequence[Row], others: Sequence[Row]) -> float:
    """How far the others stay above what MEMIT minimises, missed + price · disturbance, at every λ: the smallest."""
    return min(
        (1 - other["realised"] + one["price"] * other["disturbance"])
        - (1 - one["realised"] + one["price"] * one["disturbance"])
        for one in ridge
        for other in others
        if one["seed"] == other["seed"]
    )


def figure(config: Edits, rows: Sequence[Row]) -> Figure:
    from rebind.lab import style

    most, name = config.counts[-1], "a random model" if config.model == TOY else Path(config.model).name
    drawn, axes = style.panels(
        4,
        "One layer as the memory of many facts",
        f"layer {config.layer} of {name}, the same keys and values for all methods; mean and range of {config.seeds} "
        "orders of the facts",
        columns=2,
        width=5.6,
        height=3.9,
    )
    for method in config.methods:
        found = select(rows, method=method, scale=1.0)
        for one, what in zip(axes, ("likelier", "drift"), strict=False):
            style.draw(
                one, curve(found, "n", what), **_look(method), label=METHODS[method] if what == "drift" else None
            )
    for one in axes[:2]:
        one.set_xscale("log")
        one.set_xticks(config.counts, [str(n) for n in config.counts])
        one.minorticks_off()
    axes[0].set_ylim(-0.03, 1.04)
    style.named(axes[0], "New", "facts written", "new object likelier than the old")
    style.named(axes[1], "Old", "facts written", "drift: KL(base ‖ edited), nats")
    _plane(axes[2], config, rows, "drift", "likelier")
    style.named(axes[2], f"λ trades one for the other, {most} facts", "drift, nats", "new object likelier")
    _plane(axes[3], config, rows, "disturbance", "realised")
    style.named(axes[3], "The same in the weights", "disturbance  tr(ΔW C ΔWᵀ) / tr(W C Wᵀ)", "realised of Wk = v")
    style.legend_below(drawn, columns=3)
    return drawn


def _look(method: str) -> dict[str, Any]:
    from rebind.lab import style

    colour, marker, line = {
        "rome": (style.RED, "o", "-"),
        "emmet": (style.VIOLET, "D", "-"),
        "memit": (style.BLUE, "o", "-"),
        "batches": (style.CYAN, "o", "-"),
        "recursive": (style.GREEN, "x", "none"),
        "alphaedit": (style.AMBER, "o", "-"),
    }[method]
    cross = {"ms": 6.5, "mew": 1.6, "zorder": 4} if marker == "x" else {}
    return {"colour": colour, "marker": marker, "ls": line, **cross}


def _plane(axes: Axes, config: Edits, rows: Sequence[Row], across: str, up: str) -> None:
    """MEMIT's curve as λ runs, and where every method is, at the largest number of facts."""
    from rebind.lab import style

    most = config.counts[-1]
    ridge = select(rows, method="memit", n=most)
    x, y = (curve(ridge, "scale", name).mean for name in (across, up))
    axes.plot(x, y, color=style.BLUE, lw=1.7, marker=".", ms=5, alpha=0.6, zorder=2)
    ends = {min(config.scales): (-8, 5, "right"), 10.0: (7, -11, "left"), max(config.scales): (2, 7, "left")}
    for scale, at in zip(sorted({row["scale"] for row in ridge}), zip(x, y, strict=True), strict=True):
        if scale in ends:
            right, above, side = ends[scale]
            axes.annotate(
                f"λ × {scale:g}",
                at,
                xytext=(right, above),
                textcoords="offset points",
                ha=side,
                fontsize=8.5,
                color=style.SOFT,
            )
    for method in config.methods:
        some, look = select(rows, method=method, n=most, scale=1.0), _look(method)
        place = fmean(row[across] for row in some), fmean(row[up] for row in some)
        axes.plot(*place, color=look.pop("colour"), **{"ms": 6.5, "zorder": 5, **look, "ls": "none"})
    axes.set(xscale="log", ylim=(-0.05, 1.06))


EXPERIMENT = Experiment(
    name="edits",
    title="One layer's weight as the memory: efficacy and drift against the number of facts, and λ's trade",
    answers="ROME eq. 17, MEMIT eq. 14, EMMET and AlphaEdit on the same keys; plasticity against stability",
    takes="for a GPU",
    on_gpu="2 min",
    config=Edits(),
    quick=QUICK,
    batches=batches,
    measure=measure,
    table=table,
    figure=figure,
    claims=claims,
)
