"""Multi-query associative recall: how much of a sequence can a state of fixed size give back?

Zoology's task, plotted as in published work: accuracy against the size of the state, one line per rule. All rules use
the same layer at the same width, so their models have the same parameters except for gates, which have a matrix each in
rules that gate every channel. Attention, whose state grows with the sequence, is shown beside them. A model is trained
at several learning rates, and the best one counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rebind import plotting
from rebind.lab import style
from rebind.lab.experiment import Figure, Point, grid, require_known
from rebind.lab.mqar.task import NORMALIZERS, SOFTMAX, Recall
from rebind.lab.report import Claim, Table, curve, learning_rows, select, spread
from rebind.storage import Row


@dataclass(frozen=True)
class Mqar(Recall):
    name = "mqar"
    title = "Multi-query associative recall: accuracy against the size of the state"
    answers = "the recall of Zoology and Based (Arora et al.), accuracy against state size"
    cpu_time = "for a GPU"
    gpu_time = "under 45 min"  # 2,539 s in seven parts, six of them beside other programs
    quick_settings = (
        "seeds=2 rules=sum,delta,softmax widths=8,16,24 vocabulary=48 trained=16x4,32x8 tested=16x4,24x6,32x8 layers=1 "
        "heads=1 rates=3e-2 batch=24 steps=250 every=50 sequences=64"
    )

    rules: tuple[str, ...] = ("sum", "mamba2", "longhorn", "delta", "gated_delta", SOFTMAX)  # of NORMALIZERS
    widths: tuple[int, ...] = (32, 64, 128, 256)

    def batches(self) -> list[list[Point]]:
        """Return one batch per rule and width: all rates and seeds train in one stack."""
        require_known("rule", self.rules, NORMALIZERS)
        self.hardest()
        return [
            grid(rule=[rule], width=[width], rate=self.rates, seed=range(self.seeds))
            for rule in self.rules
            for width in self.widths
        ]

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        from rebind.lab.mqar.training import train  # needs rebind.nn, which the list of experiments does not

        return train(self, points, device)

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
                lines.append([style.RULES[rule]["label"], str(width), *sizes, rates, *cells])
        header = [f"{task.pairs} in {task.length}" for task in self.tasks(self.tested)]
        return Table(["rule", "width", "parameters", "state", "rate", *header], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        """Yield claims about the best of all trainings: what a state can hold, not how reliably that is learned."""
        best, size = self.best(rows), self._hardest_size
        top = {rule: curve(best, "width", "accuracy", rule=rule).high for rule in self.rules}
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

    def panels(self) -> list[style.Panel]:
        looks, middle = {rule: style.RULES[rule] for rule in self.rules}, self.widths[(len(self.widths) - 1) // 2]
        accuracy, of_middle = style.by("rule", looks, "accuracy"), style.by("rule", looks, "accuracy", width=middle)
        width, size, pairs = f"Width {middle}", self._hardest_size, "pairs (in longer sequences)"
        panel = partial(style.Panel, y_label="share of right answers")
        learning = style.by("rule", looks, "value", width=middle)
        return [
            panel(size, "numbers in a layer's state", "state", accuracy, x_scale="log", expand=self.best),
            panel(width, pairs, "pairs", of_middle, x_scale="log", expand=self._by_pairs),
            panel(f"{width}, {size}", "step", "step", learning, expand=self._by_step, markers=False),
        ]

    @property
    def _hardest_size(self) -> str:
        task = self.tasks(self.tested)[self.hardest()]
        return f"{task.pairs} pairs in {task.length} tokens"

    def figure(self, rows: Sequence[Row]) -> Figure:
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        figure, panels = style.figure_of(
            self.panels(),
            rows,
            "What a state of fixed size gives back",
            f"multi-query associative recall, a vocabulary of {self.vocabulary:,}, {layers}; the best of the rates, "
            f"mean and range of {self.seeds} seeds",
        )
        tasks, by_pairs = self.tasks(self.tested), panels[1]
        trained, counts = tasks[self.hardest()].pairs, sorted({task.pairs for task in tasks})
        by_pairs.set_xticks(counts, [str(count) for count in counts])
        by_pairs.minorticks_off()
        if beyond := [count for count in counts if count > trained]:
            start, end = (trained * beyond[0]) ** 0.5, counts[-1] * 1.15
            by_pairs.axvspan(start, end, color=plotting.FAINT, alpha=0.5, lw=0, zorder=0)
            style.note(by_pairs, "longer than\ntrained", (counts[-1] * 1.1, 0.94), (0, 0), ha="right", va="top")
        for axes in panels:
            axes.set_ylim(-0.03, 1.04)
        plotting.legend_below(figure, columns=len(self.rules))
        return figure

    def _by_pairs(self, rows: Sequence[Row]) -> list[Row]:
        """Return one row per tested size and model, with the best rate of each."""
        pairs = [task.pairs for task in self.tasks(self.tested)]
        return [
            {"pairs": count, "accuracy": accuracy}
            for row in self.best(rows)
            for count, accuracy in zip(pairs, row["accuracies"], strict=True)
        ]

    def _by_step(self, rows: Sequence[Row]) -> list[Row]:
        return learning_rows(self.best(rows), "course", self.every)
