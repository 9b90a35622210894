"""Every experiment's quick version runs, and bears out what it claims."""

from __future__ import annotations

import random

import pytest

from rebind.lab.catalogue import EXPERIMENTS

NAMES = list(EXPERIMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_claims_hold(name, quick):
    failed = [f"{claim.says}: {claim.got}" for claim in quick(name).claims if not claim.holds]
    assert not failed, "; ".join(failed)


@pytest.mark.parametrize("name", NAMES)
def test_claims_can_fail(name, quick):
    """Each claim is refuted by some wrong numbers: none is true of anything."""
    experiment = EXPERIMENTS[name]
    points = [point for batch in experiment.batches(experiment.quick) for point in batch]
    stubborn = set(range(len(quick(name).claims)))
    for draw in range(6):
        scale = (1.0, 1e-4, 1e3)[draw % 3]
        wrong = [
            spoilt(row, point, random.Random(f"{draw} {at}"), scale)
            for at, (row, point) in enumerate(zip(quick(name).rows, points, strict=True))
        ]
        stubborn -= {at for at, claim in enumerate(experiment.claims(experiment.quick, wrong)) if not claim.holds}
    assert not stubborn, [quick(name).claims[at].says for at in stubborn]


def spoilt(row, point, noise, scale):
    """The row of the same point with other numbers in it."""

    def other(value):
        if isinstance(value, bool):
            return noise.random() < 0.5
        return [other(one) for one in value] if isinstance(value, list) else scale * noise.uniform(0.2, 2.0)

    return {name: value if name in point else other(value) for name, value in row.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_has_everything(name, quick):
    folder = quick(name).folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "figure.png",
        "figure.svg",
        "points.jsonl",
        "table.md",
    ]
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure.svg").read_text(encoding="utf-8")
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert "does not hold" not in table
    header = next(line for line in table.splitlines() if line.startswith("| "))
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 2
    assert {line.count("|") for line in rows} == {header.count("|")}


@pytest.mark.parametrize("name", NAMES)
def test_points_are_told_apart(name):
    """A point names what it measures: no two are the same, at either size."""
    experiment = EXPERIMENTS[name]
    for config in (experiment.config, experiment.quick):
        points = [tuple(point.items()) for batch in experiment.batches(config) for point in batch]
        assert len(set(points)) == len(points) > 0
        assert all(batch for batch in experiment.batches(config))
