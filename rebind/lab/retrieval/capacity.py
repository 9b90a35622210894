"""Setting 1 of Schlag et al.: S keys are written once, and any of them is queried. How many can a feature map hold?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rebind import plotting
from rebind.lab import style
from rebind.lab.experiment import Figure, Point, grid, require_known
from rebind.lab.report import Claim, Table, curve, select
from rebind.lab.retrieval.training import SOLVED, Retrieval, describe_losses, finite_claim
from rebind.storage import Row

FEATURES = {
    "linear": style.line("linear (elu + 1)", plotting.RED),
    "dpfp-1": style.line("DPFP-1", plotting.CYAN),
    "dpfp-2": style.line("DPFP-2", plotting.BLUE),
    "dpfp-3": style.line("DPFP-3", plotting.VIOLET),
    "favor-64": style.line("FAVOR+, m = 64", "#fcd34d"),
    "favor-128": style.line("FAVOR+, m = 128", plotting.AMBER),
    "favor-512": style.line("FAVOR+, m = 512", "#92400e"),
    "softmax": style.line("softmax", plotting.INK),
}
# From the authors' logs, one run per point with keys 64 wide: the largest S solved, and the loss at S = 600.
PUBLISHED = {
    "linear": (40, 0.452),
    "dpfp-1": (100, 0.418),
    "dpfp-2": (240, 0.326),
    "dpfp-3": (340, 0.201),
    "softmax": (340, 0.054),
}
ALSO_PUBLISHED = {"softmax": ", and 480"}  # solved as well, but no size in between


@dataclass(frozen=True)
class Capacity(Retrieval):
    name = "capacity"
    title = "Keys written once and queried once: what each feature map keeps apart, trained"
    answers = "Schlag et al., Figures 2 and 4 (setting 1)"
    cpu_time = "for a GPU"
    gpu_time = "about 10 min"  # estimated from the time per step
    replacement = False
    quick_settings = (
        "seeds=2 sizes=8,16,32 features=linear,dpfp-1,dpfp-2,softmax key_width=16 rate=3e-3 steps=300 every=100"
    )

    sizes: tuple[int, ...] = tuple(range(20, 601, 20))

    def batches(self) -> list[list[Point]]:
        """Return one batch per feature map."""
        require_known("feature", self.features, FEATURES)
        return [grid(feature=[feature], size=self.sizes, seed=range(self.seeds)) for feature in self.features]

    @property
    def _is_as_published(self) -> bool:
        """Whether the numbers can be compared with the published ones."""
        return (self.sizes, self.key_width, self.batch) == (Capacity.sizes, Capacity.key_width, Capacity.batch)

    def table(self, rows: Sequence[Row]) -> Table:
        sizes = sorted({self.sizes[0], self.sizes[len(self.sizes) // 2], self.sizes[-1]})
        published = PUBLISHED if self._is_as_published else {}
        lines = []
        for feature in self.features:
            feature_rows = select(rows, feature=feature)
            losses = [describe_losses(select(feature_rows, size=size)) for size in sizes]
            largest, loss = published.get(feature, ("—", "—"))
            by_every, by_most = largest_solved(feature_rows)
            published_run = f"{largest}{ALSO_PUBLISHED.get(feature, '') if published else ''}"
            lines.append(
                [FEATURES[feature]["label"], *losses, str(loss), f"{by_every:g}", f"{by_most:g}", published_run]
            )
        header = ["φ", *(f"loss at S = {size}" for size in sizes), "published at S = 600"]
        return Table([*header, "largest S solved by every seed", "by most seeds", "by the one published run"], lines)

    def claims(self, rows: Sequence[Row]) -> Iterator[Claim]:
        losses = {feature: curve(rows, "size", "loss", feature=feature).mean for feature in self.features}
        last = {name: losses[name][-1] for name in ("dpfp-3", "dpfp-2", "dpfp-1", "linear") if name in losses}
        yield Claim(
            f"the wider φ, the lower the loss at S = {self.sizes[-1]}",
            all(a < 0.97 * b for a, b in pairwise(last.values())),
            " < ".join(f"{name} {loss:.3f}" for name, loss in last.items()),
        )
        growth = min(loss[-1] / loss[0] for name, loss in losses.items() if name != "softmax")
        statement = "every fixed width is outgrown: its loss rises with S"
        yield Claim(statement, growth > 1.5, f"by {growth:.1f} times or more")
        if "softmax" in losses:
            loss = losses["softmax"][-1]
            statement = "softmax, where memory grows with the sequence, has the lowest loss"
            yield Claim(statement, loss < min(last.values()), f"{loss:.3f}")
        yield finite_claim(rows)
        if self._is_as_published:
            solved = {name: largest_solved(select(rows, feature=name))[1] for name in PUBLISHED if name in losses}
            measured = ", ".join(f"{name} {size:g} ({PUBLISHED[name][0]})" for name, size in solved.items())
            holds = all(size >= PUBLISHED[name][0] for name, size in solved.items())
            statement = "most seeds of each solve what its one published run did, or more"
            yield Claim(statement, holds, f"largest S (published): {measured}")

    def panels(self) -> list[style.Panel]:
        looks, largest = {feature: FEATURES[feature] for feature in self.features}, self.sizes[-1]
        loss = style.by("feature", looks, "loss")
        return [
            style.Panel("loss at the end", "S, keys", "size", loss, "½‖o − v‖²", y_scale="log"),
            self.learning_panel(f"learning at S = {largest}", style.by("feature", looks, "value", size=largest)),
        ]

    def figure(self, rows: Sequence[Row]) -> Figure:
        figure, (loss, _) = style.figure_of(
            self.panels(),
            rows,
            "How many keys a feature map keeps apart",
            f"S keys written once, any of them queried; trained for up to {self.steps:,} steps; mean and range of "
            f"{self.seeds} seeds",
        )
        style.mark_level(loss, SOLVED, "solved")
        plotting.legend_below(figure, columns=4)
        return figure


def largest_solved(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the largest S that every seed solves, and the largest that most seeds solve; 0 if there is none."""
    solved = curve([{"size": row["size"], "solved": row["loss"] <= SOLVED} for row in rows], "size", "solved")
    every = max((size for size, least in zip(solved.x, solved.low, strict=True) if least), default=0)
    return every, max((size for size, share in solved.points if share > 0.5), default=0)
