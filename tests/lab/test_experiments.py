"""Every experiment's quick version runs, and supports its claims."""

from __future__ import annotations

import random

import pytest

from rebind.errors import InputError
from rebind.lab import EXPERIMENTS, get_experiment, run_experiment
from rebind.lab.cost import OPS, SOLVES
from tests.support import raises
from tests.test_docs import ROOT, run_blocks

NAMES = list(EXPERIMENTS)
DOCUMENT = ROOT / "docs" / "lab.md"


@pytest.mark.parametrize("name", NAMES)
def test_claims_hold(name, tmp_path):
    """One test per experiment, so that processes that share the tests measure each of them once."""
    experiment = get_experiment(name).quick()
    result = run_experiment(experiment, tmp_path / name)
    assert result.claims
    if name != "cost":  # times depend on what else runs
        assert [f"{claim.statement}: {claim.measured}" for claim in result.failed_claims] == []
    assert_claims_can_fail(experiment, result)
    assert_folder_is_complete(result.folder)


def assert_claims_can_fail(experiment, result):
    """Each claim is refuted by some wrong numbers."""
    points = [point for batch in experiment.batches() for point in batch]
    unrefuted = {claim.statement for claim in result.claims}
    for draw in range(6):
        scale = (1.0, 1e-4, 1e3)[draw % 3]
        wrong = [
            spoil(row, point, random.Random(f"{draw} {at}"), scale)
            for at, (row, point) in enumerate(zip(result.rows, points, strict=True))
        ]
        unrefuted -= {claim.statement for claim in experiment.claims(wrong) if not claim.holds}
    assert unrefuted == set()


def spoil(row, point, noise, scale):
    """Return the row of the same point with other results."""

    def other(value):
        if isinstance(value, bool):
            return noise.random() < 0.5
        return [other(one) for one in value] if isinstance(value, list) else scale * noise.uniform(0.2, 2.0)

    return {name: value if name in point else other(value) for name, value in row.items()}


def assert_folder_is_complete(folder):
    files = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    assert files == ["config.json", "figure.png", "figure.svg", "points.jsonl", "table.md"]
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure.svg").read_text(encoding="utf-8")
    table = [line for line in (folder / "table.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(table) > 2
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_points_are_distinct(name):
    for experiment in (get_experiment(name)(), get_experiment(name).quick()):
        batches = experiment.batches()
        points = [tuple(point.items()) for batch in batches for point in batch]
        assert all(batches)
        assert len(set(points)) == len(points) > 0


def test_costs_that_grow_as_expected_support_the_claims():
    """T² and T for sequences, d³ and d² for solves: the claims follow, whatever this machine does."""
    experiment = get_experiment("cost").quick()
    power = {"attention": 2, "sum": 1, "delta": 1}
    rows = []
    for point in (point for batch in experiment.batches() for point in batch):
        if point["part"] == "sequence":
            size = point["length"] if point["op"] == "attention" else 1
            rows.append({**point, "seconds": point["length"] ** power[point["op"]], "state_bytes": 1024 * size})
        else:
            d, n = point["d"], point["n"]
            rows.append({**point, "seconds": d**3 + n * d if point["solve"] == "direct" else n * d**2})
    assert [claim.statement for claim in experiment.claims(rows) if not claim.holds] == []
    assert set(power) == set(OPS)
    assert len(experiment.table(rows).rows) == len(OPS) + 2 * len(SOLVES)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("closed-form", ["keys=sphere", "loads=0.5", "width=8", "passes=2"]),
        ("forgetting", ["width=8", "streams=2", "pools=0.5"]),
        ("hopfield", ["units=20", "loads=0.1", "modern=8", "rates=0.25", "betas=1", "overlaps=0", "small=20"]),
        ("ttt-1d", ["widths=2", "tasks=4", "outer=2", "tokens=12"]),
        ("cost", ["lengths=16", "widths=8", "counts=2", "width=8", "heads=1"]),
        ("capacity", ["sizes=4", "features=softmax", "steps=4", "every=2"]),
        ("overwrite", ["sizes=4", "rules=delta", "steps=4", "every=2"]),
    ],
)
@pytest.mark.filterwarnings("ignore::rebind.errors.RebindWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:matplotlib")
def test_too_few_points_cost_a_claim_or_a_figure_but_no_measurement(name, words, tmp_path):
    result = run_experiment(get_experiment(name).quick().with_settings([*words, "seeds=1"]), tmp_path / "out")
    assert result.rows
    assert (tmp_path / "out" / "table.md").exists()


@pytest.mark.parametrize(
    ("name", "word", "code"),
    [
        ("capacity", "features=linear,bogus", "unknown_feature"),
        ("overwrite", "features=linear,bogus", "unknown_feature"),
        ("overwrite", "rules=sum,nope", "unknown_rule"),
        ("overwrite", "features=dpfp-1,softmax", "softmax_has_no_rule"),
        ("closed-form", "keys=square", "unknown_keys"),
        ("mqar", "rules=sum,nope", "unknown_rule"),
        ("mqar", "trained=16x4,16x", "invalid_task_size"),
        ("mqar", "tested=16x4,16x5", "invalid_task_size"),
        ("mqar", "tested=64x4", "only_longer_tests"),
        ("mqar", "vocabulary=16", "vocabulary_too_small"),
        ("edits", "methods=memit,nope", "unknown_method"),
        ("consolidation", "methods=memit,nope", "unknown_method"),
        ("consolidation", "every=15", "uneven_batches"),
        ("consolidation", "facts=65", "uneven_batches"),
        ("forgetting", "pools=0.5,8", "pool_too_large"),
        ("forgetting", "length=1", "pool_too_large"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_measured(name, word, code):
    with raises(InputError, code):
        get_experiment(name).quick().with_settings([word]).batches()


@pytest.mark.filterwarnings("ignore::rebind.errors.RebindWarning")
def test_the_python_of_the_document_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_blocks(DOCUMENT) == 1
