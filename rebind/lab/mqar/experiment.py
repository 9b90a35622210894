"""Multi-query associative recall: how much of a sequence can a state of a given size give back?

Zoology's task, plotted as in published work: accuracy against the size of the state, one line per rule. All rules use
the same layer at the same width, so their models have the same parameters except for gates; attention, where the state
grows with the sequence, is shown beside them. A model is trained at several learning rates, and the best one counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from rebind import plotting
from rebind.errors import InputError
from rebind.lab import style
from rebind.lab.experiment import Claim, Experiment, Point, Row, Table, require_known
from rebind.lab.mqar.models import NORMALIZERS, SOFTMAX, Recaller, RecallerStack, RecallTask
from rebind.lab.report import Curve, curve, learning_curve, select, spread
from rebind.lab.stacks import Lesson, ModelStack, StackTraining, train_all
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.fast_weight import FastWeight
from rebind.precision import tensor_float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOLVED = 0.99  # the accuracy at which training ends
FIRST_TEST_SEED = 10_000  # tests are drawn with other random numbers than lessons


@dataclass(frozen=True)
class Mqar(Experiment):
    name = "mqar"
    title = "Multi-query associative recall: accuracy against the size of the state"
    answers = "the recall of Zoology and Based (Arora et al.), accuracy against state size"
    cpu_time = "for a GPU"
    gpu_time = "under 45 min"  # 2,539 s in seven parts, six of them beside other programs

    seeds: int = 2
    rules: tuple[str, ...] = tuple(NORMALIZERS)
    widths: tuple[int, ...] = (32, 64, 128, 256)
    vocabulary: int = 8192
    trained: tuple[str, ...] = ("64x4", "128x8", "256x16", "256x32", "256x64")  # length x pairs, each equally often
    tested: tuple[str, ...] = ("64x4", "64x8", "64x16", "128x32", "256x64", "512x128", "1024x256")
    layers: int = 2
    heads: int = 2
    conv: int = 4  # tokens that the short convolution sees
    rates: tuple[float, ...] = (10**-2.5, 1e-2, 10**-1.5)
    decay: float = 0.1  # of the weights
    batch: int = 32
    steps: int = 2500  # at most; the rates fall to zero over them, as a cosine
    every: int = 250  # steps between evaluations
    sequences: int = 128  # per evaluation

    @classmethod
    def quick(cls) -> Self:
        return cls(
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

    def tasks(self, sizes: Sequence[str]) -> list[RecallTask]:
        return [RecallTask.parse(size, self.vocabulary) for size in sizes]

    def batches(self) -> list[list[Point]]:
        """Return one batch per rule and width: all rates and seeds train in one stack."""
        require_known("rule", self.rules, NORMALIZERS)
        self.hardest()
        return [
            [
                {"rule": rule, "width": width, "rate": rate, "seed": seed}
                for rate in self.rates
                for seed in range(self.seeds)
            ]
            for rule in self.rules
            for width in self.widths
        ]

    def hardest(self) -> int:
        """Return which tested size has the most pairs and is no longer than the longest trained one."""
        longest = max(task.length for task in self.tasks(self.trained))
        within = [(task.pairs, at) for at, task in enumerate(self.tasks(self.tested)) if task.length <= longest]
        if not within:
            raise InputError(
                f"All tested sizes are longer than {longest}, the longest trained one",
                expected="one that is not",
                advice="Add a shorter size to tested",
                code="only_longer_tests",
            )
        return max(within)[1]

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        rule, width = points[0]["rule"], points[0]["width"]
        with tensor_float(True):
            rows = train_all([RecallTraining(self, dict(enumerate(points)), device)])
        sizes = {
            "state": self.state_size(rule, width),
            "parameters": sum(parameter.numel() for parameter in self.recaller(rule, width, 0).parameters()),
        }
        return [{**sizes, **row} for row in rows]

    def recaller(self, rule: str, width: int, seed: int) -> Recaller:
        """Return an untrained model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Recaller(rule, width, self.vocabulary, self.layers, self.heads, self.conv)

    def state_size(self, rule: str, width: int) -> int:
        """Return how many numbers a layer carries from token to token; for attention at the longest tested sequence."""
        if rule == SOFTMAX:
            longest = max(task.length for task in self.tasks(self.tested))
            return longest * Attention(width, self.heads, rope_theta=None).state_size
        return FastWeight(width, self.heads, rule=rule, conv_size=self.conv).state_size

    def best(self, rows: Sequence[Row]) -> list[Row]:
        """Return the row of the best rate for each rule, width and seed, with its `accuracy` at the hardest size."""
        best: dict[tuple[str, int, int], Row] = {}
        for row in rows:
            key, accuracy = (row["rule"], row["width"], row["seed"]), row["accuracies"][self.hardest()]
            if key not in best or accuracy > best[key]["accuracy"]:
                best[key] = {**row, "accuracy": accuracy}
        return list(best.values())

    def table(self, rows: Sequence[Row]) -> Table:
        best, lines = self.best(rows), []
        for rule in self.rules:
            for width in self.widths:
                some = select(best, rule=rule, width=width)
                cells = [spread([row["accuracies"][at] for row in some], 2) for at in range(len(self.tested))]
                rates = ", ".join(f"{rate:.2g}" for rate in sorted({row["rate"] for row in some}))
                sizes = [f"{some[0][name]:,}" for name in ("parameters", "state")]
                lines.append([style.RULES[rule][0], str(width), *sizes, rates, *cells])
        header = [f"{task.pairs} in {task.length}" for task in self.tasks(self.tested)]
        return Table(["rule", "width", "parameters", "state", "rate", *header], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        """Yield claims about the best of all trainings: what a state can hold, not how reliably that is learned."""
        best, task = self.best(rows), self.tasks(self.tested)[self.hardest()]
        top = {rule: curve(select(best, rule=rule), "width", "accuracy").high for rule in self.rules}
        size = f"{task.pairs} pairs in {task.length} tokens"
        if SOFTMAX in top:
            accuracy = top[SOFTMAX][-1]
            yield Claim(f"attention recalls {size}", 0.95 < accuracy <= 1, f"{accuracy:.3f} at the largest width")
        if "sum" in top and len(self.widths) > 1:
            rises = all(b > a - 0.05 for a, b in zip(top["sum"], top["sum"][1:], strict=False))
            yield Claim(
                f"the sum's accuracy at {size} rises with its state",
                rises and top["sum"][-1] > top["sum"][0] + 0.2,
                ", ".join(f"{accuracy:.2f}" for accuracy in top["sum"]),
            )
        if {"sum", "delta"} <= set(top):
            ahead = [delta - total for delta, total in zip(top["delta"], top["sum"], strict=True)]
            yield Claim(
                f"with a state of the same size delta recalls no less than sum of {size}, within 0.1",
                min(ahead) > -0.1,
                ", ".join(f"{difference:+.2f}" for difference in ahead),
            )

    def figure(self, rows: Sequence[Row]) -> Figure:
        best, task = self.best(rows), self.tasks(self.tested)[self.hardest()]
        middle = self.widths[(len(self.widths) - 1) // 2]
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        size, right_answers = f"{task.pairs} pairs in {task.length} tokens", "share of right answers"
        figure, (by_state, by_pairs, learning) = plotting.panels(
            "What a state of fixed size gives back",
            f"multi-query associative recall, a vocabulary of {self.vocabulary:,}, {layers}; the best of the rates, "
            f"mean and range of {self.seeds} seeds",
            [
                (size, "numbers in a layer's state", right_answers),
                (f"Width {middle}", "pairs (in longer sequences)", right_answers),
                (f"Width {middle}, {size}", "step", right_answers),
            ],
            size=(4.6, 4.2),
        )
        for rule in self.rules:
            label, color = style.RULES[rule]
            look: dict[str, Any] = {"ls": style.DASHES} if rule == SOFTMAX else {}
            some = select(best, rule=rule)
            style.draw(by_state, curve(some, "state", "accuracy"), color, label, **look)
            some = select(some, width=middle)
            style.draw(by_pairs, self._by_pairs(some), color, **look)
            style.draw(learning, learning_curve(some, "course", self.every), color, ms=2.4, **look)
        by_state.set(xscale="log")
        by_pairs.set(xscale="log")
        counts = sorted({tested.pairs for tested in self.tasks(self.tested)})
        by_pairs.set_xticks(counts, [str(count) for count in counts])
        by_pairs.minorticks_off()
        if beyond := [count for count in counts if count > task.pairs]:
            start, end = (task.pairs * beyond[0]) ** 0.5, counts[-1] * 1.15
            by_pairs.axvspan(start, end, color=plotting.FAINT, alpha=0.5, lw=0, zorder=0)
            style.note(by_pairs, "longer than\ntrained", (counts[-1] * 1.1, 0.94), (0, 0), ha="right", va="top")
        for axes in figure.axes:
            axes.set_ylim(-0.03, 1.04)
        plotting.legend_below(figure, columns=len(self.rules))
        return figure

    def _by_pairs(self, rows: Sequence[Row]) -> Curve:
        """Return accuracy against pairs, averaged over the tested sizes with as many pairs."""
        pairs = [task.pairs for task in self.tasks(self.tested)]
        return curve(
            [
                {"pairs": count, "accuracy": fmean(row["accuracies"][at] for at, n in enumerate(pairs) if n == count)}
                for row in rows
                for count in set(pairs)
            ],
            "pairs",
            "accuracy",
        )


class RecallTraining(StackTraining):
    """A stack of models with one rule and width. A model ends when it masters all sizes up to the trained length."""

    def __init__(self, settings: Mqar, points: dict[int, Point], device: torch.device) -> None:
        rule, width = points[0]["rule"], points[0]["width"]
        self.settings, self.device = settings, device
        self.models = RecallerStack(rule, settings.layers, settings.heads)
        recallers = [settings.recaller(rule, width, point["seed"]) for point in points.values()]
        stack = ModelStack(
            [dict(recaller.named_parameters()) for recaller in recallers],
            [point["rate"] for point in points.values()],
            self.models.loss,
            device,
            weight_decay=settings.decay,
            clip=True,
            cosine_steps=settings.steps,
        )
        super().__init__(stack, points, steps=settings.steps, every=settings.every)
        self.tasks, self.tests = settings.tasks(settings.trained), settings.tasks(settings.tested)
        longest = max(task.length for task in self.tasks)
        self.within = [number for number, test in enumerate(self.tests) if test.length <= longest]
        self.order = random.Random(0)  # of the tasks
        self.generators = {seed: torch.Generator(device).manual_seed(seed + 1) for seed in range(settings.seeds)}
        self.courses: dict[int, list[float]] = {index: [] for index in points}

    def draw_lessons(self, count: int) -> Iterator[Lesson]:
        """Draw the lesson of each step: models with the same seed learn from the same sequences."""
        for _ in range(count):
            task = self.order.choice(self.tasks)
            drawn = {seed: task.draw(self.settings.batch, generator) for seed, generator in self.generators.items()}
            lessons = [drawn[self.points[index]["seed"]] for index in self.members]
            yield tuple(torch.stack(parts) for parts in zip(*lessons, strict=True))

    @torch.no_grad()
    def evaluate(self, *, longer: bool = False) -> Tensor:
        """Return each model's share of right answers [models, tests] up to the trained length, or to all tests."""
        shares = []
        for number in range(len(self.tests)) if longer else self.within:
            test = self.tests[number]
            generator = torch.Generator(self.device).manual_seed(FIRST_TEST_SEED + number)  # the same every time
            right = []
            for first in range(0, self.settings.sequences, self.settings.batch):
                drawn = test.draw(min(self.settings.batch, self.settings.sequences - first), generator)
                tokens, places, answers = (part.expand(len(self.stack), -1, -1) for part in drawn)
                right.append(self.models.logits(self.stack.parameters(), tokens, places).argmax(-1) == answers)
            shares.append(torch.cat(right, dim=1).float().mean((1, 2)))
        return torch.stack(shares, dim=1)

    def ended(self, scores: dict[int, Any]) -> dict[int, Row]:
        for index, accuracies in scores.items():
            self.courses[index].append(accuracies[self.within.index(self.settings.hardest())])
        used_up = self.steps >= self.settings.steps
        ended = [index for index, accuracies in scores.items() if used_up or min(accuracies) >= SOLVED]
        if not ended:
            return {}
        final = dict(zip(self.members, self.evaluate(longer=True).tolist(), strict=True))
        return {
            index: {"accuracies": final[index], "steps": self.steps, "course": self.courses[index]} for index in ended
        }
