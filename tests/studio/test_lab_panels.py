"""The panels of the Lab tab: every experiment has them, and they show what the rows say, complete or not."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from rebind.lab import EXPERIMENTS
from rebind.lab.report import select
from rebind.studio.jobs import Job, JobCancelledError, JobControl
from rebind.studio.tabs.lab import measure

CHEAP = {
    "closed-form": "width=8 loads=0.5,1 passes=2 seeds=2",
    "forgetting": "width=8 length=3 streams=2 pools=0.25,0.5 seeds=2",
    "hopfield": "units=20 loads=0.1 probes=4 steps=4 overlaps=0 small=20 starts=4 modern=8 rates=0.125 betas=1 seeds=2",
    "ttt-1d": "tokens=16 widths=2 tasks=4 outer=2 seeds=2",
    "cost": "lengths=8,16,32 heads=1 head_width=4 widths=8,16,32 rows=2 counts=2,4,8 width=8 repeats=1 seeds=2",
    "capacity": "seeds=2 sizes=4 features=dpfp-1 key_width=4 batch=2 steps=2 every=1",
    "overwrite": "seeds=2 sizes=4 features=dpfp-1 rules=sum,delta key_width=4 batch=2 steps=2 every=1",
    "mqar": "seeds=1 rules=sum widths=8 vocabulary=16 trained=8x2 tested=8x2 layers=1 heads=1 rates=1e-2 batch=2 "
    "steps=2 every=1 sequences=2",
}


def cheap(name):
    return EXPERIMENTS[name].quick().with_settings(CHEAP[name].split())


def test_every_experiment_has_panels():
    for experiment in EXPERIMENTS.values():
        panels = experiment.quick().panels()
        assert panels
        for panel in panels:
            empty = panel.to_json([])
            assert empty["title"]
            assert empty["series"]
            assert all(one["x"] == one["mean"] == [] and one["color"].startswith("#") for one in empty["series"])


@pytest.mark.parametrize("name", CHEAP)
def test_panels_show_the_rows_of_every_batch(name):
    experiment = cheap(name)
    rows, shown = [], experiment.panels()
    for batch in experiment.batches():
        results = experiment.measure(batch, torch.device("cpu"))
        rows += [{**point, **result} for point, result in zip(batch, results, strict=True)]
        for panel in shown:
            for series in panel.to_json(rows)["series"]:
                for low, mean, high in zip(series["low"], series["mean"], series["high"], strict=True):
                    assert low <= mean + 1e-12
                    assert mean <= high + 1e-12
    for panel in shown:
        series = panel.to_json(rows)["series"]
        assert any(one["x"] for one in series), f"{panel.title} shows nothing"


def test_a_series_is_the_mean_over_the_seeds():
    experiment = cheap("closed-form")
    rows = []
    for batch in experiment.batches():
        results = experiment.measure(batch, torch.device("cpu"))
        rows += [{**point, **result} for point, result in zip(batch, results, strict=True)]
    panel = experiment.panels()[1].to_json(rows)  # correlated keys
    series = next(one for one in panel["series"] if one["label"] == "sum")
    for x, mean, low in zip(series["x"], series["mean"], series["low"], strict=True):
        errors = [row["error"] for row in select(rows, keys="correlated", rule="sum", load=x)]
        assert mean == pytest.approx(fmean(errors))
        assert low == min(errors)


class Recorder(Job):
    """A job that records what it published and can be cancelled at a number of rows."""

    def update(self, **changes):
        super().update(**changes)
        if "data" in changes:
            self.published = [*getattr(self, "published", []), changes["data"]]
            self.cancel_requested = changes["data"]["done"] >= getattr(self, "cancel_at", 10**9)


def test_a_run_publishes_every_batch_and_ends_with_claims(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("rebind.lab.run.render", lambda figure, form: f"<{form}>".encode())
    monkeypatch.setattr(EXPERIMENTS["closed-form"], "figure", lambda self, rows: None)  # drawing takes seconds
    experiment, job = cheap("closed-form"), Recorder("j1", "lab")
    result = measure(experiment, JobControl(job))
    assert [one["done"] for one in job.published] == [0, 12, 24, 36, 48]
    assert job.published[-1]["done"] == job.published[-1]["total"] == result["points"]
    assert result["panels"] == job.published[-1]["panels"]
    assert {claim["holds"] for claim in result["claims"]} <= {True, False}
    assert result["claims"]
    assert result["table"]["rows"]
    assert result["figure"] == "<svg>"
    assert job.stages[0]["text"] == "measuring"
    assert not list(tmp_path.iterdir())


def test_a_cancelled_run_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = Recorder("j1", "lab")
    job.cancel_at = 20
    with pytest.raises(JobCancelledError):
        measure(cheap("closed-form"), JobControl(job))
    assert job.published[-1]["done"] < job.published[-1]["total"]
    assert not list(tmp_path.iterdir())
