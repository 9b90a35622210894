"""The algebra end to end: bind, recall, rebind, unbind, interference, and how three rules overwrite.

Names stand for random vectors, so every answer below is really read back from a weight matrix.
Run it with `make algebra`; it draws docs/overwriting.png.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rebind.memory import Memory, get_rule

FIGURE = Path(__file__).parent.parent / "docs" / "overwriting.png"
COUNTRIES = ["France", "Japan", "Egypt", "Peru"]
CAPITALS = ["Paris", "Tokyo", "Cairo", "Lima", "Rome"]
console = Console()


class Words:
    """Random unit vectors with names."""

    def __init__(self, names: list[str], width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.names = names
        self.vectors = torch.nn.functional.normalize(torch.randn(len(names), width, generator=generator), dim=-1)

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[self.names.index(name)]

    def nearest(self, vector: Tensor) -> str:
        """Return the closest name and its agreement, or a dash for (nearly) nothing."""
        scores = self.vectors @ vector
        best = int(scores.argmax())
        return "–" if float(scores[best]) < 0.3 else f"{self.names[best]} ({float(scores[best]):.2f})"


def answers(title: str, memory: Memory, keys: Words, values: Words) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("question")
    table.add_column("answer (agreement)")
    for name in COUNTRIES:
        table.add_row(name, values.nearest(memory.recall(keys[name])))
    console.print(table)


def editing() -> None:
    keys, values = Words(COUNTRIES, 64, seed=1), Words(CAPITALS, 32, seed=2)
    memory = Memory(64, 32, rule="delta")
    memory.bind(keys.vectors, values.vectors[:4])
    console.print(memory)
    answers("bind: four facts in one 32×64 matrix", memory, keys, values)
    memory.rebind(keys["France"], values["Rome"], protect=keys.vectors[1:])
    answers("rebind France to Rome, the others protected", memory, keys, values)
    memory.unbind(keys["Peru"], protect=keys.vectors[:3])
    answers("unbind Peru", memory, keys, values)


def interference() -> None:
    table = Table(
        title="interference: what the other keys add to an answer (squared, 1 = as strong as the answer itself)",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("feature")
    table.add_column("width", justify="right")
    counts = (16, 64, 256)
    for count in counts:
        table.add_column(f"{count} keys", justify="right")
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(max(counts), 64, generator=generator)
    for feature, options in (("identity", {}), ("dpfp", {"nu": 1}), ("dpfp", {"nu": 4})):
        memory = Memory(64, 32, feature=feature, **options)
        means = [float(memory.interference(keys[:count]).suffered.mean()) for count in counts]
        table.add_row(repr(memory.feature), str(memory.feature.width), *(f"{mean:.2f}" for mean in means))
    console.print(table)


def overwrite(rule: str, beta: float) -> tuple[float, float, float]:
    """Schlag et al., appendix B: W = v1 k1ᵀ + v2 k2ᵀ, then v3 is written at k2.

    Returns how much of v1 is read at k1, and how much of v2 and of v3 at k2.
    """
    k1, k2 = torch.eye(2, 8, dtype=torch.float64)
    v1, v2, v3 = torch.eye(3, dtype=torch.float64)
    before = torch.outer(v1, k1) + torch.outer(v2, k2)
    gates = {"beta": beta} if "beta" in get_rule(rule).gates else {}
    after = get_rule(rule).write(k2, v3, **gates).apply(before)
    return float(after @ k1 @ v1), float(after @ k2 @ v2), float(after @ k2 @ v3)


def draw() -> None:
    strengths = torch.linspace(0, 1, 21).tolist()
    lines = [
        ("the other key: its own value", "#4269d0", 6.0),
        ("the rewritten key: its old value", "#ff725c", 3.6),
        ("the rewritten key: its new value", "#3ca951", 1.6),
    ]  # thinner lines are drawn over thicker ones, so that lines that coincide are all visible
    titles = {"sum": "sum: only adds", "rfa": "gated: fades everything", "delta": "delta: replaces one"}
    figure, panels = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for panel, (rule, title) in zip(panels, titles.items(), strict=True):
        curves = zip(*(overwrite(rule, beta) for beta in strengths), strict=True)
        for curve, (label, color, thickness) in zip(curves, lines, strict=True):
            panel.plot(strengths, curve, color=color, label=label, linewidth=thickness, solid_capstyle="round")
        panel.set(title=title, xlabel="strength of the write, β", ylim=(-0.05, 1.1), xticks=[0, 0.5, 1])
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("share read back")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(FIGURE, dpi=150, metadata={"Software": None})
    plt.close(figure)


def overwriting() -> None:
    table = Table(
        title="two orthogonal keys are stored; a new value is written at the second with β = 0.5",
        title_justify="left",
        title_style="bold",
    )
    for column in ("rule", "other key, its value", "rewritten key, old value", "rewritten key, new value"):
        table.add_column(column)
    for rule in ("sum", "rfa", "delta"):
        table.add_row(rule, *(f"{share:.2f}" for share in overwrite(rule, 0.5)))
    console.print(table)
    draw()
    console.print(f"drawn for every β: {FIGURE.relative_to(FIGURE.parent.parent)}")


if __name__ == "__main__":
    editing()
    interference()
    overwriting()
