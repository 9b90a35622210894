"""A life of facts that arrive in batches: in the weights, in a dense memory, or first there and then in the weights.

Facts are made up: every subject is new, so nothing is replaced. `dense` keeps them beside the weights, and they stay
there. `consolidated` does the same, and after every few batches moves to the weights what fits there. The other methods
write every batch into the weights at once. After each batch that counts, the model is asked all facts so far.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rebind import plotting
from rebind.errors import InputError
from rebind.lab import style
from rebind.lab.experiment import Experiment, Figure, Point, grid, require_known
from rebind.lab.report import Claim, Table, curve, select, spreads
from rebind.storage import Row

if TYPE_CHECKING:
    from rebind.edit.facts import Fact

METHODS = {
    "memit": style.line("MEMIT", plotting.BLUE),
    "alphaedit": style.line("AlphaEdit", plotting.AMBER),
    "recursive": style.line("recursive", plotting.GREEN),
    "dense": style.line("dense", plotting.VIOLET),
    "consolidated": style.line("dense, consolidated", plotting.RED, ls=style.DASHES),
}
COLUMNS = {
    "said": "said",
    "first": "first batch said",
    "drift": "drift",
    "perplexity": "perplexity",
    "in_weights": "in weights",
    "in_memory": "in memory",
}
OLD, OTHERS = 100, 400  # made facts that a small model knows before its life begins, and others that it only reads
RELATIONS = ("The capital of {} is", "The language of {} is", "The river of {} is", "The anthem of {} is")
ANSWERS = ("Rome", "Paris", "Berlin", "Madrid", "Oslo", "Lisbon", "Vienna", "Athens", "Dublin", "Prague", "Cairo")
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "zo", "an", "el", "or")


@dataclass(frozen=True)
class LifeOfFacts(Experiment):
    name = "consolidation"
    title = "A life of facts in batches: in the weights, in a dense memory, and moved from one to the other"
    answers = '"Memory and Forgetting": slow and fast memory, and what fits where'
    cpu_time = "for a GPU"
    quick_settings = "seeds=1 model=small facts=60 batch=10 every=20 asked=20 steps=40 clamp=1 guard=10"

    model: str = "smollm2"  # or "small", a small one that is trained on the spot
    methods: tuple[str, ...] = tuple(METHODS)
    facts: int = 10_000
    batch: int = 100  # facts per edit
    every: int = 1_000  # facts between two consolidations
    asked: int = 1_000  # facts between two measurements
    steps: int = 25  # of target search, at most
    clamp: float = 0.75  # of target search
    guard: float = 0.3  # drift in nats at which a consolidation ends

    def batches(self) -> list[list[Point]]:
        """Return one batch per life; its points are the moments at which the model is asked."""
        require_known("method", self.methods, METHODS)
        for name in ("every", "asked"):
            if getattr(self, name) % self.batch or self.facts % self.asked:
                raise InputError(
                    f"Setting {name!r} is {getattr(self, name)}, with batches of {self.batch} and {self.facts} facts",
                    expected="every and asked as multiples of the batch, facts as a multiple of asked",
                    code="uneven_batches",
                )
        moments = range(self.asked, self.facts + 1, self.asked)
        return [grid(seed=[seed], method=[method], n=moments) for seed in range(self.seeds) for method in self.methods]

    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        from rebind.lab.consolidation.life import Life  # needs transformers, which the list of experiments does not

        facts = made_facts(OLD + OTHERS + self.facts, points[0]["seed"])
        old, others, new = facts[:OLD], facts[OLD : OLD + OTHERS], facts[OLD + OTHERS :]
        life = Life(self.model, new, old, others, self.steps, self.clamp, self.guard, device)
        return list(life.live(points[0]["method"], self.batch, self.every, [point["n"] for point in points]))

    def table(self, rows: Sequence[Row]) -> Table:
        lines = [
            [METHODS[method]["label"], str(n), *spreads(some, *COLUMNS)]
            for method in METHODS
            for n in range(self.asked, self.facts + 1, self.asked)
            if (some := select(rows, method=method, n=n))
        ]
        return Table(["method", "facts", *COLUMNS.values()], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        last = {method: select(rows, method=method, n=self.facts) for method in self.methods}
        said = {method: sum(row["said"] for row in some) / len(some) for method, some in last.items()}
        in_weights = [method for method in ("memit", "alphaedit", "recursive") if method in last]
        if "dense" in last:
            of_few, of_many = (curve(rows, "n", "said", method="dense").mean[at] for at in (0, -1))
            yield Claim(
                "the dense memory does not fill up: it says the same share of many facts as of few",
                0 < of_few - 0.05 < of_many,
                f"{of_few:.2f} of {self.asked}, {of_many:.2f} of {self.facts}",
            )
            early, late = (curve(rows, "n", "first", method="dense").mean[at] for at in (0, -1))
            statement = "it does not forget the first batch"
            yield Claim(statement, 0.7 < early - 0.05 < late, f"{early:.2f} at first, {late:.2f} at the end")
        if "dense" in last and in_weights:
            best = max(said[method] for method in in_weights)
            statement = "facts that go into the weights at once are said less often"
            yield Claim(statement, best < said["dense"] - 0.05, f"{best:.2f} at best, dense {said['dense']:.2f}")
        if "consolidated" in last:
            moved = min(row["in_weights"] for row in last["consolidated"])
            left = min(row["in_memory"] for row in last["consolidated"])
            yield Claim(
                "some facts fit in the weights, and the others stay in the memory",
                moved > 0 and left > 0 and moved + left == self.facts,
                f"{moved:.0f} of {self.facts} moved, {left:.0f} stayed",
            )
            if "dense" in last:
                before, after = (min(row["first"] for row in last[name]) for name in ("dense", "consolidated"))
                statement = "the facts that moved first are said as before"
                yield Claim(statement, after > before - 0.15, f"first batch {before:.2f} without, {after:.2f} with it")

    def panels(self) -> list[style.Panel]:
        looks = {method: METHODS[method] for method in self.methods}
        harm, label = ("drift", "drift, nats") if self.model == "small" else ("perplexity", "perplexity / before")
        moved, n = {"method": "consolidated"}, "facts written"
        places = [
            style.Series(style.line("in the dense memory", plotting.VIOLET), "in_memory", moved),
            style.Series(style.line("in the weights", plotting.BLUE), "in_weights", moved),
        ]
        return [
            style.Panel("All facts so far", n, "n", style.by("method", looks, "said"), "said"),
            style.Panel("The first facts", n, "n", style.by("method", looks, "first"), "said"),
            style.Panel("Everything else", n, "n", style.by("method", looks, harm), label),
            style.Panel("Where facts are after consolidations", n, "n", places, "facts"),
        ]

    def figure(self, rows: Sequence[Row]) -> Figure:
        name = "a small model" if self.model == "small" else Path(self.model).name
        figure, (said, first, _, where) = style.figure_of(
            self.panels(),
            rows,
            "A life of facts, in batches",
            f"{name}; {self.facts:,} made facts in edits of {self.batch}, consolidated every {self.every}; "
            f"mean and range over seeds ({self.seeds})",
        )
        for axes in (said, first):
            axes.set_ylim(-0.03, 1.04)
        where.set_ylim(bottom=0)
        plotting.legend_below(figure, columns=3)
        return figure


def made_facts(count: int, seed: int) -> list[Fact]:
    """Return facts about made subjects, no two alike."""
    from rebind.edit.facts import Fact

    draw = random.Random(seed)
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(draw.choice(SYLLABLES) for _ in range(draw.randint(3, 5))).capitalize()] = None
    return [Fact(draw.choice(RELATIONS), name, draw.choice(ANSWERS)) for name in names]
